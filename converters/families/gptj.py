"""GPT-J:  h = norm(x);  out = attention(h) + mlp(h) + x

A parallel block with one LayerNorm; only the MLP and the head have biases. The rotary turns `rotary_dim` dimensions of
each head, neighbours in pairs.
Release: https://huggingface.co/EleutherAI/gpt-j-6b
"""

from converters import parts
from converters.hf_config import ConfigError, ConfigReader
from converters.parts import OURS, both
from converters.places import Input, Output, by_heads, side_by_side
from converters.rules import Copy, Ignore
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Layer, Mlp, Norm, Rotary, TransformerConfig

ARCHITECTURES = ("GPTJForCausalLM",)
THEIRS = "transformer.h.{i}."
WEIGHTS = [
    Copy("transformer.wte.weight", "embed_tokens.weight"),
    *both(THEIRS + "ln_1", OURS + "attention_norm"),
    *[Copy(f"{THEIRS}attn.{each}_proj.weight", f"{OURS}self_attn.projections.{each}.weight") for each in "qkv"],
    Copy(THEIRS + "attn.out_proj.weight", OURS + "self_attn.o.weight"),
    *both(THEIRS + "mlp.fc_in", OURS + "mlp.up"),
    *both(THEIRS + "mlp.fc_out", OURS + "mlp.down"),
    *both("transformer.ln_f", "norm"),
    *both("lm_head", "lm_head"),
    Ignore(THEIRS + "attn.bias", because="the causal mask"),
    Ignore(THEIRS + "attn.masked_bias", because="what the causal mask fills in"),
]
VALUES = {
    "token_embeddings": Output("transformer.wte"),
    OURS + "layer_input": Input("transformer.h.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "ln_1"),
    OURS + "mlp_norm_output": Output(THEIRS + "ln_1"),
    OURS + "attention_input": Input(THEIRS + "attn"),
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "attn.q_proj", view=by_heads),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "attn.k_proj", view=by_heads),
    OURS + "self_attn.attention_premix": Input(THEIRS + "attn.out_proj", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "attn.out_proj"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Input(THEIRS + "mlp.act"),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.act"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.fc_out"),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp.fc_out"),
    OURS + "layer_output": Output("transformer.h.{i}"),
    "final_norm_output": Output("transformer.ln_f"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}
TINY = {"n_embd": 96, "n_inner": 80, "n_head": 6, "n_layer": 3, "n_positions": 512, "rotary_dim": 12}
DEFAULTS = {
    "vocab_size": 50400, "hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16,
    "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "rotary_dim": 64,
}  # fmt: skip

SPELLED = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "hidden_act": "activation_function", "max_position_embeddings": "n_positions",
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.require("rotary", True)
    hf.require("scale_attn_weights", True)
    head_dim, dims = hf.heads()[2], hf.width("rotary_dim")
    if dims % 2 or dims > head_dim:
        raise ConfigError(f"config.rotary_dim is {dims}; it needs an even number up to the head's {head_dim}")
    norm, width = (
        Norm("layer", hf.number("layer_norm_epsilon")),
        hf.whole("intermediate_size", 4 * hf.whole("hidden_size")),
    )
    rotary = Rotary(dims, 10_000.0, pairs="neighbours")
    attention = parts.attention(hf, rotary=rotary, wide_scores=True)
    mlp = Mlp(width, hf.one_of("hidden_act", ACTIVATIONS), "plain", bias=True)
    layers = [Layer("parallel", norm, attention, mlp)] * hf.count
    return parts.transformer(hf, layers, norm, intermediate_size=width, head_bias=True, padding_id=None)
