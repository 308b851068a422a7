"""OPT:  h = x + attention(norm(x));  out = h + mlp(norm(h))

GPT-2's block with a matrix each for queries, keys and values and a ReLU; the queries are scaled, not the scores. The
first learned position has row 2. opt-350m, whose norms come after the sum, is refused.
Release: https://huggingface.co/facebook/opt-125m
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import OURS, both
from converters.places import Input, Output, by_heads, side_by_side, tokens_apart
from converters.rules import Copy
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Layer, Mlp, Norm, Positions, TransformerConfig

ARCHITECTURES = ("OPTForCausalLM",)
THEIRS = "model.decoder.layers.{i}."
WEIGHTS = [
    Copy("model.decoder.embed_tokens.weight", "embed_tokens.weight"),
    Copy("model.decoder.embed_positions.weight", "embed_positions.weight"),
    *both(THEIRS + "self_attn_layer_norm", OURS + "attention_norm"),
    *[rule for each in "qkv" for rule in both(f"{THEIRS}self_attn.{each}_proj", f"{OURS}self_attn.projections.{each}")],
    *both(THEIRS + "self_attn.out_proj", OURS + "self_attn.o"),
    *both(THEIRS + "final_layer_norm", OURS + "mlp_norm"),
    *both(THEIRS + "fc1", OURS + "mlp.up"),
    *both(THEIRS + "fc2", OURS + "mlp.down"),
    *both("model.decoder.final_layer_norm", "norm"),
    Copy("lm_head.weight", "lm_head.weight"),
]
VALUES = {
    "token_embeddings": Output("model.decoder.embed_tokens"),
    "position_embeddings": Output("model.decoder.embed_positions", each_row=True),
    OURS + "layer_input": Input("model.decoder.layers.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "self_attn_layer_norm"),
    OURS + "attention_input": Input(THEIRS + "self_attn"),
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn.q_proj", view=by_heads),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn.k_proj", view=by_heads),
    OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.out_proj", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "self_attn.out_proj"),
    OURS + "layer_mid": Input(THEIRS + "final_layer_norm", view=tokens_apart, stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "final_layer_norm", view=tokens_apart),
    OURS + "mlp_input": Input(THEIRS + "fc1", view=tokens_apart),
    OURS + "mlp.mlp_preactivation": Output(THEIRS + "fc1", view=tokens_apart),
    OURS + "mlp.mlp_activation": Output(THEIRS + "activation_fn", view=tokens_apart),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "fc2", view=tokens_apart),
    OURS + "mlp.mlp_output": Output(THEIRS + "fc2", view=tokens_apart),
    OURS + "layer_output": Output("model.decoder.layers.{i}"),
    "final_norm_output": Output("model.decoder.final_layer_norm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}
TINY = {
    "hidden_size": 96, "word_embed_proj_dim": 96, "ffn_dim": 80, "num_attention_heads": 6, "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 50272, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "hidden_act": "relu", "max_position_embeddings": 2048, "pad_token_id": 1,
    "tie_word_embeddings": True, "enable_bias": True,
}  # fmt: skip
SPELLED = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "initializer_range": "init_std"}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("dropout", "layerdrop", because="for training; we have none")
    hf.ignore("output_projection", because="of the first release; nothing reads it")
    hf.require("do_layer_norm_before", True)
    hf.require("word_embed_proj_dim", hf.whole("hidden_size"))
    hf.require("layer_norm_elementwise_affine", True)
    hf.require("_remove_final_layer_norm", False)
    norm, bias = Norm("layer", 1e-5), hf.flag("enable_bias")
    attention = parts.attention(hf, rotary=None, bias=bias, output_bias=bias, scaled_queries=True)
    mlp = Mlp(hf.whole("intermediate_size"), hf.one_of("hidden_act", ACTIVATIONS), "plain", bias)
    positions = Positions(hf.whole("max_position_embeddings"), offset=2)
    return parts.transformer(hf, [Layer("sequential", norm, attention, mlp)] * hf.count, norm, positions=positions)
