"""Mistral 7B, Nemo, Ministral:  h = x + attention(rms(x));  out = h + mlp(rms(h))

Llama's block without biases; where `sliding_window` is set, with a window on every block.
Release: https://huggingface.co/mistralai/Mistral-7B-v0.1
"""

from converters import parts
from converters.hf_config import ConfigReader
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("MistralForCausalLM",)
WEIGHTS, VALUES, TINY = parts.weights(), parts.values(), {**parts.TINY, "sliding_window": None}
DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "sliding_window": 4096,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    norm = parts.rms(hf)
    attention = parts.attention(hf, window=hf.optional_whole("sliding_window"))
    return parts.transformer(hf, [Layer("sequential", norm, attention, parts.gated(hf))] * hf.count, norm)
