"""GPT-NeoX, Pythia:  out = attention(norm1(x)) + mlp(norm2(x)) + x

A parallel block with a LayerNorm for each sublayer (sequential where `use_parallel_residual` is off). Every projection
has a bias, the head none. One matrix holds queries, keys and values, head after head. The rotary turns the first
`rotary_pct` of each head.
Release: https://huggingface.co/EleutherAI/pythia-160m
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import OURS, both
from converters.places import Input, Output, by_head_keys, by_head_queries, side_by_side
from converters.rope import rotary
from converters.rules import Copy, Ignore
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Layer, Mlp, Norm, TransformerConfig

ARCHITECTURES = ("GPTNeoXForCausalLM",)
THEIRS = "gpt_neox.layers.{i}."
WEIGHTS = [
    Copy("gpt_neox.embed_in.weight", "embed_tokens.weight"),
    *both(THEIRS + "input_layernorm", OURS + "attention_norm"),
    *both(THEIRS + "attention.query_key_value", OURS + "self_attn.projections.qkv"),
    *both(THEIRS + "attention.dense", OURS + "self_attn.o"),
    *both(THEIRS + "post_attention_layernorm", OURS + "mlp_norm"),
    *both(THEIRS + "mlp.dense_h_to_4h", OURS + "mlp.up"),
    *both(THEIRS + "mlp.dense_4h_to_h", OURS + "mlp.down"),
    *both("gpt_neox.final_layer_norm", "norm"),
    Copy("embed_out.weight", "lm_head.weight"),
    Copy("lm_head.weight", "lm_head.weight"),  # as transformers 5 has it in memory
    Ignore(THEIRS + "attention.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore("gpt_neox.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore(THEIRS + "attention.bias", because="the causal mask"),
    Ignore(THEIRS + "attention.masked_bias", because="what the causal mask fills in"),
]
VALUES = {
    "token_embeddings": Output("gpt_neox.embed_in"),
    OURS + "layer_input": Input("gpt_neox.layers.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "input_layernorm"),
    OURS + "attention_input": Input(THEIRS + "attention"),
    OURS + "self_attn.attention_queries_before_rotary": Output(
        THEIRS + "attention.query_key_value", view=by_head_queries
    ),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "attention.query_key_value", view=by_head_keys),
    OURS + "self_attn.attention_premix": Input(THEIRS + "attention.dense", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "attention.dense"),
    OURS + "layer_mid": Input(THEIRS + "post_attention_layernorm", stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "post_attention_layernorm"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Input(THEIRS + "mlp.act"),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.act"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.dense_4h_to_h"),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp.dense_4h_to_h"),
    OURS + "layer_output": Output("gpt_neox.layers.{i}"),
    "final_norm_output": Output("gpt_neox.final_layer_norm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}
TINY = {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_hidden_layers": 3}
DEFAULTS = {
    "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
    "num_attention_heads": 64, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25, "attention_bias": True, "use_parallel_residual": True,
}  # fmt: skip
SPELLED = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("attention_probs_dropout_prob", "hidden_dropout_prob", because="dropout is for training; we have none")
    norm = Norm("layer", hf.number("layer_norm_eps"))
    attention = parts.attention(hf, rotary=rotary(hf, hf.heads()[2], contiguous=True), fused="by_head")
    mlp = Mlp(hf.whole("intermediate_size"), hf.one_of("hidden_act", ACTIVATIONS), "plain", bias=True)
    layer = Layer("parallel_two_norms" if hf.flag("use_parallel_residual") else "sequential", norm, attention, mlp)
    return parts.transformer(hf, [layer] * hf.count, norm, padding_id=None)
