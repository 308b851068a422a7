"""Phi-1 / 1.5 / 2:  h = layer_norm(x);  out = attention(h) + mlp(h) + x

A parallel block with one LayerNorm. Every projection and the head have a bias. The rotary turns the first
`partial_rotary_factor` of each head. `qk_layernorm`, off in the releases, norms each query and key head before it.
Release: https://huggingface.co/microsoft/phi-2
"""

from converters.hf_config import ConfigReader, plain_rotary
from converters.places import Input, Output, by_heads, side_by_side
from converters.rules import Copy, Ignore
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Attention, Layer, Mlp, Norm, TransformerConfig

ARCHITECTURES = ("PhiForCausalLM",)

THEIRS, OURS = "model.layers.{i}.", "layers.{i}."

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
    Copy(THEIRS + "self_attn.q_layernorm.weight", OURS + "self_attn.q_norm.weight"),
    Copy(THEIRS + "self_attn.q_layernorm.bias", OURS + "self_attn.q_norm.bias"),
    Copy(THEIRS + "self_attn.k_layernorm.weight", OURS + "self_attn.k_norm.weight"),
    Copy(THEIRS + "self_attn.k_layernorm.bias", OURS + "self_attn.k_norm.bias"),
    Copy(THEIRS + "self_attn.dense.weight", OURS + "self_attn.o.weight"),
    Copy(THEIRS + "self_attn.dense.bias", OURS + "self_attn.o.bias"),
    Copy(THEIRS + "mlp.fc1.weight", OURS + "mlp.up.weight"),
    Copy(THEIRS + "mlp.fc1.bias", OURS + "mlp.up.bias"),
    Copy(THEIRS + "mlp.fc2.weight", OURS + "mlp.down.weight"),
    Copy(THEIRS + "mlp.fc2.bias", OURS + "mlp.down.bias"),
    Copy("model.final_layernorm.weight", "norm.weight"),
    Copy("model.final_layernorm.bias", "norm.bias"),
    Copy("lm_head.weight", "lm_head.weight"),
    Copy("lm_head.bias", "lm_head.bias"),
    Ignore(THEIRS + "self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore("model.rotary_emb.inv_freq", because="recomputed from the config"),
]

VALUES = {
    "token_embeddings": Output("model.embed_tokens"),
    OURS + "layer_input": Input("model.layers.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "input_layernorm"),
    OURS + "mlp_norm_output": Output(THEIRS + "input_layernorm"),
    OURS + "attention_input": Input(THEIRS + "self_attn"),
    OURS + "self_attn.attention_queries_before_rotary": [
        Output(THEIRS + "self_attn.q_layernorm"),
        Output(THEIRS + "self_attn.q_proj", view=by_heads),
    ],
    OURS + "self_attn.attention_keys_before_rotary": [
        Output(THEIRS + "self_attn.k_layernorm"),
        Output(THEIRS + "self_attn.k_proj", view=by_heads),
    ],
    OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.dense", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "self_attn.dense"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Input(THEIRS + "mlp.activation_fn"),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.activation_fn"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.fc2"),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp.fc2"),
    OURS + "layer_output": Output("model.layers.{i}"),
    "final_norm_output": Output("model.final_layernorm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}

# A config of the family that a demonstration or a test makes a checkpoint of; every width is another number.
TINY = {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_hidden_layers": 3}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("resid_pdrop", "embd_pdrop", "attention_dropout", because="dropout is for training; we have none")
    hidden_size = hf.whole("hidden_size", 2048)
    heads, kv_heads, head_dim = hf.heads(hidden_size, 32)
    norm = Norm("layer", hf.number("layer_norm_eps", 1e-5))
    attention = Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=plain_rotary(hf.rope(theta=10_000.0, partial=0.5), head_dim, hf.family, joined=True),
        bias=True,
        output_bias=True,
        qk_norm=norm if hf.flag("qk_layernorm", False) else None,
    )
    mlp = Mlp(
        intermediate_size=hf.whole("intermediate_size", 8192),
        activation=hf.one_of("hidden_act", ACTIVATIONS, "gelu_new"),
        kind="plain",
        bias=True,
    )
    vocab_size = hf.whole("vocab_size", 51200)
    return TransformerConfig(
        vocab_size=vocab_size,
        padding_id=hf.token("pad_token_id", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=mlp.intermediate_size,
        max_length=hf.whole("max_position_embeddings", 2048),
        layers=(Layer("parallel", norm, attention, mlp),) * hf.whole("num_hidden_layers", 24),
        norm=norm,
        tied_head=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.initializer_range(),
        head_bias=True,
    )
