"""gpt-oss:  h = x + attention(rms(x));  out = h + experts(rms(h))

Each head has a sink: a learned score, which takes its share of the softmax and has no value; transformers has no sdpa
of it, so attention is always computed openly. Every other block has a window; the rotary is stretched by yarn. The
experts are biased, clamped, and lie transposed with gate and up interleaved; a softmax over the chosen logits alone
weighs them. The norms multiply by their weight before they cast back. Released in mxfp4, which has to be made plain
first.
Release: https://huggingface.co/openai/gpt-oss-20b
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import FULL, OURS, SLIDING, THEIRS
from converters.places import Between, Gating, evens, odds, tokens_apart
from converters.rope import rotary
from converters.rules import Copy
from transformer_std.config import Clamp, Layer, TopKSoftmax, TransformerConfig

ARCHITECTURES = ("GptOssForCausalLM",)
EXPERTS = "mlp.experts."
WEIGHTS = parts.weights(
    parts.both(THEIRS + "mlp.router", OURS + "mlp.router"),
    [
        Copy(THEIRS + EXPERTS + "gate_up_proj", OURS + EXPERTS + "gate_up", transposed=True),
        Copy(THEIRS + EXPERTS + "gate_up_proj_bias", OURS + EXPERTS + "gate_up_bias"),
        Copy(THEIRS + EXPERTS + "down_proj", OURS + EXPERTS + "down", transposed=True),
        Copy(THEIRS + EXPERTS + "down_proj_bias", OURS + EXPERTS + "down_bias"),
        Copy(THEIRS + "self_attn.sinks", OURS + "self_attn.sinks"),
    ],
)
VALUES = parts.values(
    {OURS + "mlp.router_logits": Between(THEIRS + "mlp.router", "linear", "output", view=tokens_apart)}
)
GATING = Gating(evens, odds, "mul", call=2)
TINY = {**parts.TINY, "head_dim": 24, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 6}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_parameters": YARN,
    "attention_bias": True, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("experts_per_token", "initial_context_length", because="other names of what transformers reads elsewhere")
    norm = parts.rms(hf, cast="after_weight", wide_in_half=True)
    clamp = Clamp(hf.number("swiglu_alpha"), hf.number("swiglu_limit"))
    mixture = parts.mixture(hf, TopKSoftmax(), "intermediate_size", bias=True, clamp=clamp)
    turned = rotary(hf, hf.heads()[2], contiguous=True)
    windows = {SLIDING: hf.width("sliding_window"), FULL: None}
    layers = [
        Layer("sequential", norm, parts.attention(hf, rotary=turned, window=windows[kind], sinks=True), mixture)
        for kind in hf.layer_types([FULL if i % 2 else SLIDING for i in range(hf.count)])
    ]
    return parts.transformer(hf, layers, norm)
