"""Qwen3:  h = x + attention(rms(x));  out = h + mlp(rms(h))

Llama's block, with queries and keys normed a head before the rotary; where `use_sliding_window` is on, with a window on
the blocks from `max_window_layers` up.
Release: https://huggingface.co/Qwen/Qwen3-8B
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.places import heads_apart
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("Qwen3ForCausalLM",)
WEIGHTS, TINY = parts.weights(), {**parts.TINY, "head_dim": 24}
VALUES = parts.values(queries="q_norm", keys="k_norm", view=heads_apart)
DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "attention_bias": False, "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    norm, mlp, windows = parts.rms(hf), parts.gated(hf), parts.upper_windows(hf)
    layers = [Layer("sequential", norm, parts.attention(hf, window=window, qk_norm=norm), mlp) for window in windows]
    return parts.transformer(hf, layers, norm)
