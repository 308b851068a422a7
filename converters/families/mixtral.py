"""Mixtral:  h = x + attention(rms(x));  out = h + experts(rms(h))

Mistral's attention; a mixture routed by a softmax whose top shares, in float32 throughout, are made to sum to one.
Release: https://huggingface.co/mistralai/Mixtral-8x7B-v0.1
"""

from converters import parts
from converters.hf_config import ConfigReader
from transformer_std.config import Layer, SoftmaxTopK, TransformerConfig

ARCHITECTURES = ("MixtralForCausalLM",)
WEIGHTS = parts.weights(
    parts.router("block_sparse_moe.gate", "mlp.gate"), parts.experts("block_sparse_moe.", "w1", "w3", "w2")
)
VALUES = parts.values(parts.routed())
TINY = {**parts.TINY, "num_local_experts": 7, "num_experts_per_tok": 3}
DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("router_jitter_noise", because="noise is for training; we have none")
    norm, attention = parts.rms(hf), parts.attention(hf, window=hf.optional_whole("sliding_window"))
    router = SoftmaxTopK(normalized=True, wide=True)
    mixture = parts.mixture(hf, router, "intermediate_size")
    return parts.transformer(hf, [Layer("sequential", norm, attention, mixture)] * hf.count, norm)
