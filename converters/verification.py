"""Our model of a checkpoint against transformers' own, logits first, then value by value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import converters
from converters.checkpoint import Checkpoint, CheckpointError
from converters.fill import unlike
from converters.reference import Reference, Run
from transformer_std import HookedTransformer
from transformer_std.optional import transformers_for

PROMPTS = ("The Eiffel Tower is in the city of", "def add(a, b):\n    return a +")
OPEN_ONLY = {"attention_scores", "attention_probabilities"}


@dataclass(frozen=True)
class Departure:
    """A standard value that differs, and by how much at most."""

    name: str
    max_difference: float


@dataclass(frozen=True)
class Comparison:
    """One prompt. `first_departure` is the first value of the forward that differs, looked for where the logits do or
    every value was asked for; `values` is how many were compared."""

    prompt: str
    tokens: int
    bit_equal: bool
    max_difference: float
    top1_agreement: float
    values: int = 0
    first_departure: Departure | None = None


@dataclass(frozen=True)
class Report:
    """What `verify` found. `unlike_tensors` are parameters that our reading of the files fills otherwise than
    transformers does."""

    source: str
    dtype: str
    attn_implementation: str
    comparisons: tuple[Comparison, ...]
    unlike_tensors: tuple[str, ...] = ()

    @property
    def bit_equal(self) -> bool:
        """Every tensor, every logit, and every value that was compared."""
        whole = all(each.bit_equal and each.first_departure is None for each in self.comparisons)
        return whole and not self.unlike_tensors

    @property
    def summary(self) -> str:
        """One line for a log."""
        worst = max((each.max_difference for each in self.comparisons), default=0.0)
        found = "bit-equal" if self.bit_equal else f"DIFFERS (logits by {worst:.3g})"
        return f"verify {self.source} {self.dtype} {self.attn_implementation}: {found}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "bit_equal": self.bit_equal, "summary": self.summary}


@torch.no_grad()
def verify(
    source: str | Path,
    *,
    prompts: Sequence[str] = (),
    token_files: Sequence[str | Path] = (),
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    layers: bool = False,
    revision: str | None = None,
) -> Report:
    """Compares `source` in both libraries: every tensor as we read it from the files, the logits of every prompt, and
    with `layers` every standard value. The weights are in memory once: ours share transformers'.

    Args:
        source: a folder or Hub id of a released checkpoint.
        prompts: texts. Without texts and files two of ours, or random tokens where the checkpoint has no tokenizer.
        token_files: JSON files of token ids, a list or a list of lists of one length.
        dtype: None keeps the checkpoint's.
        attn_implementation: "sdpa" or "eager", for both.
        layers: compare every value of every block too, and report the first that departs.
        revision: branch, tag or commit of a Hub id.

    Raises:
        CheckpointError: one of the two cannot load it, or a token file holds something else.
    """
    folder = converters.folder_of(source, revision)
    if (folder / converters.OUR_CONFIG).exists():
        raise CheckpointError(f"{source} is in our own format, which transformers cannot read: verify the release")
    if Path(source).is_file():
        raise CheckpointError(f"transformers loads folders, not a file like {source}: verify its folder")
    config = converters.read_config(folder)
    if dtype is None and config.dtype is not None:
        dtype = getattr(torch, config.dtype)
    theirs = _load_theirs(folder, dtype or "auto", attn_implementation)
    tokenizer = folder if (folder / "tokenizer_config.json").exists() else None
    model = HookedTransformer.from_pretrained(theirs, attn_implementation=attn_implementation, tokenizer=tokenizer)
    family = converters.family_of(config)
    other = tuple(unlike(model, Checkpoint(folder), family.WEIGHTS))
    reference = Reference(theirs, model.config, family.VALUES)
    inputs = _inputs(model, prompts, token_files)
    comparisons = tuple(_compare(model, reference, label, tokens, layers) for label, tokens in inputs)
    dtype = model.embed_tokens.weight.dtype
    return Report(str(source), str(dtype).removeprefix("torch."), attn_implementation, comparisons, other)


def _load_theirs(folder: Path, dtype: torch.dtype | str, attn_implementation: str) -> Any:
    transformers = transformers_for("the comparison")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False
        ).eval()
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error


def _inputs(
    model: HookedTransformer, prompts: Sequence[str], token_files: Sequence[str | Path]
) -> list[tuple[str, Tensor]]:
    if prompts or token_files:
        return [(text, model.to_tokens(text)) for text in prompts] + [_read_tokens(file) for file in token_files]
    if model._tokenizer is not None:
        return [(text, model.to_tokens(text)) for text in PROMPTS]
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, min(64, model.config.max_length)), (1, 1))
    rows = [torch.randint(0, model.vocab_size, size, generator=generator) for size in sizes]
    return [(f"random tokens {list(row.shape)}", row) for row in rows]


def _read_tokens(file: str | Path) -> tuple[str, Tensor]:
    try:
        rows = json.loads(Path(file).read_text())
        tokens = torch.tensor(rows if rows and isinstance(rows[0], list) else [rows], dtype=torch.long)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file} is no JSON list of token ids, nor of rows of one length: {error}") from None
    return Path(file).name, tokens


def _compare(model: HookedTransformer, reference: Reference, label: str, tokens: Tensor, layers: bool) -> Comparison:
    ours, theirs = model(tokens), reference.model(tokens).logits
    equal = torch.equal(ours, theirs)
    values, departure = compare_values(model, reference.run(tokens), tokens) if layers or not equal else (0, None)
    return Comparison(
        prompt=label,
        tokens=tokens.numel(),
        bit_equal=equal,
        max_difference=largest_difference(ours, theirs),
        top1_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        values=values,
        first_departure=departure,
    )


def compare_values(model: HookedTransformer, run: Run, tokens: Tensor) -> tuple[int, Departure | None]:
    """How many values were compared, and the first, in the order that transformers computes them, that is not the same
    to the bit. Under sdpa without the scores and probabilities, which are computed on the open path alone."""
    open_path = model.attn_implementation == "eager"
    names = [
        name
        for name in model.names.points
        if name in run.bases and (open_path or name.rpartition(".")[2] not in OPEN_ONLY)
    ]
    _, cache = model.run_with_cache(tokens, names_filter=names)
    for name in run.bases:
        if name in cache and not torch.equal(cache[name], run.value(name)):
            return len(names), Departure(name, largest_difference(cache[name], run.value(name)))
    return len(names), None


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max())
