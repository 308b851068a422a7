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

from benchmarks.sizes import FAMILIES, SIZES, VOCAB, config_of
from converters.tiny import make_tokenizer, shake
from transformer_std import HookedTransformer


def pair(family: str, size: str, **settings: Any) -> tuple[HookedTransformer, Any]:
    """Ours and transformers' model of a family at a size, sharing their weights."""
    config = transformers.AutoConfig.for_model(family, **(config_of(family, size) | settings))
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
    return list(FAMILIES)
