"""GPT-2, DistilGPT-2:  h = x + attention(norm(x));  out = h + mlp(norm(h))

LayerNorms, biases everywhere but in the head, which is the embedding; learned positions are added to the tokens'. One
matrix for queries, keys and values; the released matrices lie transposed, and stay so.
Release: https://huggingface.co/openai-community/gpt2
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import OURS, both
from converters.places import Input, Output, fused_keys, fused_queries, side_by_side
from converters.rules import Copy, Ignore
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Layer, Mlp, Norm, Positions, TransformerConfig

ARCHITECTURES = ("GPT2LMHeadModel",)
THEIRS = "transformer.h.{i}."
WEIGHTS = [
    Copy("transformer.wte.weight", "embed_tokens.weight"),
    Copy("transformer.wpe.weight", "embed_positions.weight"),
    *both(THEIRS + "ln_1", OURS + "attention_norm"),
    *both(THEIRS + "attn.c_attn", OURS + "self_attn.projections.qkv", transposed=True),
    *both(THEIRS + "attn.c_proj", OURS + "self_attn.o", transposed=True),
    *both(THEIRS + "ln_2", OURS + "mlp_norm"),
    *both(THEIRS + "mlp.c_fc", OURS + "mlp.up", transposed=True),
    *both(THEIRS + "mlp.c_proj", OURS + "mlp.down", transposed=True),
    *both("transformer.ln_f", "norm"),
    Copy("lm_head.weight", "lm_head.weight"),
    Ignore(THEIRS + "attn.bias", because="the causal mask"),
    Ignore(THEIRS + "attn.masked_bias", because="what the causal mask fills in"),
]
VALUES = {
    "token_embeddings": Output("transformer.wte"),
    "position_embeddings": Output("transformer.wpe", each_row=True),
    OURS + "layer_input": Input("transformer.h.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "ln_1"),
    OURS + "attention_input": Input(THEIRS + "attn"),
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "attn.c_attn", view=fused_queries),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "attn.c_attn", view=fused_keys),
    OURS + "self_attn.attention_premix": Input(THEIRS + "attn.c_proj", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "attn.c_proj"),
    OURS + "layer_mid": Input(THEIRS + "ln_2", stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "ln_2"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Input(THEIRS + "mlp.act"),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.act"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.c_proj"),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp.c_proj"),
    OURS + "layer_output": Output("transformer.h.{i}"),
    "final_norm_output": Output("transformer.ln_f"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}
TINY = {"n_embd": 96, "n_inner": 80, "n_head": 6, "n_layer": 3, "n_positions": 512}
DEFAULTS = {
    "vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "gelu_new", "max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip
SPELLED = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "hidden_act": "activation_function", "max_position_embeddings": "n_positions",
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("n_ctx", "n_special", "predict_special_tokens", "output_past", because="of older versions")
    hf.require("reorder_and_upcast_attn", False)
    hf.require("add_cross_attention", False)
    norm, width = (
        Norm("layer", hf.number("layer_norm_epsilon")),
        hf.whole("intermediate_size", 4 * hf.whole("hidden_size")),
    )
    mlp = Mlp(width, hf.one_of("hidden_act", ACTIVATIONS), "plain", bias=True)
    scale = hf.heads()[2] ** -0.5 if hf.flag("scale_attn_weights") else 1.0
    by_block = hf.flag("scale_attn_by_inverse_layer_idx")
    scales = [scale / (i + 1) if by_block else scale for i in range(hf.count)]
    more = {"rotary": None, "fused": True, "bias": True, "output_bias": True}
    layers = [Layer("sequential", norm, parts.attention(hf, scale=each, **more), mlp) for each in scales]
    positions = Positions(hf.whole("max_position_embeddings"))
    return parts.transformer(
        hf, layers, norm, intermediate_size=width, positions=positions, padding_id=None, narrow_writers=True
    )
