"""Qwen3-MoE:  h = x + attention(rms(x));  out = h + experts(rms(h))

Qwen3's attention; a mixture routed by a softmax, without a shared expert. A block is a dense MLP where mlp_only_layers
or decoder_sparse_step say so.
Release: https://huggingface.co/Qwen/Qwen3-30B-A3B
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.places import heads_apart
from transformer_std.config import Layer, SoftmaxTopK, TransformerConfig

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
WEIGHTS = parts.weights(parts.router("mlp.gate"), parts.experts())
VALUES = parts.values(parts.routed(), queries="q_norm", keys="k_norm", view=heads_apart)
TINY = {**parts.TINY_MIXTURE, "head_dim": 24}
DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
    "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    "norm_topk_prob": False,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("max_window_layers", because="where there is a window, every block has it")
    norm, mixture = parts.rms(hf), parts.mixture(hf, SoftmaxTopK(hf.flag("norm_topk_prob")))
    window = hf.optional_whole("sliding_window") if hf.flag("use_sliding_window") else None
    attention = parts.attention(hf, window=window, qk_norm=norm)
    layers = [Layer("sequential", norm, attention, mlp) for mlp in parts.sparse(hf, parts.gated(hf), mixture)]
    return parts.transformer(hf, layers, norm)
