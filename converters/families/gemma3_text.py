"""Gemma 3, its text models (270m, 1b):  h = x + post(attention(rms(x)));  out = h + post(mlp(rms(h)))

Gemma 2's block without caps; queries and keys are normed a head. Five blocks in six have a window, and a rotary of
their own.
Release: https://huggingface.co/google/gemma-3-270m
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import FULL, SLIDING
from converters.rope import rotary
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("Gemma3ForCausalLM",)
SECOND, POST = "pre_feedforward_layernorm", ("post_attention_layernorm", "post_feedforward_layernorm")
WEIGHTS = parts.weights(parts.post_norms(*POST), second=SECOND)
VALUES = parts.values(
    {**parts.sandwich(*POST), "token_embeddings": parts.UNSCALED},
    second=SECOND,
    queries="q_norm",
    keys="k_norm",
    view=None,
)
TINY = {
    **parts.TINY,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "layer_types": [SLIDING, FULL, SLIDING],
}
DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "pad_token_id": 0, "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("hidden_act", because="hidden_activation is what the forward reads")
    hf.ignore("cache_implementation", because="how generation keeps keys, not what they are")
    hf.require("use_bidirectional_attention", False)
    norm, mlp = parts.rms(hf, cast="after_weight", around_one=True), parts.gated(hf, activation="hidden_activation")
    scale, cap = hf.number("query_pre_attn_scalar") ** -0.5, hf.optional_number("attn_logit_softcapping")
    head_dim = hf.heads()[2]
    windows = {SLIDING: hf.width("sliding_window"), FULL: None}
    rotaries = {
        SLIDING: rotary(hf, head_dim, kind=SLIDING, theta=hf.number("rope_local_base_freq")),
        FULL: rotary(hf, head_dim, kind=FULL, theta=hf.number("rope_theta")),
    }
    every = hf.whole("sliding_window_pattern", 6)
    by_rule = [SLIDING if (i + 1) % every else FULL for i in range(hf.count)]
    more = {"qk_norm": norm, "scale": scale, "softcap": cap}
    layers = [
        Layer("sequential", norm, parts.attention(hf, rotary=rotaries[kind], window=windows[kind], **more), mlp, norm)
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
