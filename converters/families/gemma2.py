"""Gemma 2:  h = x + post(attention(rms(x)));  out = h + post(mlp(rms(h)))

A sandwich: four RMS norms, which multiply by one plus their weight before they cast back. A tanh caps the attention
scores and the logits, so attention is always computed openly. Every other block has a window. The embeddings are
multiplied by sqrt(hidden_size), rounded to their dtype.
Release: https://huggingface.co/google/gemma-2-2b
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import FULL, SLIDING
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("Gemma2ForCausalLM",)
SECOND, POST = "pre_feedforward_layernorm", ("post_attention_layernorm", "post_feedforward_layernorm")
WEIGHTS = parts.weights(parts.post_norms(*POST), second=SECOND)
VALUES = parts.values({**parts.sandwich(*POST), "token_embeddings": parts.UNSCALED}, second=SECOND)
TINY = {
    **parts.TINY, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "pad_token_id": 0, "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("hidden_act", because="hidden_activation is what the forward reads")
    hf.ignore("cache_implementation", "sliding_window_size", because="how generation keeps keys, not what they are")
    hf.require("use_bidirectional_attention", False)
    norm, mlp = parts.rms(hf, cast="after_weight", around_one=True), parts.gated(hf, activation="hidden_activation")
    scale, cap = hf.number("query_pre_attn_scalar") ** -0.5, hf.optional_number("attn_logit_softcapping")
    more = {"scale": scale, "softcap": cap, "openly": True}
    windows = {SLIDING: hf.width("sliding_window"), FULL: None}
    by_rule = [FULL if i % 2 else SLIDING for i in range(hf.count)]
    layers = [
        Layer("sequential", norm, parts.attention(hf, window=windows[kind], **more), mlp, norm)
        for kind in hf.layer_types(by_rule)
    ]
    return parts.transformer(
        hf,
        layers,
        norm,
        embedding_multiplier=hf.whole("hidden_size") ** 0.5,
        round_multiplier=True,
        logit_softcap=hf.optional_number("final_logit_softcapping"),
    )
