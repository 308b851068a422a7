"""Activation patching: which values of a clean run, put into a corrupted one, bring its answer back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from transformer_std.activation_cache import ActivationCache
from transformer_std.hook_points import HookPoint
from transformer_std.layouts import axes, describe
from transformer_std.lens_names import axis
from transformer_std.names import NamesFilter, UnknownName

RunLogits = Float[Tensor, "batch seq vocab_size"]
# From the logits of one patched run to a number, or to a tensor [batch].
Metric = Any


class Patching:
    """The part of a model that sweeps over interventions; it leans on its hooks and its text."""

    names: Any

    @torch.no_grad()
    def activation_patching(
        self,
        corrupted: Any,
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
        points = self._check_sweep(clean, value, metric)
        swept = [_swept(point, over) for point in points]
        size = _size(
            [[clean[point.name].shape[at] for at in places] for point, places in zip(points, swept, strict=True)]
        )
        corrupted, attention_mask = self.read(corrupted, attention_mask)  # type: ignore[attr-defined]
        # Hooks that are on the model may mean one row, or need every block.
        alone = any(point.watched for point in self.names.points.values())
        inputs = dict.fromkeys((point.layer for point in points), corrupted)
        if not alone:
            inputs = self._entering(corrupted, attention_mask, list(inputs))
        at_once = 1 if alone else max(1, batch_size // len(corrupted))
        cells = list(itertools.product(*map(range, size)))
        batches = [cells[start : start + at_once] for start in range(0, len(cells), at_once)]
        measured = []
        with _bar(progress, len(points) * len(cells)) as advance:
            for (point, places), some in itertools.product(zip(points, swept, strict=True), batches):
                logits = self.run_with_hooks(  # type: ignore[attr-defined]
                    repeat(inputs[point.layer], "batch ... -> (cell batch) ...", cell=len(some)),
                    fwd_hooks=[(point.name, _patch(clean[point.name], places, some))],
                    start_at_layer=None if alone else point.layer,
                    attention_mask=None if attention_mask is None else attention_mask.repeat(len(some), 1),
                )
                runs = rearrange(logits, "(cell batch) ... -> cell batch ...", cell=len(some))
                measured += [_measured(metric, run) for run in runs]
                advance(len(some))
        return torch.stack(measured).unflatten(0, (len(points), *size))

    def _check_sweep(self, clean: Any, value: NamesFilter, metric: Any) -> list[HookPoint]:
        """The hook points of a sweep."""
        if not isinstance(clean, ActivationCache):
            raise TypeError(
                f"clean is a {type(clean).__name__}: give the cache that run_with_cache made of the clean input"
            )
        if not callable(metric):
            raise TypeError(f"the metric is a {type(metric).__name__}: give a function of the logits")
        points = [target.point for target in self.names.targets(value)]
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

    def _entering(self, tokens: Tensor, mask: Tensor | None, layers: list[int]) -> dict[int, Tensor]:
        """The stream that enters each of `layers`."""
        _, cache = self.run_with_cache(  # type: ignore[attr-defined]
            tokens,
            names_filter=[("layer_input", layer) for layer in layers],
            attention_mask=mask,
            stop_at_layer=max(layers) + 1,
        )
        return {layer: cache["layer_input", layer] for layer in layers}


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


def _patch(clean: Tensor, places: list[int], cells: list[tuple[int, ...]]) -> Callable[[Tensor, HookPoint], None]:
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


def _measured(metric: Metric, run: RunLogits) -> Tensor:
    found = metric(run)
    is_number = isinstance(found, (int, float)) or (isinstance(found, Tensor) and found.shape in ((), run.shape[:1]))
    if not is_number:
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"the metric returned {what}: of logits {list(run.shape)}, give a number or a tensor [batch]")
    return torch.as_tensor(found).detach().clone()  # a view would hold the run's logits


@contextlib.contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("patching", total=total)
        yield lambda count: bar.advance(task, count)
