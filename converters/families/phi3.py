"""Phi-3 / 3.5 / 4:  h = x + attention(rms(x));  out = h + mlp(rms(h))

One matrix for queries, keys and values, one for gate and up, no biases. The 128k checkpoints scale the rotary by
longrope: short factors up to the original length, long ones for every position of a pass that reaches past it, and one
scale of cos and sin at every length. Phi-4-mini turns three quarters of each head. The 4k checkpoints have a window.
Release: https://huggingface.co/microsoft/Phi-3-mini-4k-instruct
"""

import dataclasses
from typing import Any

from converters import parts
from converters import rope as ropes
from converters.hf_config import ConfigReader
from converters.parts import OURS, THEIRS
from converters.places import Output, Places, first_half, fused_keys, fused_queries, second_half
from converters.rope import SCALINGS, Settings, rotary
from converters.rules import Copy
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Layer, Mlp, Scaling, TransformerConfig

ARCHITECTURES = ("Phi3ForCausalLM",)
FIRST_NAMES = ("su", "yarn")  # of longrope, in the first releases

WEIGHTS = [
    *parts.weights(),
    Copy(THEIRS + "self_attn.qkv_proj.weight", OURS + "self_attn.projections.qkv.weight"),
    Copy(THEIRS + "mlp.gate_up_proj.weight", OURS + "mlp.gate_up.weight"),
]
FUSED: dict[str, Places] = {
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn.qkv_proj", view=fused_queries),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn.qkv_proj", view=fused_keys),
    OURS + "mlp.mlp_preactivation": Output(THEIRS + "mlp.gate_up_proj", view=first_half),
    OURS + "mlp.mlp_up": Output(THEIRS + "mlp.gate_up_proj", view=second_half),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.activation_fn"),
}
VALUES = parts.values(FUSED)
TINY = parts.TINY
DEFAULTS = {
    "vocab_size": 32064, "pad_token_id": 32000, "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        hf.require(key, False)
    hf.require("full_attn_mod", 1)
    hf.require("interpolate_factor", 1)
    hf.whole("original_max_position_embeddings")
    norm = parts.rms(hf)
    attention = parts.attention(
        hf,
        rotary=rotary(hf, hf.heads()[2], scalings=SCALING, contiguous=True),
        window=hf.optional_whole("sliding_window"),
        fused=True,
    )
    mlp = Mlp(hf.whole("intermediate_size"), hf.one_of("hidden_act", ACTIVATIONS), "fused")
    return parts.transformer(hf, [Layer("sequential", norm, attention, mlp)] * hf.count, norm)


def longrope(rope: Settings, dims: int) -> Scaling:
    """Its generation reads the text again where it passes the original length."""
    return dataclasses.replace(ropes.longrope(rope, dims), rereads=True)


SCALING = {"default": SCALINGS["default"], "longrope": longrope, **dict.fromkeys(FIRST_NAMES, longrope)}


def spelled_for_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """The config with the one name of longrope that transformers reads."""

    def named(rope: Any) -> Any:
        kinds = {"type", "rope_type"} & set(rope or ())
        return {**rope, **{kind: "longrope" for kind in kinds if rope[kind] in FIRST_NAMES}} if kinds else rope

    return {key: named(value) if key in ("rope_scaling", "rope_parameters") else value for key, value in values.items()}
