"""Activation patching: which values of a clean run, put into a corrupted one, bring its answer back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from transformer_std.activation_cache import ActivationCache
from transformer_std.hook_points import HookPoint
from transformer_std.layouts import axes, describe
from transformer_std.names import NamesFilter

Cells = Sequence[tuple[int, ...]]


class Patching:
    """The part of a model that sweeps over interventions; it leans on its hooks and its text."""

    names: Any

    @torch.no_grad()
    def activation_patching(
        self,
        corrupted: Any,
        clean: ActivationCache,
        value: NamesFilter,
        metric: Callable[[Float[Tensor, "batch seq vocab_size"]], Any],
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
        its last bits.

            model.activation_patching(corrupted, clean, "layer_input", metric)  # [layers seq]
            model.activation_patching(corrupted, clean, "attention_premix", metric, over=("seq", "num_heads"))

        Args:
            corrupted: what `forward` takes, as long as the clean input.
            clean: the cache of the clean run, with `value` in it.
            value: a value of the blocks, on every layer that has it; or `(value, layer)` pairs.
            metric: from the logits of one patched run to a number, or to a tensor [batch].
            over: axes of the value's layout, by their names there.
            attention_mask: [batch seq], of the corrupted input.
            batch_size: how many rows run at once.
            progress: show a bar on standard error, which is gone at the end.

        Returns:
            The metric of every cell, [layers *sizes], or [layers *sizes batch].

        Raises:
            ValueError: a value of no block, an axis that it does not have, or two runs that differ in size.
            UnknownName, Unavailable: as elsewhere, and where `clean` lacks the value.
        """
        over = (over,) if isinstance(over, str) else tuple(over)
        points: list[HookPoint] = self.names.resolve(value)
        sizes = {tuple(_size(point, clean[point.name], axis) for axis in over) for point in points}
        if len(sizes) > 1:
            raise ValueError(
                f"{' and '.join(over)} of {value!r} differ between layers, {sorted(sizes)}: name the layers"
            )
        size = sizes.pop()
        if not isinstance(corrupted, Tensor):
            corrupted, own_mask = self._encode(corrupted)  # type: ignore[attr-defined]
            attention_mask = own_mask if attention_mask is None else attention_mask
        _, base = self.run_with_cache(  # type: ignore[attr-defined]
            corrupted,
            names_filter=[("layer_input", point.layer) for point in points],
            attention_mask=attention_mask,
            stop_at_layer=points[-1].layer + 1,  # type: ignore[operator]
        )
        cells = list(itertools.product(*map(range, size)))
        at_once = max(1, batch_size // len(corrupted))
        batches = [cells[start : start + at_once] for start in range(0, len(cells), at_once)]
        measured = []
        for point, some in _under_a_bar(list(itertools.product(points, batches)), progress):
            stream = repeat(base["layer_input", point.layer], "batch ... -> (cell batch) ...", cell=len(some))
            mask = None if attention_mask is None else repeat(attention_mask, "b s -> (cell b) s", cell=len(some))
            logits = self.run_with_hooks(  # type: ignore[attr-defined]
                stream,
                fwd_hooks=[(point.name, _patch(clean[point.name], over, some))],
                start_at_layer=point.layer,
                attention_mask=mask,
            )
            runs = rearrange(logits, "(cell batch) ... -> cell batch ...", cell=len(some))
            measured += [torch.as_tensor(metric(run)) for run in runs]
        return torch.stack(measured).unflatten(0, (len(points), *size))


def _size(point: HookPoint, value: Tensor, axis: str) -> int:
    names = axes(point.layout)
    if point.layer is None:
        raise ValueError(f"{point.name} is a value of the model, and patching is layer by layer: name a block's value")
    if axis not in names or axis == "batch":
        raise ValueError(f"over={axis!r} is no axis of {point.name} to patch along: it is {describe(point.layout)}")
    if value.ndim != len(names):
        raise ValueError(
            f"the clean {point.name} is {list(value.shape)}, not {describe(point.layout)}: give a whole cache"
        )
    return value.shape[names.index(axis)]


def _patch(clean: Tensor, over: Sequence[str], cells: Cells) -> Callable[[Tensor, HookPoint], None]:
    """A hook on the runs of `cells`, which lie behind one another in the batch: each gets its cell of `clean`."""

    def patch(value: Tensor, hook: HookPoint) -> None:
        runs = rearrange(value, "(cell batch) ... -> cell batch ...", cell=len(cells))
        if runs.shape[1:] != clean.shape:
            raise ValueError(
                f"{hook.name} is {list(clean.shape)} in the clean run and {list(runs.shape[1:])} in the corrupted one: "
                "patching needs two inputs of one size"
            )
        for run, cell in zip(runs, cells, strict=True):
            chosen = dict(zip(over, cell, strict=True))
            at = tuple(chosen.get(axis, slice(None)) for axis in axes(hook.layout))
            run[at] = clean[at]

    return patch


def _under_a_bar(work: Sequence[Any], shown: bool) -> Iterable[Any]:
    if not shown:
        return work
    from rich.console import Console
    from rich.progress import track

    return track(work, description="patching", console=Console(stderr=True), transient=True)
