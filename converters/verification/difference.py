"""Two checkpoints against each other: settings, parameters, and every value both have, by the same names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.checkpoint import CheckpointError
from converters.fill import fill, own_rules, same
from converters.loading import load
from converters.sources import as_dtype
from converters.verification.report import (
    OPEN_ONLY,
    PROMPTS,
    in_memory,
    jsonable,
    largest_difference,
    random_tokens,
    read_tokens,
)
from transformer_std.analysis.decomposition import ActivationCache
from transformer_std.model import HookedTransformer

GIVEN = {"input_ids", "attention_mask", "input_size"}  # the same on both sides


@dataclass(frozen=True)
class Change:
    """A parameter, or a value of the forward, that differs. `relative` is the largest difference over the largest
    magnitude in A; both are None for integers (`expert_indices`). `changed` is the share of entries that differ."""

    name: str
    kind: str
    layer: int | None
    max_difference: float | None
    relative: float | None
    changed: float


@dataclass(frozen=True)
class Reading:
    """One prompt. `mean_kl` and `max_kl` are over the positions, of KL(A || B) between the next-token distributions, in
    nats. Without numbers where the vocabularies are of two sizes."""

    prompt: str
    tokens: int
    bit_equal: bool
    max_difference: float | None = None
    top1_agreement: float | None = None
    mean_kl: float | None = None
    max_kl: float | None = None


@dataclass(frozen=True)
class Difference:
    """What `diff` found between `a` and `b`.

    Attributes:
        settings: what the configs say otherwise: name -> [A's, B's]; `{i}` stands for any block.
        parameters: those of both, of one shape, that differ.
        values: those of both, of one shape, that differ on any prompt, by the largest difference, in order of the tree.
        compared: how many parameters and values were compared.
        uncompared: name -> why it could not be compared.
    """

    a: str
    b: str
    dtypes: tuple[str, str]
    attn_implementation: str
    settings: dict[str, tuple[Any, Any]]
    parameters: tuple[Change, ...]
    values: tuple[Change, ...]
    readings: tuple[Reading, ...]
    compared: tuple[int, int]
    uncompared: dict[str, str]

    @property
    def bit_equal(self) -> bool:
        """Every parameter and every value of each is the other's."""
        return not (self.parameters or self.values or self.uncompared) and all(each.bit_equal for each in self.readings)

    @property
    def summary(self) -> str:
        """One line for a log."""
        found = "bit-equal"
        if not self.bit_equal:
            found = f"DIFFER ({len(self.parameters)} parameters, {len(self.values)} values"
            found += f", {len(self.uncompared)} not compared)" if self.uncompared else ")"
        return f"diff {self.a} {self.b} {self.attn_implementation}: {found}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what no number tells, a difference to a NaN or an infinity, is None."""
        return jsonable({**dataclasses.asdict(self), "bit_equal": self.bit_equal, "summary": self.summary})


@torch.no_grad()
def diff(
    a: Any,
    b: Any,
    *,
    prompts: Sequence[str] = (),
    token_files: Sequence[str | Path] = (),
    dtype: torch.dtype | str | None = None,
    attn_implementation: str = "sdpa",
) -> Difference:
    """Compares two checkpoints: what their configs say otherwise, every parameter, and on every prompt every value of
    the forward and the logits. Between checkpoints of two families or sizes, whatever both have in one shape.

    A parameter that is the same on both sides is one tensor in memory, so that what differs further on comes from what
    is different, and not from where a matrix lies. The values of both are in memory together.

    Args:
        a: whatever `HookedTransformer.from_pretrained` loads, in any format, or a model of ours, without its hooks.
        b: as `a`.
        prompts: texts, which both tokenizers must read as the same tokens. Without texts and files two of ours, or
            random tokens of both vocabularies where a tokenizer is missing or the two read ours otherwise.
        token_files: JSON files of token ids, a list or a list of lists of one length.
        dtype: of both, torch's or its name; None or "auto" keeps each checkpoint's own.
        attn_implementation: "sdpa" or "eager"; under sdpa scores and patterns, which only the open path has, are left
            out.

    Raises:
        CheckpointError: one cannot be loaded, a token file holds something else, or the two read a prompt as other
            tokens.
    """
    dtype = as_dtype(dtype)
    first, second = _load(a, dtype, attn_implementation), _load(b, dtype, attn_implementation)
    uncompared: dict[str, str] = {}
    parameters, weights = _compare_parameters(first, second, uncompared)
    found: dict[str, Change] = {}
    readings, values = [], 0
    for label, tokens in _inputs(first, second, prompts, token_files):
        one, other = _run(first, tokens), _run(second, tokens)
        values = _compare_values(one, other, found, uncompared)
        readings.append(_reading(label, tokens, one["logits"], other["logits"]))
    order = [name for name in first.names.points if name in found]
    return Difference(
        _called(a),
        _called(b),
        dtypes=(_dtype_name(first), _dtype_name(second)),
        attn_implementation=attn_implementation,
        settings=_settings(first, second),
        parameters=tuple(parameters),
        values=tuple(found[name] for name in order),
        readings=tuple(readings),
        compared=(weights, values),
        uncompared=uncompared,
    )


def _called(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else type(source).__name__


def _dtype_name(model: HookedTransformer) -> str:
    return str(model.embed_tokens.weight.dtype).removeprefix("torch.")


def _load(source: Any, dtype: torch.dtype | None, attn_implementation: str) -> HookedTransformer:
    if not isinstance(source, HookedTransformer):
        return load(source, HookedTransformer, dtype=dtype, attn_implementation=attn_implementation)
    config, tensors = in_memory(source)
    with torch.device("meta"):
        model = HookedTransformer(config, attn_implementation=attn_implementation, tokenizer=source.tokenizer_source)
    fill(model, tensors, own_rules(tensors), dtype or source.embed_tokens.weight.dtype)
    return model


def _compare_parameters(
    a: HookedTransformer, b: HookedTransformer, uncompared: dict[str, str]
) -> tuple[list[Change], int]:
    """Those that differ, and how many were compared. Where the two are the same, B takes A's tensor."""
    first, second = (dict(model.named_parameters(remove_duplicate=False)) for model in (a, b))
    changes, compared = [], 0
    for name in _both(first, second, uncompared):
        compared += 1
        if same(first[name], second[name]):
            path, _, attribute = name.rpartition(".")
            setattr(b.get_submodule(path), attribute, first[name])
        else:
            changes.append(_change(name, re.sub(r"^layers\.\d+\.", "", name), first[name], second[name]))
    return changes, compared


def _compare_values(
    a: ActivationCache, b: ActivationCache, found: dict[str, Change], uncompared: dict[str, str]
) -> int:
    """Puts into `found` what differs, the larger where it was found before; returns how many were compared."""
    names, points = _both(a, b, uncompared), a.model.names.points
    for name in names:
        if not same(a[name], b[name]):
            change, before = _change(name, points[name].value, a[name], b[name]), found.get(name)
            if before is None or (change.max_difference or 0) > (before.max_difference or 0):
                found[name] = change
    return len(names)


def _both(a: Any, b: Any, uncompared: dict[str, str]) -> list[str]:
    """The names of both whose tensors have one shape; why the others cannot be compared goes into `uncompared`."""
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            uncompared.setdefault(name, f"only in {'A' if name in a else 'B'}")
        elif a[name].shape != b[name].shape:
            uncompared.setdefault(name, f"{list(a[name].shape)} in A, {list(b[name].shape)} in B")
    return [name for name in a if name not in uncompared]


def _change(name: str, kind: str, a: Tensor, b: Tensor) -> Change:
    differ = (a != b) & ~(a.isnan() & b.isnan()) if a.dtype == b.dtype else a.double() != b.double()
    furthest = largest_difference(a, b) if a.is_floating_point() else None
    scale = float(a.double().abs().nan_to_num(0, 0, 0).max())
    return Change(
        name=name,
        kind=kind,
        layer=_layer(name),
        max_difference=furthest,
        relative=furthest / scale if furthest is not None and scale else None,
        changed=float(differ.double().mean()),
    )


def _run(model: HookedTransformer, tokens: Tensor) -> ActivationCache:
    names = [
        name
        for name, point in model.names.points.items()
        if point.value not in GIVEN
        and not point.derived  # large, and says no more than what it is made of
        and (model.attn_implementation == "eager" or point.value not in OPEN_ONLY)
    ]
    return model.run_with_cache(tokens, names_filter=names)[1]


def _reading(label: str, tokens: Tensor, a: Tensor, b: Tensor) -> Reading:
    if a.shape != b.shape:
        return Reading(label, tokens.numel(), bit_equal=False)
    p, q = (logits.double().log_softmax(-1) for logits in (a, b))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    return Reading(
        prompt=label,
        tokens=tokens.numel(),
        bit_equal=same(a, b),
        max_difference=largest_difference(a, b),
        top1_agreement=float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
    )


def _inputs(
    a: HookedTransformer, b: HookedTransformer, prompts: Sequence[str], token_files: Sequence[str | Path]
) -> list[tuple[str, Tensor]]:
    """What to compare on, with its label: token ids of both vocabularies."""
    vocab_size = min(a.vocab_size, b.vocab_size)
    read: list[tuple[str, Tensor]] = []
    for text in prompts if prompts or token_files else PROMPTS:
        if (tokens := _tokens(text, a, b)) is not None:
            read.append((text, tokens))
        elif text in prompts:
            raise CheckpointError(f"the two do not read {text!r} as the same tokens: give token ids instead")
        else:
            return random_tokens(vocab_size, min(a.config.max_length, b.config.max_length))
    for label, tokens in (read := read + [read_tokens(file) for file in token_files]):
        if int(tokens.max()) >= vocab_size:
            raise CheckpointError(f"{label} has token {int(tokens.max())}, and one vocabulary is of {vocab_size}")
    return read


def _tokens(text: str, a: HookedTransformer, b: HookedTransformer) -> Tensor | None:
    """The tokens of a text, where both have a tokenizer and read it the same."""
    if not (a.has_tokenizer and b.has_tokenizer):
        return None
    first, second = a.to_tokens(text), b.to_tokens(text)
    return first if torch.equal(first, second) else None


def _settings(a: HookedTransformer, b: HookedTransformer) -> dict[str, tuple[Any, Any]]:
    """What two configs of ours say otherwise, where both have the block; the release's own config is not looked at."""
    first, second = (dict(_flat(_described(model))) for model in (a, b))
    blocks = min(a.num_layers, b.num_layers)
    found: dict[str, tuple[Any, Any]] = {}
    for name in [*first, *(name for name in second if name not in first)]:
        if first.get(name) != second.get(name) and (_layer(name) or 0) < blocks:
            found.setdefault(re.sub(r"^layers\.\d+", "layers.{i}", name), (first.get(name), second.get(name)))
    return found


def _described(model: HookedTransformer) -> dict[str, Any]:
    config, origin = model.config.to_dict(), model.config.origin
    family = None if origin is None else origin.family
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    return {**config, "origin": None, "family": family, "num_layers": model.num_layers, "dtype": dtype}


def _layer(name: str) -> int | None:
    found = re.match(r"layers\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Each leaf of nested dicts, and of the list of layers, with its path."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in _flat(each, f"{name}.{key}" if name else key)]
    if name == "layers":
        return [leaf for i, each in enumerate(value) for leaf in _flat(each, f"{name}.{i}")]
    return [(name, value)]
