"""Activation patching: which values of a clean run, put into a corrupted one, bring its answer back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from transformer_std.activation_cache import CachedValues
from transformer_std.analysis.sweeps import Cell, Job, Metric, run_cells
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.names import NamesFilter, UnknownName
from transformer_std.hooks.transformer_lens import axis
from transformer_std.inputs import Input
from transformer_std.layouts import axes, describe


@torch.no_grad()
def activation_patching(
    model: Hooked,
    corrupted: Input,
    clean: Any,
    value: NamesFilter,
    metric: Metric,
    *,
    over: str | Sequence[str] = "seq",
    attention_mask: Tensor | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> Tensor:
    """Puts `value` of the clean run into the corrupted one, a cell at a time, and measures what comes of each
    (https://arxiv.org/abs/2202.05262).

    A cell is a layer and an index on each axis of `over`. Cells of a layer run together, as rows of a batch, and
    from that layer on: before it they are the corrupted run. So a metric may differ from that of a run alone in
    its last bits. While other hooks are on the model, each cell is a whole run alone, which they see as any other.

        model.activation_patching(corrupted, clean, "layer_input", metric)  # [layers seq]
        model.activation_patching(corrupted, clean, "attention_premix", metric, over=("seq", "num_heads"))

    A mixture's slots are patched by their number, whichever experts the two runs chose: `router_logits` moves
    choice and weights together.

    Args:
        corrupted: what `forward` takes; as long as the clean input, and padded alike.
        clean: the cache of the clean run, with `value` in it.
        value: a value of the blocks, on every layer that has it; or `(value, layer)` pairs.
        metric: from the logits of one patched run to a number, or to a tensor [batch].
        over: axes of the value's layout, by their names there or in TransformerLens.
        attention_mask: [batch seq], of the corrupted input.
        batch_size: how many rows run at once.
        progress: show a bar on standard error, which is gone at the end.

    Returns:
        The metric of every cell, [layers *sizes], or [layers *sizes batch]; layers in the order of `value`.

    Raises:
        ValueError: a value of no block, an axis that it does not have, or two runs that differ in size.
        TypeError: a `clean` that is no cache, or a metric that gives no number.
        UnknownName, Unavailable: as elsewhere, and where `clean` lacks the value.
    """
    points = _check_sweep(model, clean, value, metric)
    swept = [_swept(point, over) for point in points]
    sizes = [[clean[point.name].shape[at] for at in places] for point, places in zip(points, swept, strict=True)]
    size = _size(sizes)
    tokens, attention_mask = model.read(corrupted, attention_mask)
    cells = list(itertools.product(*map(range, size)))
    jobs = [
        Job(point, cells, functools.partial(_patch, clean[point.name], places))
        for point, places in zip(points, swept, strict=True)
    ]
    measured = run_cells(model, tokens, attention_mask, jobs, metric, batch_size, "patching" if progress else None)
    return measured.unflatten(0, (len(points), *size))


def _check_sweep(model: Hooked, clean: Any, value: NamesFilter, metric: Any) -> list[HookPoint]:
    """The hook points of a sweep."""
    if not isinstance(clean, CachedValues):
        raise TypeError(
            f"clean is a {type(clean).__name__}: give the cache that run_with_cache made of the clean input"
        )
    if not callable(metric):
        raise TypeError(f"the metric is a {type(metric).__name__}: give a function of the logits")
    points = [target.point for target in model.names.targets(value)]
    if not points:
        raise UnknownName(f"{value!r} means no value of this model")
    for point in points:
        if point.layer is None:
            raise ValueError(f"{point.name} is of the model, and patching goes by layers: name a value of blocks")
        if point.name not in clean:
            raise UnknownName(f"the clean cache does not hold {point.name}: keep it there, or name other layers")
        if clean[point.name].ndim != len(axes(point.layout)):
            shape = list(clean[point.name].shape)
            raise ValueError(f"{point.name} is {shape} in the clean cache, not {describe(point.layout)}")
    return points


def _swept(point: HookPoint, over: str | Sequence[str]) -> list[int]:
    """The places in the value's layout of the axes `over`."""
    names, wanted = axes(point.layout), [over] if isinstance(over, str) else list(over)
    places = []
    for each in wanted:
        if (name := axis(each, names)) not in names or name == "batch":
            raise ValueError(f"over={each!r} is no axis of {point.name} to sweep: it is {describe(point.layout)}")
        places.append(names.index(name))
    if len(set(places)) < len(places):
        raise ValueError(f"over={over!r} names an axis twice")
    return places


def _size(sizes: list[list[int]]) -> list[int]:
    if any(each != sizes[0] for each in sizes):
        raise ValueError(f"the axes to sweep differ in size between layers, {sizes}: name the layers")
    return sizes[0]


def _patch(clean: Tensor, places: list[int], cells: Sequence[Cell]) -> Callable[[Tensor, HookPoint], None]:
    """A hook on the runs of `cells`, which lie behind one another in the batch: each gets its cell of `clean`."""

    def patch(value: Tensor, hook: HookPoint) -> None:
        runs = rearrange(value, "(cell batch) ... -> cell batch ...", cell=len(cells))
        if runs.shape[1:] != clean.shape:
            raise ValueError(
                f"{hook.name} is {list(clean.shape)} in the clean run and {list(runs.shape[1:])} in the corrupted one: "
                "patching needs two inputs of one size"
            )
        for run, cell in zip(runs, cells, strict=True):
            chosen = dict(zip(places, cell, strict=True))
            at = tuple(chosen.get(place, slice(None)) for place in range(clean.ndim))
            run[at] = clean[at]

    return patch
