"""Phi-3.5-MoE:  h = x + attention(layer_norm(x));  out = h + mixture(layer_norm(h))

LayerNorms with a bias (their eps is called rms_norm_eps), biased projections, a biased head. Two slots a token, routed
in turn by sparsemixer; no shared expert, so the routed sum is the mixture's output. `head_dim` is its own number.
Release: https://huggingface.co/microsoft/Phi-3.5-MoE-instruct (SparseMixer-v2, https://arxiv.org/abs/2409.12136)
"""

from converters import parts
from converters import rope as ropes
from converters.hf_config import ConfigReader
from converters.parts import OURS, THEIRS
from converters.places import Between, tokens_apart
from converters.rope import SCALINGS, Settings, rotary
from transformer_std.config import Layer, LongRope, Norm, Scaling, SparseMixer, TransformerConfig

ARCHITECTURES = ("PhiMoEForCausalLM", "PhimoeForCausalLM")
WEIGHTS = parts.weights(
    parts.router("block_sparse_moe.gate", "mlp.router"), parts.experts("block_sparse_moe.", "w1", "w3", "w2")
)
VALUES = parts.values(
    {OURS + "mlp.router_logits": Between(THEIRS + "mlp.router", "linear", "output", view=tokens_apart)}
)
TINY = {
    "hidden_size": 96,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "attention_bias": True,
    "lm_head_bias": True,
    "router_jitter_noise": 0.3,
}
DEFAULTS = {
    "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "attention_bias": False, "lm_head_bias": False,
    "num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01, "input_jitter_noise": 0.0,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.require("num_experts_per_tok", 2)
    hf.whole("num_local_experts", least=2)
    hf.ignore("original_max_position_embeddings", because="transformers reads it within the rope settings")
    norm = Norm("layer", hf.number("rms_norm_eps"))
    attention = parts.attention(
        hf, rotary=rotary(hf, hf.heads()[2], scalings=SCALING), window=hf.optional_whole("sliding_window")
    )
    router = SparseMixer(hf.number("router_jitter_noise"), hf.number("input_jitter_noise"))
    mixture = parts.mixture(hf, router, "intermediate_size")
    layer = Layer("sequential", norm, attention, mixture)
    return parts.transformer(hf, [layer] * hf.count, norm, head_bias=hf.flag("lm_head_bias"))


def longrope(rope: Settings, dims: int) -> Scaling:
    """We follow transformers (5.24): past the original length it turns the scale long and keeps the short factors."""
    short, long = rope.number("short_mscale"), rope.number("long_mscale")
    made, key = ropes.longrope(rope, dims), "original_max_position_embeddings"
    factors = {"short_factors": made.short_factors, "long_factors": made.short_factors}
    length = rope.take(key, rope.hf.take("max_position_embeddings"))
    return LongRope(**factors, original_length=length, scale=short, long_scale=long, rereads=True)


SCALING = {"default": SCALINGS["default"], "longrope": longrope}
