"""Phi-3 / 3.5 / 4:  h = x + attention(rms(x));  out = h + mlp(rms(h))

One matrix for queries, keys and values, one for gate and up, no biases. The 128k checkpoints scale the rotary by
longrope: short factors up to the original length, long ones for every position of a pass that reaches past it, and one
scale of cos and sin at every length. Phi-4-mini turns three quarters of each head. The 4k checkpoints have a window.
Release: https://huggingface.co/microsoft/Phi-3-mini-4k-instruct
"""

import dataclasses
import math
from typing import Any

from converters.hf_config import ConfigReader, longrope, plain_rotary
from converters.places import Input, Output, first_half, fused_keys, fused_queries, second_half, side_by_side
from converters.rules import Copy, Ignore
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Attention, Layer, Mlp, Norm, Rotary, TransformerConfig

ARCHITECTURES = ("Phi3ForCausalLM",)
FIRST_NAMES = ("su", "yarn")  # of longrope, in the first releases

THEIRS, OURS = "model.layers.{i}.", "layers.{i}."

WEIGHTS = [
    Copy("model.embed_tokens.weight", "embed_tokens.weight"),
    Copy(THEIRS + "input_layernorm.weight", OURS + "attention_norm.weight"),
    Copy(THEIRS + "self_attn.qkv_proj.weight", OURS + "self_attn.projections.qkv.weight"),
    Copy(THEIRS + "self_attn.o_proj.weight", OURS + "self_attn.o.weight"),
    Copy(THEIRS + "post_attention_layernorm.weight", OURS + "mlp_norm.weight"),
    Copy(THEIRS + "mlp.gate_up_proj.weight", OURS + "mlp.gate_up.weight"),
    Copy(THEIRS + "mlp.down_proj.weight", OURS + "mlp.down.weight"),
    Copy("model.norm.weight", "norm.weight"),
    Copy("lm_head.weight", "lm_head.weight"),
    Ignore(THEIRS + "self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore("model.rotary_emb.inv_freq", because="recomputed from the config"),
]

VALUES = {
    "token_embeddings": Output("model.embed_tokens"),
    OURS + "layer_input": Input("model.layers.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "input_layernorm"),
    OURS + "attention_input": Input(THEIRS + "self_attn"),
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn.qkv_proj", view=fused_queries),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn.qkv_proj", view=fused_keys),
    OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.o_proj", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "self_attn.o_proj"),
    OURS + "layer_mid": Input(THEIRS + "post_attention_layernorm", stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "post_attention_layernorm"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Output(THEIRS + "mlp.gate_up_proj", view=first_half),
    OURS + "mlp.mlp_up": Output(THEIRS + "mlp.gate_up_proj", view=second_half),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.activation_fn"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.down_proj"),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp.down_proj"),
    OURS + "layer_output": Output("model.layers.{i}"),
    "final_norm_output": Output("model.norm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}

# A config of the family that a demonstration or a test makes a checkpoint of; every width is another number.
TINY = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("resid_pdrop", "embd_pdrop", "attention_dropout", because="dropout is for training; we have none")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        hf.require(key, False)
    hf.require("full_attn_mod", 1)
    hf.require("interpolate_factor", 1)
    hidden_size = hf.whole("hidden_size", 3072)
    max_length = hf.whole("max_position_embeddings", 4096)
    heads, kv_heads, head_dim = hf.heads(hidden_size, 32)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    attention = Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=_rotary(hf, head_dim, max_length),
        window=hf.whole("sliding_window") if hf.take("sliding_window") is not None else None,
        fused=True,
    )
    mlp = Mlp(hf.whole("intermediate_size", 8192), hf.one_of("hidden_act", ACTIVATIONS, "silu"), kind="fused")
    vocab_size = hf.whole("vocab_size", 32064)
    return TransformerConfig(
        vocab_size=vocab_size,
        padding_id=hf.token("pad_token_id", vocab_size, 32000),
        hidden_size=hidden_size,
        intermediate_size=mlp.intermediate_size,
        max_length=max_length,
        layers=(Layer("sequential", norm, attention, mlp),) * hf.whole("num_hidden_layers", 32),
        norm=norm,
        tied_head=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.initializer_range(),
    )


def _rotary(hf: ConfigReader, head_dim: int, max_length: int) -> Rotary:
    original = hf.whole("original_max_position_embeddings", 4096)
    rope = hf.rope(theta=10_000.0, partial=1.0)
    if rope["rope_type"] in FIRST_NAMES:
        rope["rope_type"] = "longrope"
    if rope["rope_type"] != "longrope":
        return plain_rotary(rope, head_dim, hf.family, joined=True)
    # transformers, too, puts the top level's original length before the rope settings' own.
    rope["original_max_position_embeddings"] = original
    rotary = longrope(rope, head_dim, hf.family, known=("factor", "attention_factor"))
    factor = rope.get("factor", max_length / original)
    scale = rope.get("attention_factor", math.sqrt(1 + math.log(max(factor, 1)) / math.log(original)))
    return dataclasses.replace(rotary, short_scale=float(scale), long_scale=float(scale), joined=True)


def spelled_for_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """The config with the one name of longrope that transformers reads."""

    def named(rope: Any) -> Any:
        kinds = {"type", "rope_type"} & set(rope or ())
        return {**rope, **{kind: "longrope" for kind in kinds if rope[kind] in FIRST_NAMES}} if kinds else rope

    return {key: named(value) if key in ("rope_scaling", "rope_parameters") else value for key, value in values.items()}
