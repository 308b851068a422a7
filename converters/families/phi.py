"""Phi-1 / 1.5 / 2:  h = layer_norm(x);  out = attention(h) + mlp(h) + x

A parallel block with one LayerNorm. Every projection and the head have a bias. The rotary turns the first
`partial_rotary_factor` of each head. `qk_layernorm`, off in the releases, norms each query and key head before it.
Release: https://huggingface.co/microsoft/phi-2
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import OURS, THEIRS, both
from converters.places import Input, Output, by_heads, side_by_side
from converters.rope import rotary
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Layer, Mlp, Norm, TransformerConfig

ARCHITECTURES = ("PhiForCausalLM",)

WEIGHTS = [
    *both(THEIRS + "self_attn.dense", OURS + "self_attn.o"),
    *both(THEIRS + "self_attn.q_layernorm", OURS + "self_attn.q_norm"),
    *both(THEIRS + "self_attn.k_layernorm", OURS + "self_attn.k_norm"),
    *both(THEIRS + "mlp.fc1", OURS + "mlp.up"),
    *both(THEIRS + "mlp.fc2", OURS + "mlp.down"),
    *both("model.final_layernorm", "norm"),
    *parts.weights(second=None),
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

TINY = {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_hidden_layers": 3}
DEFAULTS = {
    "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5, "qk_layernorm": False,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    norm = Norm("layer", hf.number("layer_norm_eps"))
    attention = parts.attention(
        hf,
        rotary=rotary(hf, hf.heads()[2], contiguous=True),
        bias=True,
        output_bias=True,
        qk_norm=norm if hf.flag("qk_layernorm") else None,
    )
    mlp = Mlp(hf.whole("intermediate_size"), hf.one_of("hidden_act", ACTIVATIONS), "plain", bias=True)
    return parts.transformer(hf, [Layer("parallel", norm, attention, mlp)] * hf.count, norm, head_bias=True)
