"""Steering: a vector added to a value, put in its place, or projected out; made of examples, and kept in a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from transformer_std.analysis.interventions import Places, Positions
from transformer_std.analysis.sweeps import bar, shown
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.layouts import axes, describe
from transformer_std.transformer import Transformer

HOW = ("add", "replace", "project_out")
FORMAT = "transformer_std direction"
LOOKED_AT = 4  # numbers of every parameter, by which a file knows its model
ROUNDING = 0.004  # of these numbers in another dtype


@dataclass(frozen=True)
class Direction:
    """A vector, and where in which model it is meant.

    Attributes:
        vector: of the value's last axes, [hidden_size] of a stream.
        value, layer: where it was found.
    """

    vector: Tensor
    value: str
    layer: int
    seen: Tensor

    def __repr__(self) -> str:
        return f"Direction({self.value} {self.layer}, {list(self.vector.shape)}, norm {float(self.vector.norm()):.4g})"

    def save(self, file: str | Path) -> None:
        """Into a safetensors file."""
        from safetensors.torch import save_file

        header = {"format": FORMAT, "value": self.value, "layer": json.dumps(self.layer)}
        save_file({"vector": self.vector.contiguous(), "model": self.seen}, file, header)

    @staticmethod
    def load(file: str | Path, model: Transformer | None = None) -> Direction:
        """Reads what `save` wrote. With `model` it must be the one in which the direction was found, in whatever dtype.

        Raises:
            ValueError: the file holds something else, or is of another model.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                header = opened.metadata() or {}
                if header.get("format") != FORMAT:
                    raise ValueError(f"it says {header.get('format')!r}")
                vector, seen = opened.get_tensor("vector"), opened.get_tensor("model")
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{file} is not a direction that Direction.save wrote: {error}") from None
        if model is not None and not _is_the_same(seen, _seen(model)):
            raise ValueError(
                f"{file} is a direction of another model: its weights differ. To use it all the same, load it without "
                "a model"
            )
        return Direction(vector, header["value"], json.loads(header["layer"]), seen)


@contextlib.contextmanager
def steer(
    model: Hooked,
    layers: int | Sequence[int] | Direction,
    vector: Tensor | None = None,
    factor: float | Callable[[int], float] = 1.0,
    token_positions: Positions = None,
    batch_index: Positions = None,
    *,
    value: str = "layer_output",
    how: str = "add",
) -> Iterator[None]:
    """Adds `factor * vector` to the stream leaving each of `layers`, or to another value, at some positions and rows or
    at all; or puts it there instead, or takes it out.

        with model.steer(5, vector, factor=4.0): ...
        with model.steer(Direction.load("calm.safetensors", model), how="project_out"): ...

    Positions are columns of the input, padding included, so that -1 is every row's last token under left padding.
    In generation they are the prompt's, and the tokens after it are steered only where `token_positions` is None.

    Args:
        layers: a block's number, or several; or a `Direction`, which says value, layer and vector.
        vector: of the value's last axes: [hidden_size] of a stream, [num_heads head_dim] of heads, or [head_dim] for
            all of them.
        factor: what the vector is multiplied by; a function is asked for each step's, 0 being the prompt.
        token_positions: None for all; a number or a slice for the same on every row; [rows] or [rows, n] (a tensor
            or lists, whose rows may differ in length) for each row's own, in the order of `batch_index`; [1, n] for
            these on every row. Where one row is steered, a flat list is its positions.
        batch_index: the rows to steer, a number, a list, a slice or a tensor; None for all.
        value: a value of blocks that has positions.
        how: "add"; "replace", by `factor * vector`; "project_out", which takes `factor` of the part along the vector
            away: with 1 nothing is left of it.

    Raises:
        ValueError: a vector of another size, another `how`, or a value that has no positions; in the forward, a
            position or row that the input does not have, or positions for another number of rows.
        UnknownName, Unavailable: as elsewhere.
    """
    if isinstance(layers, Direction):
        if vector is not None:
            raise ValueError("a Direction has its own vector: give one of the two")
        direction, layers = layers, layers.layer
        vector, value = direction.vector, direction.value
    if vector is None:
        raise ValueError("there is no vector to steer by")
    if how not in HOW:
        raise ValueError(f"how is {how!r}; give {', '.join(map(repr, HOW))}")
    where = [(value, layer) for layer in ([layers] if isinstance(layers, int) else layers)]
    points = [target.point for target in model.names.targets(where)]
    for point in points:
        _check_fits(model, point, vector)
    spots = {point.name: Places(token_positions, batch_index) for point in points}
    along = tuple(range(-vector.ndim, 0))

    def write(here: Tensor, hook: HookPoint) -> Tensor | None:
        if here.shape[-vector.ndim :] != vector.shape:
            raise ValueError(f"the vector is {list(vector.shape)}; {hook.name} is {list(here.shape)}")
        new = here.clone()
        by_position = new.movedim(axes(hook.layout).index("seq"), 1)
        found = spots[hook.name].of(len(by_position), by_position.shape[1], hook.step)
        if found is None:
            return None
        strength = factor(hook.step) if callable(factor) else factor
        change, old = strength * vector.to(here), by_position[found]
        if how == "project_out":
            unit = vector.to(here) / vector.to(here).norm()
            change = -strength * (old * unit).sum(along, keepdim=True) * unit
        by_position[found] = change.expand_as(old) if how == "replace" else old + change
        return new

    with model.hooks(fwd_hooks=[(points, write)]):
        yield


def _check_fits(model: Hooked, point: HookPoint, vector: Tensor) -> None:
    names = axes(point.layout)
    if "seq" not in names:
        raise ValueError(f"{point.name} is {describe(point.layout)}, which has no positions to steer at")
    if vector.ndim == 0 or vector.ndim > len(names) - 2:
        raise ValueError(f"the vector is {list(vector.shape)}; {point.name} is {describe(point.layout)}")
    if names[-1] == "hidden_size" and vector.shape[-1] != model.hidden_size:
        raise ValueError(f"the vector is {list(vector.shape)}; the stream has {model.hidden_size} dimensions")
    if not vector.is_floating_point():
        raise ValueError(f"the vector is of {vector.dtype}: give one of real numbers")


@torch.no_grad()
def make_vector(
    model: Hooked,
    positive: Any,
    negative: Any,
    value: str = "layer_output",
    layer: int | None = None,
    *,
    at: str = "last",
    batch_size: int = 16,
    progress: bool | None = None,
) -> Direction:
    """The mean of a value over examples, less that over counterexamples (https://arxiv.org/abs/2312.06681).

        calm = model.make_vector(["I am calm.", "All is well."], ["I am furious!", "How dare you!"], layer=5)
        calm.save("calm.safetensors")

    Args:
        positive, negative: lists of texts, or what else `forward` takes.
        value: a value of a block that has positions.
        layer: the block; None: the middle one.
        at: "last", each row's last token; or "mean", over its tokens.
        batch_size: how many rows run at once.
        progress: show a bar on standard error; None: on a terminal.

    Raises:
        ValueError: another `at`, or a value without positions.
        TypeError: no examples.
        UnknownName, Unavailable: as elsewhere.
    """
    if at not in ("last", "mean"):
        raise ValueError(f"at is {at!r}; give 'last' or 'mean'")
    layer = model.num_layers // 2 if layer is None else layer
    point = model.names.at(value, layer).point
    if "seq" not in axes(point.layout):
        raise ValueError(f"{point.name} is {describe(point.layout)}, which has no positions")
    read = [model.read(each) for each in (positive, negative)]
    means = []
    with bar("reading examples" if shown(progress) else None, sum(len(tokens) for tokens, _ in read)) as advance:
        for tokens, mask in read:
            rows = []
            for start in range(0, len(tokens), batch_size):
                some = slice(start, start + batch_size)
                of_some = None if mask is None else mask[some]
                rows.append(_by_row(model, point, tokens[some], of_some, at))
                advance(len(rows[-1]))
            means.append(torch.cat(rows).mean(0))
    vector = (means[0] - means[1]).to(rows[0].dtype)
    return Direction(vector, point.value, layer, _seen(model))


def _by_row(model: Hooked, point: HookPoint, tokens: Any, mask: Tensor | None, at: str) -> Tensor:
    """The value at each row's last real token, or its mean over them, [batch ...]; in float32."""
    _, cache = model.run_with_cache(
        tokens, names_filter=point, attention_mask=mask, return_type=None, stop_at_layer=(point.layer or 0) + 1
    )
    value = cache[point.name].movedim(axes(point.layout).index("seq"), 1).float()
    real = torch.ones_like(tokens) if mask is None else mask
    if at == "last":
        places = torch.arange(real.shape[1], device=real.device)
        real = (places == (real * places).argmax(-1, keepdim=True)).to(real)
    weights = (real / real.sum(-1, keepdim=True)).to(value)
    return einsum(value, weights, "batch seq ..., batch seq -> batch ...")


def _seen(model: Transformer) -> Tensor:
    """The first numbers of every parameter, by which a model is known; NaN of those that are not in memory."""
    numbers = []
    for parameter in model.parameters():
        if parameter.is_meta:
            numbers.append(torch.full((LOOKED_AT,), torch.nan))
        else:
            numbers.append(parameter.detach().flatten()[:LOOKED_AT].float().cpu())
    return torch.cat(numbers)


def _is_the_same(seen: Tensor, here: Tensor) -> bool:
    if seen.shape != here.shape:
        return False
    known = ~(seen.isnan() | here.isnan())
    return torch.allclose(seen[known], here[known], rtol=2 * ROUNDING, atol=1e-6) if bool(known.any()) else False
