"""Phi-3.5-MoE:  h = x + attention(layer_norm(x));  out = h + mixture(layer_norm(h))

LayerNorms with a bias (their eps is called rms_norm_eps), biased projections, a biased head. Two slots a token, routed
in turn by sparsemixer; no shared expert, so the routed sum is the mixture's output. `head_dim` is its own number.
Release: https://huggingface.co/microsoft/Phi-3.5-MoE-instruct (SparseMixer-v2, https://arxiv.org/abs/2409.12136)
"""

import dataclasses

from converters.hf_config import ConfigError, ConfigReader, longrope, plain_rotary
from converters.places import Between, Input, Output, by_heads, side_by_side, tokens_apart
from converters.rules import Copy, Ignore, Stack
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Attention, Layer, Mixture, Norm, Rotary, SparseMixer, TransformerConfig

ARCHITECTURES = ("PhiMoEForCausalLM", "PhimoeForCausalLM")

THEIRS, OURS = "model.layers.{i}.", "layers.{i}."
MOE, EXPERT = THEIRS + "block_sparse_moe.", THEIRS + "block_sparse_moe.experts.{e}."

WEIGHTS = [
    Copy("model.embed_tokens.weight", "embed_tokens.weight"),
    Copy(THEIRS + "input_layernorm.weight", OURS + "attention_norm.weight"),
    Copy(THEIRS + "input_layernorm.bias", OURS + "attention_norm.bias"),
    Copy(THEIRS + "self_attn.q_proj.weight", OURS + "self_attn.projections.q.weight"),
    Copy(THEIRS + "self_attn.q_proj.bias", OURS + "self_attn.projections.q.bias"),
    Copy(THEIRS + "self_attn.k_proj.weight", OURS + "self_attn.projections.k.weight"),
    Copy(THEIRS + "self_attn.k_proj.bias", OURS + "self_attn.projections.k.bias"),
    Copy(THEIRS + "self_attn.v_proj.weight", OURS + "self_attn.projections.v.weight"),
    Copy(THEIRS + "self_attn.v_proj.bias", OURS + "self_attn.projections.v.bias"),
    Copy(THEIRS + "self_attn.o_proj.weight", OURS + "self_attn.o.weight"),
    Copy(THEIRS + "self_attn.o_proj.bias", OURS + "self_attn.o.bias"),
    Copy(THEIRS + "post_attention_layernorm.weight", OURS + "mlp_norm.weight"),
    Copy(THEIRS + "post_attention_layernorm.bias", OURS + "mlp_norm.bias"),
    Copy(MOE + "gate.weight", OURS + "mlp.router.weight"),
    Stack((EXPERT + "w1.weight", EXPERT + "w3.weight"), OURS + "mlp.experts.gate_up"),
    Stack((EXPERT + "w2.weight",), OURS + "mlp.experts.down"),
    # as transformers 5 has them in memory
    Copy(THEIRS + "mlp.router.weight", OURS + "mlp.router.weight"),
    Copy(THEIRS + "mlp.experts.gate_up_proj", OURS + "mlp.experts.gate_up"),
    Copy(THEIRS + "mlp.experts.down_proj", OURS + "mlp.experts.down"),
    Copy("model.norm.weight", "norm.weight"),
    Copy("model.norm.bias", "norm.bias"),
    Copy("lm_head.weight", "lm_head.weight"),
    Copy("lm_head.bias", "lm_head.bias"),
    Ignore(THEIRS + "self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore("model.rotary_emb.inv_freq", because="recomputed from the config"),
]

VALUES = {
    "token_embeddings": Output("model.embed_tokens"),
    OURS + "layer_input": Input("model.layers.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "input_layernorm"),
    OURS + "attention_input": Input(THEIRS + "self_attn"),
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn.q_proj", view=by_heads),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn.k_proj", view=by_heads),
    OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.o_proj", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "self_attn.o_proj"),
    OURS + "layer_mid": Input(THEIRS + "post_attention_layernorm", stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "post_attention_layernorm"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.router_logits": Between(THEIRS + "mlp.router", "linear", "output", view=tokens_apart),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp"),
    OURS + "layer_output": Output("model.layers.{i}"),
    "final_norm_output": Output("model.norm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}

# A config of the family that a demonstration or a test makes a checkpoint of; every width is another number.
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


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("attention_dropout", "hidden_dropout", "expert_dropout", because="dropout is for training; we have none")
    hf.require("num_experts_per_tok", 2)
    hidden_size = hf.whole("hidden_size", 4096)
    heads, kv_heads, head_dim = hf.heads(hidden_size, 32, 8)
    norm = Norm("layer", hf.number("rms_norm_eps", 1e-5))
    bias = hf.flag("attention_bias", False)
    max_length = hf.whole("max_position_embeddings", 131072)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=_rotary(hf, head_dim, max_length),
        window=hf.whole("sliding_window") if hf.take("sliding_window") is not None else None,
        bias=bias,
        output_bias=bias,
    )
    mixture = Mixture(
        intermediate_size=hf.whole("intermediate_size", 6400),
        activation=hf.one_of("hidden_act", ACTIVATIONS, "silu"),
        num_experts=hf.whole("num_local_experts", 16, least=2),
        top_k=2,
        router=SparseMixer(hf.number("router_jitter_noise", 0.01), hf.number("input_jitter_noise", 0.0)),
    )
    vocab_size = hf.whole("vocab_size", 32064)
    return TransformerConfig(
        vocab_size=vocab_size,
        padding_id=hf.token("pad_token_id", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=mixture.intermediate_size,
        max_length=max_length,
        layers=(Layer("sequential", norm, attention, mixture),) * hf.whole("num_hidden_layers", 32),
        norm=norm,
        tied_head=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.initializer_range(),
        head_bias=hf.flag("lm_head_bias", False),
    )


def _rotary(hf: ConfigReader, head_dim: int, max_length: int) -> Rotary:
    rope = hf.rope(theta=1_000_000.0)
    hf.ignore("original_max_position_embeddings", because="transformers reads it within the rope settings")
    if rope["rope_type"] != "longrope":
        return plain_rotary(rope, head_dim, hf.family)
    rope.setdefault("original_max_position_embeddings", max_length)
    rotary = longrope(rope, head_dim, hf.family, known=("short_mscale", "long_mscale", "factor", "attention_factor"))
    scales = [rope.get(key) for key in ("short_mscale", "long_mscale")]
    if not all(isinstance(scale, (int, float)) for scale in scales):
        raise ConfigError(f"rope short_mscale and long_mscale are {scales}; phimoe needs two numbers")
    # We follow transformers (5.24): past the original length it turns the scale long and keeps the short factors.
    return dataclasses.replace(
        rotary, long_factors=rotary.short_factors, short_scale=float(scales[0]), long_scale=float(scales[1])
    )
