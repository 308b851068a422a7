"""Our model of a checkpoint against transformers' own, logits first, then value by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import converters
from converters.reference import Reference, Run
from transformer_std import HookedTransformer

PROMPTS = ("The Eiffel Tower is in the city of", "def add(a, b):\n    return a +")
OPEN_ONLY = {"attention_scores", "attention_probabilities"}


@dataclass(frozen=True)
class Departure:
    """A standard value that differs, and by how much at most."""

    name: str
    max_difference: float


@dataclass(frozen=True)
class Comparison:
    """One prompt. `first_departure` is the first value of the forward that differs, where the logits do."""

    prompt: str
    tokens: int
    bit_equal: bool
    max_difference: float
    top1_agreement: float
    first_departure: Departure | None = None


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    source: str
    dtype: str
    attn_implementation: str
    comparisons: tuple[Comparison, ...]

    @property
    def bit_equal(self) -> bool:
        return all(each.bit_equal for each in self.comparisons)


@torch.no_grad()
def verify(
    source: str | Path,
    *,
    prompts: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
) -> Report:
    """Loads `source` in both libraries and compares the logits of every prompt.

    Args:
        source: a folder or Hub id of a released checkpoint.
        prompts: texts; without any, two of ours, or random tokens where the checkpoint has no tokenizer.
        dtype: None keeps the checkpoint's.
        attn_implementation: "sdpa" or "eager", for both.
        revision: branch, tag or commit of a Hub id.
    """
    from transformers import AutoModelForCausalLM

    if (Path(source) / converters.OUR_CONFIG).exists():
        raise converters.CheckpointError(
            f"{source} is in our own format, which transformers cannot read: verify the release"
        )
    if Path(source).is_file():
        raise converters.CheckpointError(f"transformers loads folders, not a file like {source}: verify its folder")
    model = HookedTransformer.from_pretrained(
        source, dtype=dtype, revision=revision, attn_implementation=attn_implementation
    )
    dtype = model.embed_tokens.weight.dtype
    theirs = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, revision=revision, attn_implementation=attn_implementation, trust_remote_code=False
    ).eval()
    reference = Reference(theirs, model.config, converters.family_of(model.config).VALUES)
    comparisons = tuple(_compare(model, reference, label, tokens) for label, tokens in _inputs(model, prompts))
    return Report(str(source), str(dtype).removeprefix("torch."), attn_implementation, comparisons)


def _inputs(model: HookedTransformer, prompts: Sequence[str]) -> list[tuple[str, Tensor]]:
    if not prompts and model._tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        sizes = ((2, min(64, model.config.max_length)), (1, 1))
        rows = [torch.randint(0, model.vocab_size, size, generator=generator) for size in sizes]
        return [(f"random tokens {list(row.shape)}", row) for row in rows]
    return [(text, model.to_tokens(text)) for text in prompts or PROMPTS]


def _compare(model: HookedTransformer, reference: Reference, label: str, tokens: Tensor) -> Comparison:
    ours, theirs = model(tokens), reference.model(tokens).logits
    equal = torch.equal(ours, theirs)
    return Comparison(
        prompt=label,
        tokens=tokens.numel(),
        bit_equal=equal,
        max_difference=largest_difference(ours, theirs),
        top1_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        first_departure=None if equal else first_departure(model, reference.run(tokens), tokens),
    )


def first_departure(model: HookedTransformer, run: Run, tokens: Tensor) -> Departure | None:
    """The first value, in the order that transformers computes them, that is not the same to the bit."""
    names = [name for name in model.names.points if name in run.bases and name.rpartition(".")[2] not in OPEN_ONLY]
    if model.attn_implementation == "eager":
        names = [name for name in model.names.points if name in run.bases]
    _, cache = model.run_with_cache(tokens, names_filter=names)
    for name in run.bases:
        if name in cache and not torch.equal(cache[name], run.value(name)):
            return Departure(name, largest_difference(cache[name], run.value(name)))
    return None


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max())
