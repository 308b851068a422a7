"""How large the models and prompts of the benchmarks are."""

from __future__ import annotations

from typing import Any

FAMILIES = ("phi", "phi3", "phimoe", "qwen2_moe", "afmoe")  # of each wiring and router one
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 64, "heads": 4, "tokens": (1, 16), "runs": 200},
    "middle": {"layers": 8, "width": 512, "heads": 8, "tokens": (2, 256), "runs": 9},
    "long": {"layers": 2, "width": 512, "heads": 8, "tokens": (1, 4096), "runs": 3},
    "large": {"layers": 6, "width": 2048, "heads": 16},  # for loading: 0.5 to 1 GB in bfloat16
}
WINDOW = 512  # of the long size, on the families that have windows
VOCAB = 512
# The mixtures, by size: how many experts, how many a token, how wide.
MIXTURES: dict[str, dict[str, tuple[int, int, int]]] = {
    "phimoe": {"tiny": (8, 2, 64), "middle": (16, 2, 512), "long": (16, 2, 512), "large": (16, 2, 512)},
    "qwen2_moe": {"tiny": (8, 4, 64), "middle": (16, 4, 512), "long": (16, 4, 512), "large": (16, 4, 512)},
    "afmoe": {"tiny": (8, 4, 64), "middle": (128, 8, 256), "long": (128, 8, 256), "large": (64, 8, 128)},
}
KEYS = {
    "phimoe": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "afmoe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
WINDOWED: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "qwen2_moe": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0},
    "afmoe": {"sliding_window": WINDOW},
}


def config_of(family: str, size: str) -> dict[str, Any]:
    """A family's settings at a size, by their released names."""
    layers, width, heads = (SIZES[size][key] for key in ("layers", "width", "heads"))
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * width,
    }
    if family in MIXTURES:
        settings |= zip(KEYS[family], MIXTURES[family][size], strict=True)
    if family == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = width
    if family == "afmoe":
        settings["head_dim"] = width // heads
    if size == "long":
        settings |= {"max_position_embeddings": 4096, **WINDOWED.get(family, {})}
    return settings
