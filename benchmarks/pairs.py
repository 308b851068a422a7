"""Pairs of models on the same weights, and fair timing of two functions in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import converters
from converters.demo import shake
from transformer_std import HookedTransformer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 64, "heads": 4, "tokens": (1, 16), "runs": 400},
    "middle": {"layers": 8, "width": 512, "heads": 8, "tokens": (2, 256), "runs": 15},
}
LARGE = {"layers": 6, "width": 2048, "heads": 16}  # for loading: 0.5 to 1 GB in bfloat16
VOCAB = 512
# The mixtures, by size: how many experts, how many a token, how wide.
MIXTURES: dict[str, dict[str, tuple[int, int, int]]] = {
    "phimoe": {"tiny": (8, 2, 64), "middle": (16, 2, 512), "large": (16, 2, 512)},
    "qwen2_moe": {"tiny": (8, 4, 64), "middle": (16, 4, 512), "large": (16, 4, 512)},
    "afmoe": {"tiny": (8, 4, 64), "middle": (128, 8, 256), "large": (64, 8, 128)},
}
KEYS = {
    "phimoe": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "afmoe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}


def pair(family: str, size: str) -> tuple[HookedTransformer, Any]:
    """Ours and transformers' model of a family at a size, sharing their weights."""
    layers, width, heads = ({**SIZES, "large": LARGE}[size][key] for key in ("layers", "width", "heads"))
    extra = dict(zip(KEYS.get(family, ()), MIXTURES.get(family, {}).get(size, ()), strict=True))
    extra |= {"qwen2_moe": {"shared_expert_intermediate_size": width}, "afmoe": {"head_dim": width // heads}}.get(
        family, {}
    )
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=layers,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **({"intermediate_size": 4 * width} | extra),
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    shake(theirs)
    return HookedTransformer.from_pretrained(theirs), theirs


def tokens(size: str) -> torch.Tensor:
    return torch.randint(0, VOCAB, SIZES[size]["tokens"], generator=torch.Generator().manual_seed(0))


def medians(runs: int, *functions: Callable[[], Any]) -> list[float]:
    """Median seconds of each function, run in turn so that what slows the machine slows all of them."""
    for function in functions:
        function()
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for taken, function in zip(seconds, functions, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def families() -> list[str]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    return converters.families()
