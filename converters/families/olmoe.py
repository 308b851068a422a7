"""OLMoE:  h = x + attention(rms(x));  out = h + experts(rms(h))

Queries and keys are normed over all heads together; a mixture routed by a softmax, without a shared expert.
Release: https://huggingface.co/allenai/OLMoE-1B-7B-0924
"""

from converters import parts
from converters.hf_config import ConfigReader
from transformer_std.config import Layer, SoftmaxTopK, TransformerConfig

ARCHITECTURES = ("OlmoeForCausalLM",)
WEIGHTS = parts.weights(parts.router("mlp.gate"), parts.experts())
VALUES = parts.values(parts.routed(), queries="q_norm", keys="k_norm")
TINY = {**parts.TINY, "num_experts": 7, "num_experts_per_tok": 3}
DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "pad_token_id": 1, "attention_bias": False, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.require("clip_qkv", None)
    norm = parts.rms(hf)
    attention = parts.attention(hf, qk_norm=norm, qk_norm_over="heads")
    mixture = parts.mixture(hf, SoftmaxTopK(hf.flag("norm_topk_prob")), "intermediate_size")
    return parts.transformer(hf, [Layer("sequential", norm, attention, mixture)] * hf.count, norm)
