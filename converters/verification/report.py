"""Our model of a checkpoint against transformers' own, logits first, then value by value."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.checkpoint import Checkpoint, CheckpointError, LiveTensors, read_json
from converters.exporting import export
from converters.families import module_of
from converters.fill import fill, own_rules, same, unlike
from converters.hf_config import DTYPES, MOST_OF_ANYTHING, is_whole
from converters.rules import Rule
from converters.sources import as_dtype, open_source
from converters.verification.reference import Reference, Run, attention_there_is
from transformer_std import saving
from transformer_std.config import Mixture, TransformerConfig
from transformer_std.model import HookedTransformer
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
        """For JSON; a difference that no number tells, to a NaN or an infinity, is None."""
        return jsonable({**dataclasses.asdict(self), "bit_equal": self.bit_equal, "summary": self.summary})


def jsonable(value: Any) -> Any:
    """`value` without the floats that JSON does not have."""
    if isinstance(value, dict):
        return {key: jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@torch.no_grad()
def verify(
    source: str | Path | HookedTransformer,
    *,
    prompts: Sequence[str] = (),
    token_files: Sequence[str | Path] = (),
    dtype: torch.dtype | str | None = None,
    attn_implementation: str = "sdpa",
    layers: bool = False,
    revision: str | None = None,
) -> Report:
    """Compares `source` in both libraries: every tensor as we read it from the files, the logits of every prompt, and
    with `layers` every standard value. The weights are in memory once: ours share transformers'. A NaN is equal to a
    NaN in its place.

    A model in our own format, or in memory, is first exported to a temporary folder: that needs the room of its weights
    there, and a model that came from a release.

    Args:
        source: a folder or Hub id of a released checkpoint, a folder that `save_pretrained` wrote, or a model of ours.
            Hooks and other code that was put on a model are not part of it.
        prompts: texts. Without texts and files two of ours, or random tokens where the checkpoint has no tokenizer.
        token_files: JSON files of token ids, a list or a list of lists of one length.
        dtype: torch's or its name; None or "auto" keeps the checkpoint's.
        attn_implementation: "sdpa" or "eager", for both; "eager" where transformers has no sdpa of the family.
        layers: compare every value of every block too, and report the first that departs.
        revision: branch, tag or commit of a Hub id.

    Raises:
        CheckpointError: one of the two cannot load it, or a token file holds something else.
        ConfigError: a model of ours that no release's config describes.
    """
    dtype = as_dtype(dtype)
    with _released(source, dtype, revision) as (folder, config, tensors, rules):
        if dtype is None and config.dtype is not None:
            dtype = DTYPES[config.dtype]
        if dtype == torch.float64 and any(isinstance(layer.mlp, Mixture) for layer in config.attending):
            raise CheckpointError("transformers' experts have no float64: verify a mixture in float32")
        family = module_of(config)
        theirs = _load_theirs(folder, config, dtype or "auto", attn_implementation)
        attn_implementation = theirs.config._attn_implementation
        tokenizer = folder if (folder / "tokenizer_config.json").exists() else None
        with torch.device("meta"):
            model = HookedTransformer(config, attn_implementation=attn_implementation, tokenizer=tokenizer)
        fill(model, LiveTensors.of(theirs), family.WEIGHTS, next(theirs.parameters()).dtype)
        other = tuple(unlike(model, tensors, rules))
        reference = Reference(theirs, model.config, family)
        read = inputs(model, prompts, token_files)
        comparisons = tuple(_compare(model, reference, label, tokens, layers) for label, tokens in read)
    name = "a model in memory" if isinstance(source, HookedTransformer) else str(source)
    dtype = model.embed_tokens.weight.dtype
    return Report(name, str(dtype).removeprefix("torch."), attn_implementation, comparisons, other)


Found = tuple[Path, TransformerConfig, Checkpoint | LiveTensors, list[Rule]]


@contextlib.contextmanager
def _released(
    source: str | Path | HookedTransformer, dtype: torch.dtype | None, revision: str | None
) -> Iterator[Found]:
    """A folder that transformers loads, and what we say it holds: our config, and tensors with the rules of their
    names."""
    if isinstance(source, HookedTransformer):
        config, tensors = in_memory(source)
        with _exported(source) as folder:
            yield folder, config, tensors, own_rules(tensors)
        return
    if Path(source).is_file():
        raise CheckpointError(f"transformers loads folders, not a file like {source}: verify its folder")
    release = open_source(source, revision)
    if release.ours:
        with _exported(HookedTransformer.from_pretrained(release.folder, dtype=dtype)) as exported:
            yield exported, release.config, release.tensors, release.rules
    else:
        assert release.folder is not None  # a live model of transformers' is no source of this
        yield release.folder, release.config, release.tensors, release.rules


def in_memory(model: HookedTransformer) -> tuple[TransformerConfig, LiveTensors]:
    """A model's config, as its weights are now, and the weights."""
    return saving.config_now(model), LiveTensors.of(model)


@contextlib.contextmanager
def _exported(model: HookedTransformer) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        export(model, Path(folder) / "exported")
        yield Path(folder) / "exported"


def _load_theirs(folder: Path, config: TransformerConfig, dtype: torch.dtype | str, attn_implementation: str) -> Any:
    transformers = transformers_for("the comparison")
    try:
        attn = attention_there_is(config, attn_implementation)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attn, trust_remote_code=False
        ).eval()
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error


def inputs(
    model: HookedTransformer, prompts: Sequence[str], token_files: Sequence[str | Path]
) -> list[tuple[str, Tensor]]:
    """What to compare on, with its label. Raises `CheckpointError` on a file of something else."""
    if prompts or token_files:
        return [(text, model.to_tokens(text)) for text in prompts] + [read_tokens(file) for file in token_files]
    if model.has_tokenizer:
        return [(text, model.to_tokens(text)) for text in PROMPTS]
    return random_tokens(model.vocab_size, model.config.max_length)


def random_tokens(vocab_size: int, max_length: int) -> list[tuple[str, Tensor]]:
    """Two rows, the same in every run, and a single token."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, min(64, max_length)), (1, 1))
    rows = [torch.randint(0, vocab_size, size, generator=generator) for size in sizes]
    return [(f"random tokens {list(row.shape)}", row) for row in rows]


def read_tokens(file: str | Path) -> tuple[str, Tensor]:
    """The name of a JSON file and its token ids, [batch seq]."""
    found = read_json(Path(file))
    rows = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    good = all(isinstance(row, list) and row and all(map(_is_id, row)) and len(row) == len(rows[0]) for row in rows)
    if not good:
        raise CheckpointError(f"{file} is no JSON list of token ids (whole numbers), nor of rows of one length")
    return Path(file).name, torch.tensor(rows)


def _is_id(value: Any) -> bool:
    return is_whole(value) and 0 <= value < MOST_OF_ANYTHING


def _compare(model: HookedTransformer, reference: Reference, label: str, tokens: Tensor, layers: bool) -> Comparison:
    ours, theirs = model(tokens), reference.model(tokens).logits
    equal = same(ours, theirs)
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
        if name in cache and not same(cache[name], run.value(name)):
            return len(names), Departure(name, largest_difference(cache[name], run.value(name)))
    return len(names), None


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of two entries; two NaNs in one place are none, a NaN and a number are infinitely far."""
    ours, theirs = ours.double(), theirs.double()
    far = (ours - theirs).abs().nan_to_num(torch.inf, torch.inf)
    return float(far.masked_fill((ours == theirs) | (ours.isnan() & theirs.isnan()), 0).max())
