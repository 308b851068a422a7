"""Qwen2, Qwen2.5:  h = x + attention(rms(x));  out = h + mlp(rms(h))

Llama's block, with biases on queries, keys and values alone; where `use_sliding_window` is on, with a window on the
blocks from `max_window_layers` up.
Release: https://huggingface.co/Qwen/Qwen2.5-0.5B
"""

from converters import parts
from converters.hf_config import ConfigReader
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("Qwen2ForCausalLM",)
WEIGHTS, VALUES, TINY = parts.weights(), parts.values(), parts.TINY
DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.require("dual_chunk_attention_config", None)
    norm, mlp, windows = parts.rms(hf), parts.gated(hf), parts.upper_windows(hf)
    layers = [Layer("sequential", norm, parts.attention(hf, window=window, bias=True), mlp) for window in windows]
    return parts.transformer(hf, layers, norm)
