"""Many runs of one input, each with a change of its own, side by side in a batch: what every sweep stands on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookFn, HookPoint
from transformer_std.layouts import Tokens

RunLogits = Float[Tensor, "batch seq vocab_size"]
# From the logits of one run to a number, or to a tensor [batch].
if TYPE_CHECKING:
    Metric = Callable[[Tensor], Tensor | float]
else:
    Metric = Any  # one that is none is told by an error of ours
Cell = tuple[int, ...]


class Job(NamedTuple):
    """Cells that change the value at one hook point. `change(cells)` is a hook on the runs of these cells, which lie
    behind one another in the batch."""

    point: HookPoint
    cells: Sequence[Cell]
    change: Callable[[Sequence[Cell]], HookFn]


def run_cells(
    model: Hooked,
    tokens: Tokens,
    mask: Tensor | None,
    jobs: Sequence[Job],
    metric: Metric,
    batch_size: int,
    doing: str | None,
) -> Tensor:
    """The metric of every cell's run, [cells] or [cells batch], job after job.

    Cells of a job run together, as rows of a batch, and from its block on: before it they are the plain run. While
    other hooks are on the model, which may mean one row or need every block, each cell is a whole run alone.

    Args:
        model: the model to run.
        tokens: the input of every run.
        mask: [batch seq], its attention mask.
        jobs: the cells, by the value that they change.
        metric: from the logits of one run to a number, or to a tensor [batch].
        batch_size: how many rows run at once.
        doing: what a bar on standard error says; None: there is none.

    Raises:
        TypeError: a metric that gives no number.
    """
    alone = any(point.watched for point in model.names.points.values())
    layers = list(dict.fromkeys(job.point.layer for job in jobs))
    inputs = dict.fromkeys(layers, tokens) if alone else _entering(model, tokens, mask, layers)
    at_once = 1 if alone else max(1, batch_size // len(tokens))
    measured = []
    with _bar(doing, sum(len(job.cells) for job in jobs)) as advance:
        for job in jobs:
            for start in range(0, len(job.cells), at_once):
                some = job.cells[start : start + at_once]
                logits = model.run_with_hooks(
                    repeat(inputs[job.point.layer], "batch ... -> (cell batch) ...", cell=len(some)),
                    fwd_hooks=[(job.point.name, job.change(some))],
                    start_at_layer=None if alone else job.point.layer,
                    attention_mask=None if mask is None else mask.repeat(len(some), 1),
                )
                runs = rearrange(logits, "(cell batch) ... -> cell batch ...", cell=len(some))
                measured += [_measured(metric, run) for run in runs]
                advance(len(some))
    return torch.stack(measured)


def _entering(model: Hooked, tokens: Tokens, mask: Tensor | None, layers: list[int | None]) -> dict[int | None, Tensor]:
    """The stream that enters each of `layers`."""
    numbers = [layer for layer in layers if layer is not None]
    names = [("layer_input", layer) for layer in numbers]
    _, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=mask, stop_at_layer=max(numbers) + 1)
    return {layer: cache["layer_input", layer] for layer in numbers}


def _measured(metric: Metric, run: RunLogits) -> Tensor:
    found = metric(run)
    is_number = isinstance(found, (int, float)) or (isinstance(found, Tensor) and found.shape in ((), run.shape[:1]))
    if not is_number:
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"the metric returned {what}: of logits {list(run.shape)}, give a number or a tensor [batch]")
    return torch.as_tensor(found).detach().clone()  # a view would hold the run's logits


@contextlib.contextmanager
def _bar(doing: str | None, total: int) -> Iterator[Callable[[int], None]]:
    if doing is None:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda count: bar.advance(task, count)
