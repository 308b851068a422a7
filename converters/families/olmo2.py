"""OLMo 2:  h = x + rms(attention(x));  out = h + rms(mlp(h))

The sublayers read the stream itself and end in a norm. Queries and keys are normed over all heads together, and turned
in float32. The norms multiply by their weight before they cast back.
Release: https://huggingface.co/allenai/OLMo-2-0425-1B
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import OURS, THEIRS
from converters.places import Input
from converters.rope import rotary
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("Olmo2ForCausalLM",)
POST = ("post_attention_layernorm", "post_feedforward_layernorm")
WEIGHTS = parts.weights(parts.post_norms(*POST), first=None, second=None)
VALUES = parts.values(
    {**parts.sandwich(*POST), OURS + "layer_mid": Input(THEIRS + "mlp", stream=True)}, queries="q_norm", keys="k_norm"
)
TINY = parts.TINY
DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "pad_token_id": 1, "attention_bias": False,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    norm = parts.rms(hf, cast="after_weight")
    turned = rotary(hf, hf.heads()[2], wide=True)
    attention = parts.attention(hf, rotary=turned, qk_norm=norm, qk_norm_over="heads")
    layer = Layer("post_normed", None, attention, parts.gated(hf), post_norm=norm)
    return parts.transformer(hf, [layer] * hf.count, norm)
