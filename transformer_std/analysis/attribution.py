"""Attribution patching: what patching would change, to first order, for every cell at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_std.analysis.labels import Sweep
from transformer_std.analysis.patching import check_cache, check_holds
from transformer_std.analysis.sweeps import (
    Metric,
    Question,
    answered,
    ask,
    bar,
    entering,
    labelled,
    places,
    same_size,
    shown,
    swept_points,
)
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.names import NamesFilter
from transformer_std.inputs import Input
from transformer_std.layouts import axes, is_integer


def attribution_patching(
    model: Hooked,
    corrupted: Input,
    clean: Any,
    value: NamesFilter,
    metric: Metric,
    *,
    over: str | Sequence[str] = "seq",
    integrated_gradients: int = 0,
    attention_mask: Tensor | None = None,
    progress: bool | None = None,
) -> Sweep:
    """The gradient of the metric at the corrupted run, times what the clean run's value has more, summed over each
    cell: an estimate of what `activation_patching` would add to the baseline, from one forward and one backward
    (https://www.neelnanda.io/mechanistic-interpretability/attribution-patching).

        model.attribution_patching(corrupted, clean, "attention_premix", metric, over=("seq", "num_heads"))

    With `integrated_gradients` the gradient is the mean of those at so many points of the line between the two runs'
    values, a layer at a time (https://arxiv.org/abs/1703.01365): a layer's cells then sum to what patching all of it
    adds, up to the step. No parameter is given a gradient.

    Args:
        corrupted: what `forward` takes; as long as the clean input, and padded alike.
        clean: the cache of the clean run, with `value` in it.
        value: a value of the blocks, on every layer that has it; or `(value, layer)` pairs.
        metric: from the logits of a run to a number, or to a tensor [batch], which autograd can follow.
        over: axes of the value's layout, by their names there or in TransformerLens; () for a layer at once.
        integrated_gradients: how many points on the line; 0: the gradient at the corrupted run.
        attention_mask: [batch seq], of the corrupted input.
        progress: show a bar on standard error; None: on a terminal.

    Returns:
        The estimate of every cell, [layers *sizes], or [layers *sizes batch] of a metric of rows.

    Raises:
        ValueError: a value of no block, one that holds whole numbers, an axis that it does not have, or two runs that
            differ in size.
        TypeError: a `clean` that is no cache, or a metric that gives no number or no gradient.
        UnknownName, Unavailable: as elsewhere, and where `clean` lacks the value.
    """
    check_cache(clean)
    points = swept_points(model, value)
    if whole := [point.name for point in points if is_integer(point.layout)]:
        raise ValueError(f"{whole[0]} holds whole numbers, which have no gradient")
    check_holds(clean, points)
    swept = [places(point, over) for point in points]
    size = same_size([[clean[point.name].shape[at] for at in each] for point, each in zip(points, swept, strict=True)])
    with torch.no_grad():
        asked = ask(model, corrupted, attention_mask, metric, "all")
    if integrated_gradients:
        products = _along_lines(model, asked, points, clean, integrated_gradients, shown(progress))
    else:
        values, gradients = slopes(model, asked, points)
        products = [gradients[p.name] * (_like(clean[p.name], values[p.name], p) - values[p.name]) for p in points]
    rows = asked.baseline.ndim == 1
    found = torch.stack([_summed(each, at, rows) for each, at in zip(products, swept, strict=True)])
    assert list(found.shape[1 : 1 + len(size)]) == size
    names = [axes(points[0].layout)[at] for at in swept[0]]
    what = ", ".join(dict.fromkeys(point.value for point in points))
    return labelled(model, asked._replace(baseline=torch.zeros(())), found, [[p] for p in points], names, what)


def slopes(
    model: Hooked, asked: Question, points: Sequence[HookPoint], embeddings: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values at `points` in the plain run, or that from other `embeddings` on, and the metric's gradient at each;
    zero where it does not hang on it."""
    gradients: dict[str, Tensor] = {}
    leaf: list[Tensor] = []

    def begin(embedded: Tensor, hook: HookPoint) -> Tensor:
        leaf.append((embedded if embeddings is None else embeddings).detach().requires_grad_())
        return leaf[0]

    def keep(gradient: Tensor, hook: HookPoint) -> None:
        gradients[hook.name] = gradient.detach().clone()

    with torch.enable_grad(), model.hooks(fwd_hooks=[("token_embeddings", begin)], bwd_hooks=[(list(points), keep)]):
        logits, cache = model.run_with_cache(asked.tokens, names_filter=list(points), attention_mask=asked.mask)
        _backward(asked.metric, logits, leaf)
    values = {point.name: cache[point.name] for point in points}
    return values, {name: gradients.get(name, torch.zeros_like(value)) for name, value in values.items()}


def _backward(metric: Metric, logits: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    total = answered(metric, logits).sum()
    if not total.requires_grad:
        raise TypeError("the metric has no gradient: make it of the logits, by functions of torch")
    return torch.autograd.grad(total, leaves)


def _along_lines(
    model: Hooked, asked: Question, points: Sequence[HookPoint], clean: Any, steps: int, progress: bool
) -> list[Tensor]:
    """Each value's difference times the mean gradient along its line, of which the middles of `steps` parts are run."""
    layers = [0 if point.layer is None else point.layer for point in points]
    with torch.no_grad():
        streams = entering(model, asked.tokens, asked.mask, list(dict.fromkeys(layers)))
    found = []
    with bar("integrating" if progress else None, len(points) * steps) as advance:
        for point, layer in zip(points, layers, strict=True):
            total: Tensor | float = 0.0
            for step in range(steps):
                total = total + _on_line(model, asked, point, clean[point.name], streams[layer], (step + 0.5) / steps)
                advance(1)
            found.append(torch.as_tensor(total) / steps)
    return found


def _on_line(model: Hooked, asked: Question, point: HookPoint, clean: Tensor, stream: Tensor, share: float) -> Tensor:
    """The two runs' difference at `point` times the gradient where it has this `share` of it."""
    difference: list[Tensor] = []
    leaf: list[Tensor] = []

    def move(value: Tensor, hook: HookPoint) -> Tensor:
        difference.append(_like(clean, value, hook) - value.detach())
        leaf.append((value.detach() + share * difference[0]).requires_grad_())
        return leaf[0]

    with torch.enable_grad():
        logits = model.run_with_hooks(
            stream, fwd_hooks=[(point.name, move)], start_at_layer=point.layer, attention_mask=asked.mask
        )
        (gradient,) = _backward(asked.metric, logits, leaf)
    return gradient * difference[0]


def _like(clean: Tensor, value: Tensor, point: HookPoint) -> Tensor:
    if clean.shape != value.shape:
        raise ValueError(
            f"{point.name} is {list(clean.shape)} in the clean run and {list(value.shape)} in the corrupted one: "
            "patching needs two inputs of one size"
        )
    return clean.to(value)


def _summed(product: Tensor, swept: list[int], rows: bool) -> Tensor:
    """Over all axes but the swept ones, in their order, and the batch where rows are apart."""
    kept = [*swept, *([0] if rows else [])]
    others = [i for i in range(product.ndim) if i not in kept]
    ordered = product.permute(*kept, *others)
    return ordered.flatten(len(kept)).sum(-1) if others else ordered
