"""Sweeps that put something else in a value's place: another run's, a mean, nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from transformer_std.activation_cache import CachedValues
from transformer_std.analysis.labels import Sweep
from transformer_std.analysis.sweeps import (
    POSITIONS,
    Cell,
    Job,
    Metric,
    Question,
    ask,
    labelled,
    measured,
    places,
    run_cells,
    same_size,
    shown,
    swept_points,
)
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookFn, HookPoint
from transformer_std.hooks.names import NamesFilter, UnknownName
from transformer_std.inputs import Input
from transformer_std.layouts import axes, describe

KINDS = ("zero", "mean", "mean by position", "noise")


@torch.no_grad()
def activation_patching(
    model: Hooked,
    corrupted: Input,
    clean: Any,
    value: NamesFilter,
    metric: Metric,
    *,
    over: str | Sequence[str] = "seq",
    together: bool = False,
    positions: str | None = None,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Puts `value` of the clean run into the corrupted one, a cell at a time, and measures what comes of each
    (https://arxiv.org/abs/2202.05262).

    A cell is a layer and an index on each axis of `over`. Cells of a layer run together, as rows of a batch, and
    from that layer on: before it they are the corrupted run. So a metric may differ from that of a run alone in
    its last bits. While other hooks are on the model, each cell is a whole run alone, which they see as any other.

        model.activation_patching(corrupted, clean, "layer_input", metric)  # [layers seq]
        model.activation_patching(corrupted, clean, "attention_premix", metric, over=("seq", "num_heads"))
        model.activation_patching(corrupted, clean, ["attention_keys", "attention_values"], metric, together=True)

    A mixture's slots are patched by their number, whichever experts the two runs chose: `router_logits` moves
    choice and weights together.

    Args:
        corrupted: what `forward` takes; as long as the clean input, and padded alike.
        clean: the cache of the clean run, with `value` in it.
        value: a value of the blocks, on every layer that has it; or `(value, layer)` pairs.
        metric: from the logits of one patched run to a number, or to a tensor [batch].
        over: axes of the value's layout, by their names there or in TransformerLens.
        together: all values of a layer are patched in one cell.
        positions: which positions' logits the metric reads, "all" or "last"; None finds out on the corrupted run
            whether it says the same of the last position alone, and then makes no other logits.
        attention_mask: [batch seq], of the corrupted input.
        batch_size: how many rows run at once; None: as many as 256 MB hold, by what a row takes.
        progress: show a bar on standard error, which is gone at the end; None: on a terminal.

    Returns:
        The metric of every cell, [layers *sizes], or [layers *sizes batch]; layers in the order of `value`. Its
        `baseline` is the corrupted run's, its `clean` the clean run's, where `clean` holds `logits`.

    Raises:
        ValueError: a value of no block, an axis that it does not have, or two runs that differ in size.
        TypeError: a `clean` that is no cache, or a metric that gives no number.
        UnknownName, Unavailable: as elsewhere, and where `clean` lacks the value.
    """
    check_cache(clean)
    if not callable(metric):
        raise TypeError(f"the metric is a {type(metric).__name__}: give a function of the logits")
    points = swept_points(model, value)
    check_holds(clean, points)
    asked = ask(model, corrupted, attention_mask, metric, positions)
    best = None
    if "logits" in clean and clean["logits"].ndim == 3:
        logits = clean["logits"]
        best = measured(metric, logits[:, -1:] if asked.last else logits)
    doing = "patching" if shown(progress) else None
    return _put(model, asked, points, clean, over, together, batch_size, doing, best)


@torch.no_grad()
def ablate(
    model: Hooked,
    input: Input,
    value: NamesFilter,
    metric: Metric,
    kind: str | Mapping[str, Any] = "zero",
    *,
    over: str | Sequence[str] = "seq",
    together: bool = False,
    positions: str | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Takes `value` away, a cell at a time, and measures what comes of each: a sweep as `activation_patching` is.

        model.ablate(tokens, "attention_premix", metric, over="num_heads")  # each head's output zero
        model.ablate(tokens, "mlp_output", metric, "mean")

    Args:
        input: what `forward` takes.
        value: a value of the blocks, on every layer that has it; or `(value, layer)` pairs.
        metric: from the logits of one run to a number, or to a tensor [batch].
        kind: what stands in its place: "zero"; "mean", that of this input's real tokens; "mean by position", over its
            rows; "noise" of the value's mean and standard deviation, drawn by `generator`; or a cache of another input
            of this size, or a dict from full names to tensors of the value's shape or one that is repeated along it (a
            corpus's means).
        over: axes of the value's layout, by their names there or in TransformerLens; () for a layer at once.
        together, positions, attention_mask, batch_size, progress: as `activation_patching` takes them.

    Returns:
        The metric of every cell; its `baseline` is the plain run's.

    Raises:
        ValueError: another kind, a value of no block, or an axis that it does not have.
        UnknownName: what is to stand in the place of a value does not hold it.
    """
    if isinstance(kind, str) and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; give {', '.join(map(repr, KINDS))}, a cache, or a dict of tensors")
    points = swept_points(model, value)
    asked = ask(model, input, attention_mask, metric, positions)
    _, cache = model.run_with_cache(asked.tokens, names_filter=points, attention_mask=asked.mask, return_type=None)
    if isinstance(kind, str):
        put = {point.name: _instead(kind, point, cache[point.name], asked.mask, generator) for point in points}
    else:
        check_holds(kind, points, whole=False)
        put = {point.name: kind[point.name].to(cache[point.name]).expand_as(cache[point.name]) for point in points}
    doing = "ablating" if shown(progress) else None
    return _put(model, asked, points, put, over, together, batch_size, doing)


def _instead(
    kind: str, point: HookPoint, value: Tensor, mask: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    if kind == "zero":
        return torch.zeros_like(value)
    if not value.is_floating_point():
        raise ValueError(f"{point.name} holds numbers of things, which have no mean: take it away by 'zero' or a cache")
    names = axes(point.layout)
    if kind == "noise":
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value)
        return value.mean() + value.std() * noise
    over = [0] if kind == "mean by position" else [i for i, name in enumerate(names) if name in ("batch", *POSITIONS)]
    seq = names.index("seq") if "seq" in names else None
    if mask is None or seq is None:
        return value.mean(over, keepdim=True).expand_as(value)
    real = mask[:, -value.shape[seq] :].to(value)
    weights = real.view(*[size if i in (0, seq) else 1 for i, size in enumerate(value.shape)])
    return ((value * weights).sum(over, keepdim=True) / weights.sum(over, keepdim=True)).expand_as(value)


def check_cache(clean: Any) -> None:
    """Raises `TypeError` where `clean` is no cache."""
    if not isinstance(clean, CachedValues):
        raise TypeError(
            f"clean is a {type(clean).__name__}: give the cache that run_with_cache made of the clean input"
        )


def check_holds(held: Mapping[str, Any], points: Sequence[HookPoint], whole: bool = True) -> None:
    """Raises `UnknownName` where a value is missing, `ValueError` where it has lost an axis."""
    for point in points:
        if point.name not in held:
            raise UnknownName(f"the clean cache does not hold {point.name}: keep it there, or name other layers")
        if whole and held[point.name].ndim != len(axes(point.layout)):
            shape = list(held[point.name].shape)
            raise ValueError(f"{point.name} is {shape} in the clean cache, not {describe(point.layout)}")


def _put(
    model: Hooked,
    asked: Question,
    points: Sequence[HookPoint],
    held: Mapping[str, Any],
    over: str | Sequence[str],
    together: bool,
    batch_size: int | None,
    doing: str | None,
    clean: Tensor | None = None,
) -> Sweep:
    """The metric of every cell that has `held` in its place."""
    groups = [list(group) for group in grouped(points, together)]
    swept = {point.name: places(point, over) for point in points}
    size = same_size([[held[point.name].shape[at] for at in swept[point.name]] for point in points])
    cells = list(itertools.product(*map(range, size)))

    def hooks(group: Sequence[HookPoint], cells: Sequence[Cell]) -> list[tuple[str, HookFn]]:
        return [(point.name, put_cells(held[point.name], swept[point.name], cells)) for point in group]

    jobs = [Job(group[0].layer or 0, cells, functools.partial(hooks, group)) for group in groups]
    found = run_cells(model, asked, jobs, batch_size, doing).unflatten(0, (len(groups), *size))
    names = [axes(points[0].layout)[at] for at in swept[points[0].name]]
    what = ", ".join(dict.fromkeys(point.value for point in points))
    return labelled(model, asked, found, groups, names, what, clean)


def grouped(points: Sequence[HookPoint], together: bool) -> list[list[HookPoint]]:
    """The points of one cell: each alone, or all of a layer."""
    if not together:
        return [[point] for point in points]
    layers = dict.fromkeys(point.layer for point in points)
    return [[point for point in points if point.layer == layer] for layer in layers]


def put_cells(clean: Tensor, swept: list[int], cells: Sequence[Cell]) -> HookFn:
    """A hook on the runs of `cells`, which lie behind one another in the batch: each gets its cell of `clean`."""

    def patch(value: Tensor, hook: HookPoint) -> None:
        runs = rearrange(value, "(cell batch) ... -> cell batch ...", cell=len(cells))
        if runs.shape[1:] != clean.shape:
            raise ValueError(
                f"{hook.name} is {list(clean.shape)} in the clean run and {list(runs.shape[1:])} in the corrupted one: "
                "patching needs two inputs of one size"
            )
        for run, cell in zip(runs, cells, strict=True):
            chosen = dict(zip(swept, cell, strict=True))
            at = tuple(chosen.get(place, slice(None)) for place in range(clean.ndim))
            run[at] = clean[at]

    return patch
