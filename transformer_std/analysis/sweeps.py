"""Many runs of one input, each with a change of its own, side by side in a batch: what every sweep stands on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from transformer_std.analysis.labels import Label, Sweep
from transformer_std.config import Mixture
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookFn, HookPoint
from transformer_std.hooks.names import NamesFilter, UnknownName
from transformer_std.hooks.transformer_lens import axis
from transformer_std.layouts import Tokens, axes, describe

RunLogits = Float[Tensor, "batch seq vocab_size"]
# From the logits of one run to a number, or to a tensor [batch].
if TYPE_CHECKING:
    Metric = Callable[[Tensor], Tensor | float]
else:
    Metric = Any  # one that is none is told by an error of ours
Cell = tuple[int, ...]
POSITIONS = ("seq", "query", "key")
AT_ONCE = 2**28  # bytes that the rows of a batch may take
MOST_ROWS = 64


class Job(NamedTuple):
    """Cells that change something in block `layer` and after it. `hooks(cells)` are for the runs of these cells, which
    lie behind one another in the batch."""

    layer: int
    cells: Sequence[Cell]
    hooks: Callable[[Sequence[Cell]], list[tuple[str, HookFn]]]


class Question(NamedTuple):
    """What is asked of every run of a sweep.

    Attributes:
        tokens: the input of every run.
        mask: [batch seq], its attention mask.
        metric: from the logits of one run to a number, or to a tensor [batch].
        last: the metric reads each row's last position alone, and is given no other.
        baseline: the metric of the plain run.
    """

    tokens: Tokens
    mask: Tensor | None
    metric: Metric
    last: bool
    baseline: Tensor


def ask(model: Hooked, input: Any, attention_mask: Tensor | None, metric: Metric, positions: str | None) -> Question:
    """The question, once the plain run has answered it.

    Args:
        positions: "all" or "last", which positions the metric reads; None: the last alone, where it says the same of
            the plain run's last position as of all.

    Raises:
        TypeError: a metric that is no function, or gives no number.
        ValueError: other positions.
    """
    if not callable(metric):
        raise TypeError(f"the metric is a {type(metric).__name__}: give a function of the logits")
    if positions not in (None, "all", "last"):
        raise ValueError(f"positions is {positions!r}; give 'all', 'last', or None to find out")
    tokens, mask = model.read(input, attention_mask)
    if positions == "last":
        logits = model(tokens, attention_mask=mask, last_logits_only=True)
        return Question(tokens, mask, metric, True, measured(metric, logits))
    logits = model(tokens, attention_mask=mask)
    baseline = measured(metric, logits)
    last = positions is None and _reads_last_alone(metric, logits, mask, baseline)
    return Question(tokens, mask, metric, last, baseline)


def _reads_last_alone(metric: Metric, logits: RunLogits, mask: Tensor | None, baseline: Tensor) -> bool:
    if mask is not None and not bool(mask[:, -1].all()):  # the last real position is another column
        return False
    try:
        of_last = measured(metric, logits[:, -1:])
    except Exception:  # whatever it is that a user's function wants, it is not there
        return False
    return torch.equal(of_last, baseline) and bool(baseline.isfinite().all())


class Beginning(NamedTuple):
    """Where runs of cells begin.

    Attributes:
        inputs: what is run of each layer's cells: the stream that enters it; where runs are `alone`, the tokens.
        mask: [batch seq], of the one run.
        alone: each cell is a whole run of its own.
        at_once: how many cells run together.
    """

    inputs: dict[int, Tensor]
    mask: Tensor | None
    alone: bool
    at_once: int

    def of(self, layer: int, cells: int) -> dict[str, Any]:
        """How the model is called for so many cells that begin in block `layer`."""
        return {
            "input": repeat(self.inputs[layer], "batch ... -> (cell batch) ...", cell=cells),
            "start_at_layer": None if self.alone else layer,
            "attention_mask": None if self.mask is None else self.mask.repeat(cells, 1),
        }


def beginning(model: Hooked, asked: Question, layers: Sequence[int], batch_size: int | None) -> Beginning:
    tokens, mask = asked.tokens, asked.mask
    alone = any(point.watched for point in model.names.points.values())
    layers = list(dict.fromkeys(layers))
    inputs = dict.fromkeys(layers, tokens) if alone else entering(model, tokens, mask, layers)
    rows = batch_size or _rows_at_once(model, tokens.shape[1], 1 if asked.last else tokens.shape[1])
    return Beginning(inputs, mask, alone, 1 if alone else max(1, rows // len(tokens)))


def run_cells(
    model: Hooked,
    asked: Question,
    jobs: Sequence[Job],
    batch_size: int | None,
    doing: str | None,
    begin: Beginning | None = None,
) -> Tensor:
    """The metric of every cell's run, [cells] or [cells batch], job after job.

    Cells of a job run together, as rows of a batch, and from its block on: before it they are the plain run. While
    other hooks are on the model, which may mean one row or need every block, each cell is a whole run alone.

    Args:
        model: the model to run.
        asked: the input and the metric.
        jobs: the cells, by the block that they change first.
        batch_size: how many rows run at once; None: as many as a fixed share of memory holds.
        doing: what a bar on standard error says; None: there is none.
        begin: where they begin, where that is known; None: it is looked up.

    Raises:
        TypeError: a metric that gives no number.
    """
    if begin is None:
        begin = beginning(model, asked, [job.layer for job in jobs], batch_size)
    found = []
    with bar(doing, sum(len(job.cells) for job in jobs)) as advance:
        for job in jobs:
            for start in range(0, len(job.cells), begin.at_once):
                some = job.cells[start : start + begin.at_once]
                logits = model.run_with_hooks(
                    fwd_hooks=job.hooks(some), last_logits_only=asked.last, **begin.of(job.layer, len(some))
                )
                runs = rearrange(logits, "(cell batch) ... -> cell batch ...", cell=len(some))
                found += [measured(asked.metric, run) for run in runs]
                del logits, runs
                advance(len(some))
    return torch.stack(found)


def _rows_at_once(model: Hooked, seq: int, read: int) -> int:
    """How many rows of `seq` positions, whose logits are made at `read` of them, go into a batch."""
    widest = max((each.mlp.top_k if isinstance(each.mlp, Mixture) else 1) * each.mlp.intermediate_size
                 for each in model.config.attending)  # fmt: skip
    numbers = read * model.vocab_size + seq * (8 * model.hidden_size + 3 * widest + 2 * model.num_heads * seq)
    return max(1, min(MOST_ROWS, AT_ONCE // (numbers * model.embed_tokens.weight.element_size())))


def entering(model: Hooked, tokens: Tokens, mask: Tensor | None, layers: list[int]) -> dict[int, Tensor]:
    """The stream that enters each of `layers`."""
    names = [("layer_input", layer) for layer in layers]
    _, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=mask, stop_at_layer=max(layers) + 1)
    return {layer: cache["layer_input", layer] for layer in layers}


def measured(metric: Metric, run: RunLogits) -> Tensor:
    return answered(metric, run).detach().clone()  # a view would hold the run's logits


def answered(metric: Metric, run: RunLogits) -> Tensor:
    """The metric of a run. Raises `TypeError` where it is neither a number nor a tensor [batch]."""
    found = metric(run)
    is_number = isinstance(found, (int, float)) or (isinstance(found, Tensor) and found.shape in ((), run.shape[:1]))
    if not is_number:
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"the metric returned {what}: of logits {list(run.shape)}, give a number or a tensor [batch]")
    return torch.as_tensor(found)


@contextlib.contextmanager
def bar(doing: str | None, total: int) -> Iterator[Callable[[int], None]]:
    if doing is None:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(doing, total=total)
        yield lambda count: shown.advance(task, count)


def shown(progress: bool | None) -> bool:
    """Whether a bar is; by itself on a terminal alone."""
    return sys.stderr.isatty() if progress is None else progress


# -- what is swept -----------------------------------------------------------------------------------------------------


def swept_points(model: Hooked, value: NamesFilter) -> list[HookPoint]:
    """The hook points that a sweep goes over.

    Raises:
        UnknownName: there are none.
        ValueError: one of no block.
    """
    points = [target.point for target in model.names.targets(value)]
    if not points:
        raise UnknownName(f"{value!r} means no value of this model")
    for point in points:
        if point.layer is None:
            raise ValueError(f"{point.name} is of the model, and a sweep goes by layers: name a value of blocks")
    return points


def places(point: HookPoint, over: str | Sequence[str]) -> list[int]:
    """Where the axes `over` are in the value's layout. Raises `ValueError` for one that it does not have."""
    names, wanted = axes(point.layout), [over] if isinstance(over, str) else list(over)
    found = []
    for each in wanted:
        if (name := axis(each, names)) not in names or name == "batch":
            raise ValueError(f"over={each!r} is no axis of {point.name} to sweep: it is {describe(point.layout)}")
        found.append(names.index(name))
    if len(set(found)) < len(found):
        raise ValueError(f"over={over!r} names an axis twice")
    return found


def same_size(sizes: list[list[int]]) -> list[int]:
    if any(each != sizes[0] for each in sizes):
        raise ValueError(f"the axes to sweep differ in size between layers, {sizes}: name the layers")
    return sizes[0]


def labelled(
    model: Hooked,
    asked: Question,
    values: Tensor,
    groups: Sequence[Sequence[HookPoint]],
    names: Sequence[str],
    what: str,
    clean: Tensor | None = None,
) -> Sweep:
    """The answer of a sweep over `groups` of hook points, one a layer, and over axes of these `names`."""
    labels: list[tuple[str, Sequence[Label]]] = [("layer", layer_labels(groups))]
    for name, size in zip(names, values.shape[1:], strict=False):
        labels.append((name, place_labels(model, asked.tokens, name, size)))
    if values.ndim == len(labels) + 1:
        labels.append(("batch", range(values.shape[-1])))
    return Sweep.of(values, labels, what, asked.baseline, clean)


def layer_of(point: HookPoint) -> int:
    assert point.layer is not None
    return point.layer


def layer_labels(groups: Sequence[Sequence[HookPoint]]) -> list[Label]:
    values = {tuple(point.value for point in group) for group in groups}
    if len(values) == 1:
        return [group[0].layer for group in groups]
    return [f"{'+'.join(point.value for point in group)} {group[0].layer}" for group in groups]


def place_labels(model: Hooked, tokens: Tokens, name: str, size: int) -> Sequence[Label]:
    """The number of each place on the axis `name`; of a position with its token's text, where all rows are one text."""
    if name not in POSITIONS or not model.has_tokenizer or tokens.shape != (1, size):
        return range(size)
    return list(enumerate(model.to_str_tokens(tokens[0])))
