"""What one changes in a run: blocks skipped, streams steered, experts taken out. Functions of a model."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint

Positions = Any  # None, a number, a slice, or numbers in lists, an array or a tensor
Hooks = list[tuple[tuple[str, int], Any]]


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


@contextlib.contextmanager
def steer(
    model: Hooked,
    layers: int | Sequence[int],
    vector: Tensor,
    factor: float = 1.0,
    token_positions: Positions = None,
    batch_index: Positions = None,
) -> Iterator[None]:
    """Adds `factor * vector` to the stream leaving each of `layers`, at some positions and rows or at all.

    Positions are columns of the input, padding included, so that -1 is every row's last token under left padding.
    In generation they are the prompt's, and the tokens after it are steered only where `token_positions` is None.

    Args:
        layers: a block's number, or several.
        vector: [hidden_size].
        factor: what the vector is multiplied by.
        token_positions: None for all; a number or a slice for the same on every row; [rows] or [rows, n] (a tensor
            or lists, whose rows may differ in length) for each row's own, in the order of `batch_index`; [1, n] for
            these on every row. Where one row is steered, a flat list is its positions.
        batch_index: the rows to steer, a number, a list, a slice or a tensor; None for all.

    Raises:
        ValueError: a vector of another size; in the forward, a position or row that the input does not have, or
            positions for another number of rows.
    """
    if vector.shape != (model.hidden_size,):
        raise ValueError(f"the vector is {list(vector.shape)}; the stream has {model.hidden_size} dimensions")
    positions, rows = _numbers("token_positions", token_positions), _numbers("batch_index", batch_index)

    prompt = 0

    def add(stream: Tensor, hook: HookPoint) -> Tensor | None:
        nonlocal prompt
        prompt = stream.shape[1] if hook.step == 0 else prompt
        if token_positions is not None and stream.shape[1] < prompt + hook.step:
            return None  # a step that reads the new token alone
        at, columns = _places(rows, positions, len(stream), prompt)
        change = torch.zeros_like(stream)
        if columns is None:
            change[at] = factor * vector.to(stream)
        else:
            change[at, columns] = factor * vector.to(stream)
        return stream + change

    layers = [layers] if isinstance(layers, int) else layers
    with model.hooks(fwd_hooks=[([("layer_output", layer) for layer in layers], add)]):
        yield


def ablate_expert(model: Hooked, layer: int, expert: int) -> Hooks:
    """Hooks that take `expert` of block `layer` out wherever it is chosen: its slots weigh nothing."""
    _check_expert(model, layer, expert)
    chosen: dict[str, Tensor] = {}

    def look(indices: Tensor, hook: HookPoint) -> None:
        chosen["indices"] = indices

    def silence(weights: Tensor, hook: HookPoint) -> Tensor:
        return weights.masked_fill(chosen["indices"] == expert, 0)

    return [(("expert_indices", layer), look), (("expert_weights", layer), silence)]


def reroute(model: Hooked, layer: int, expert: int, to: int) -> Hooks:
    """Hooks that send every slot of block `layer` that chose `expert` to expert `to`, at the weight it had."""
    _check_expert(model, layer, expert)
    _check_expert(model, layer, to)
    return [(("expert_indices", layer), lambda indices, hook: indices.masked_fill(indices == expert, to))]


def _check_expert(model: Hooked, layer: int, expert: int) -> None:
    model.names.at("expert_indices", layer)
    count = model.layers[layer].mlp.num_experts
    if not 0 <= expert < count:
        raise ValueError(f"expert {expert} is out of range: block {layer} has experts 0 to {count - 1}")


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
