"""One table a family says which tensor of a checkpoint is which of ours; it is read in both directions.

A pattern is a name with `{i}` for a block's index and `{e}` for an expert's. The first row that fills a tensor of ours
is the layout of the released files, which `export` writes; later rows for the same tensor are other layouts to read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Copy:
    """A tensor of theirs is one of ours, or `transposed`, its transpose: a view, since what a product rounds to depends
    on how its matrix lies in memory."""

    theirs: str
    ours: str
    transposed: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.theirs,)


@dataclass(frozen=True)
class Stack:
    """Tensors of theirs, one set an expert, are the rows of one of ours: [expert, sources side by side, ...]."""

    sources: tuple[str, ...]
    ours: str


@dataclass(frozen=True)
class Ignore:
    """A tensor of theirs that we do not need, and why."""

    theirs: str
    because: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.theirs,)


@dataclass(frozen=True)
class Beyond(Ignore):
    """What begins so, of blocks past the config's."""


Rule = Copy | Stack | Ignore
Indices = dict[str, int]


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>[0-9]{1,9})", re.escape(pattern)))


def indices(pattern: str, name: str) -> Indices | None:
    """The numbers in `name` where `pattern` has `{i}` and `{e}`; None where it does not fit."""
    found = _regex(pattern).fullmatch(name)
    return None if found is None else {key: int(number) for key, number in found.groupdict().items()}


def lies_beyond(rules: list[Rule], name: str, blocks: int) -> bool:
    """Whether a tensor of theirs is of a block past the first `blocks`, and a rule passes over those."""
    starts = [_regex(rule.theirs).match(name) for rule in rules if isinstance(rule, Beyond)]
    return any(found is not None and int(found["i"]) >= blocks for found in starts)


# What stands in the names of a model that was saved inside a wrapper: peft's, a data-parallel one's, torch.compile's.
WRAPPED = re.compile(r"^(base_model\.model\.|module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")


def match(rules: list[Rule], name: str) -> tuple[Rule, int, Indices] | None:
    """The row that takes a tensor of theirs, which of the row's sources it is, and its indices. The name may also be
    that of a model saved inside a wrapper, or of a base model saved without its head, which lacks the first part of the
    other names, `model.`."""
    bare = WRAPPED.sub("", name)
    for spelled in (bare, f"{rules[0].sources[0].partition('.')[0]}.{bare}"):
        for rule in rules:
            for position, source in enumerate(rule.sources):
                found = indices(source, spelled)
                if found is not None:
                    return rule, position, found
    return None


def released_as(rules: Iterable[Rule], name: str) -> tuple[Copy | Stack, Indices]:
    """The row that writes a tensor of ours. Raises `KeyError` where there is none: a family's table has them all."""
    if (found := written_by(rules, name)) is None:
        raise KeyError(f"no row of the family's table is of {name}")
    return found


def written_by(rules: Iterable[Rule], name: str) -> tuple[Copy | Stack, Indices] | None:
    """The row that writes a tensor of ours in the released layout, and the tensor's indices."""
    for rule in rules:
        if not isinstance(rule, Ignore) and (found := indices(rule.ours, name)) is not None:
            return rule, found
    return None
