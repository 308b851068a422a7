"""Runs with some of their blocks left out, and places of an input as users say them."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any

from jaxtyping import Float
from torch import Tensor

from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint

Positions = Any  # None, a number, a slice, or numbers in lists, an array or a tensor


@contextlib.contextmanager
def skip_layers(
    model: Hooked, first: int, last: int, skip_with: Float[Tensor, "batch seq hidden_size"] | None = None
) -> Iterator[None]:
    """Blocks `first` to `last`, both included, hand on the stream that entered them, or `skip_with`. They still
    run, and their hooks fire; a key/value cache stays whole."""
    entered: dict[str, Tensor] = {}

    def enter(stream: Tensor, hook: HookPoint) -> None:
        entered["stream"] = stream

    def leave(stream: Tensor, hook: HookPoint) -> Tensor:
        return entered["stream"] if skip_with is None else skip_with

    if model.names.layer(first) > model.names.layer(last):
        raise ValueError(f"there are no layers from {first} to {last}")
    with model.hooks(fwd_hooks=[(("layer_input", first), enter), (("layer_output", last), leave)]):
        yield


class Places:
    """Rows and positions of an input. In generation they are the prompt's: the tokens after it are meant only where no
    position is named.

    Args:
        token_positions, batch_index: as `steer` takes them.

    Raises:
        TypeError: what are no whole numbers.
    """

    def __init__(self, token_positions: Positions, batch_index: Positions):
        self.positions = _numbers("token_positions", token_positions)
        self.rows = _numbers("batch_index", batch_index)
        self.prompt = 0

    def of(self, batch: int, seq: int, step: int) -> tuple[list[int], list[int] | slice] | None:
        """The row and the column of each place in step `step` of a run; None where it has none of them. Raises
        `ValueError` for a place that the input does not have."""
        self.prompt = seq if step == 0 else self.prompt
        if self.positions is not None and seq < self.prompt + step:
            return None  # a step that reads the new token alone
        rows, columns = _places(self.rows, self.positions, batch, self.prompt)
        return rows, slice(None) if columns is None else columns


def _numbers(name: str, given: Any) -> Any:
    """Positions or rows as plain numbers: a slice, None, one number, or lists of them."""
    given = given.tolist() if isinstance(given, Tensor) or hasattr(given, "tolist") else given
    if given is None or isinstance(given, slice):
        return given
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        return int(given)
    if isinstance(given, (list, tuple, range)) and len(given):
        return [_numbers(name, each) for each in given]
    raise TypeError(f"{name} holds {given!r}: give whole numbers, in lists or a tensor, or a slice")


def _within(name: str, number: Any, count: int) -> int:
    if not isinstance(number, int):
        raise ValueError(f"{name} holds {number!r} in the place of a number")
    if not -count <= number < count:
        raise ValueError(f"{name} {number} is out of range: the input has {count}")
    return number % count


def _sliced(name: str, given: slice, count: int) -> list[int]:
    chosen = list(range(count))[given]
    if not chosen:
        raise ValueError(f"{name} {given} is out of range: the input has {count}")
    return chosen


def _places(rows: Any, positions: Any, batch: int, seq: int) -> tuple[list[int], list[int] | None]:
    """The row and the column of each place to steer; whole rows where `positions` is None."""
    rows = slice(None) if rows is None else rows
    rows = (
        _sliced("batch_index", rows, batch) if isinstance(rows, slice) else rows if isinstance(rows, list) else [rows]
    )
    rows = [_within("batch_index", row, batch) for row in rows]
    if positions is None:
        return rows, None
    if isinstance(positions, (slice, int)):
        own = _sliced("token_positions", positions, seq) if isinstance(positions, slice) else [positions]
        each = [own] * len(rows)
    else:
        nested = any(isinstance(own, list) for own in positions)
        each = [own if isinstance(own, list) else [own] for own in positions]
        if not nested and len(rows) == 1:
            each = [positions]
        elif nested and len(each) == 1:
            each = each * len(rows)
    if len(each) != len(rows):
        raise ValueError(
            f"token_positions are for {len(each)} rows, and {len(rows)} are steered: give each row its own, [rows] or "
            "[rows, n], or [1, n] for these on every row"
        )
    places = [(row, _within("token_positions", at, seq)) for row, own in zip(rows, each, strict=True) for at in own]
    return [row for row, _ in places], [column for _, column in places]
