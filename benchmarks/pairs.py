"""Models on the same weights, and fair timing of functions in one process."""

from __future__ import annotations

import copy
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import converters
from converters.tiny import make_tokenizer, shake
from transformer_std import HookedTransformer

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


def pair(family: str, size: str, **settings: Any) -> tuple[HookedTransformer, Any]:
    """Ours and transformers' model of a family at a size, sharing their weights."""
    layers, width, heads = (SIZES[size][key] for key in ("layers", "width", "heads"))
    extra = dict(zip(KEYS.get(family, ()), MIXTURES.get(family, {}).get(size, ()), strict=True))
    extra |= {"qwen2_moe": {"shared_expert_intermediate_size": width}, "afmoe": {"head_dim": width // heads}}.get(
        family, {}
    )
    if size == "long":
        extra |= {"max_position_embeddings": 4096, **WINDOWED.get(family, {})}
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **({"num_hidden_layers": layers, "intermediate_size": 4 * width} | extra | settings),
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    shake(theirs)
    return HookedTransformer.from_pretrained(theirs), theirs


def pairs(*sizes: str) -> Iterator[tuple[str, str, HookedTransformer, Any]]:
    """Family, size, ours and theirs: every family at each of `sizes`."""
    names = families()
    for size in sizes:
        for family in names:
            yield family, size, *pair(family, size)


def tokens(size: str | tuple[int, int]) -> Tensor:
    shape = SIZES[size]["tokens"] if isinstance(size, str) else size
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(0))


def bridge(theirs: Any) -> Any:
    """TransformerLens' bridge of a copy of transformers' model, which it takes over; None where it is not installed."""
    if importlib.util.find_spec("transformer_lens") is None:
        return None
    from transformer_lens.model_bridge import TransformerBridge

    theirs = copy.deepcopy(theirs)
    # The architecture as the family's release writes it, which is how the bridge finds its adapter.
    theirs.config.architectures = [type(theirs).__name__.replace("Phimoe", "PhiMoE")]
    return TransformerBridge.boot_transformers(theirs.config.model_type, hf_model=theirs, tokenizer=_tokenizer())


def sight(theirs: Any) -> Any:
    """nnsight's wrapper of a copy of transformers' model; None where it is not installed."""
    if importlib.util.find_spec("nnsight") is None:
        return None
    import nnsight

    return nnsight.LanguageModel(copy.deepcopy(theirs), tokenizer=_tokenizer())


def _tokenizer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder), eos_token="<eos>")
        return transformers.AutoTokenizer.from_pretrained(folder)


def medians(runs: int, *functions: Callable[[], Any], warm: int = 2) -> list[float]:
    """Median milliseconds of each function, run in turn so that what slows the machine slows all of them."""
    for function in functions:
        for _ in range(warm):
            function()
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for each, function in zip(taken, functions, strict=True):
            start = time.perf_counter()
            function()
            each.append(1000 * (time.perf_counter() - start))
    return [statistics.median(each) for each in taken]


def families() -> list[str]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    # glibc gives memory back to the system above twice the largest block that it has freed, and takes it again page by
    # page. The weights of a released model set that mark when they are read; those of a small one leave it where each
    # forward crosses it or does not by chance.
    torch.empty(31 << 20, dtype=torch.uint8)
    return converters.families()
