"""Path patching: what one part of a run says to another, with everything between held still."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from transformer_std.analysis.labels import Label, Sweep
from transformer_std.analysis.patching import check_cache, check_holds, put_cells
from transformer_std.analysis.sweeps import (
    Beginning,
    Cell,
    Job,
    Metric,
    ask,
    beginning,
    layer_labels,
    layer_of,
    place_labels,
    places,
    run_cells,
    same_size,
    shown,
    swept_points,
)
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookFn, HookPoint
from transformer_std.hooks.names import NamesFilter
from transformer_std.hooks.transformer_lens import axis
from transformer_std.inputs import Input
from transformer_std.layouts import axes

BY_HEAD = ("attention_query_inputs", "attention_key_inputs", "attention_value_inputs")
RECEIVERS = (*BY_HEAD, "attention_input", "mlp_input", "router_logits", "layer_input", "layer_output")
FROZEN = ("attention_output", "mlp_output")


class Receiver(NamedTuple):
    """Who reads: the copy of a `head`, or with None all of the value."""

    point: HookPoint
    head: int | None

    @property
    def layer(self) -> int:
        return layer_of(self.point)

    @property
    def label(self) -> str:
        return f"{self.point.value} {self.layer}" if self.head is None else f"L{self.layer}H{self.head}"


@torch.no_grad()
def path_patching(
    model: Hooked,
    corrupted: Input,
    clean: Any,
    sender: NamesFilter,
    receiver: NamesFilter,
    metric: Metric,
    *,
    over: str | Sequence[str] = "num_heads",
    at: Mapping[str, Sequence[int]] | None = None,
    heads: Sequence[int] | None = None,
    together: bool = False,
    freeze: Sequence[str] = FROZEN,
    positions: str | None = None,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Puts `sender` of the clean run into the corrupted one, lets `receiver` alone hear of it, and measures what comes
    of that, for each cell of the sender and each receiver (https://arxiv.org/abs/2211.00593, section 3.1).

    Two runs a cell. In the first the sender is clean, and what the blocks after it add to the stream is held to the
    corrupted run: it shows what each receiver would read. The second is the corrupted run, in which the receiver reads
    that, and all after it goes on as it will.

        # from every head to each head's queries in block 9
        model.path_patching(corrupted, clean, "attention_premix", ("attention_query_inputs", 9), metric)
        # from heads 0 and 5 of block 3 straight to the logits
        model.path_patching(
            corrupted, clean, ("attention_premix", 3), ("layer_output", last), metric, at={"num_heads": [0, 5]}
        )

    Args:
        corrupted: what `forward` takes; as long as the clean input, and padded alike.
        clean: the cache of the clean run, with `sender` in it.
        sender: a value of the blocks, on every layer that has it; or `(value, layer)` pairs.
        receiver: the same, of `attention_query_inputs`, `attention_key_inputs` and `attention_value_inputs`, each head
            a receiver of its own; `attention_input`, `mlp_input`, `router_logits`, `layer_input` or `layer_output`.
        metric: from the logits of a run to a number, or to a tensor [batch].
        over: axes of the sender's layout, by their names there or in TransformerLens; () for a layer at once.
        at: which places on an axis of `over`; all where it does not say.
        heads: which heads receive; of key and value inputs these are key/value heads. None: all.
        together: all receivers read in one run.
        freeze: the values that are held to the corrupted run in the blocks between, and in the sender's own block
            behind its sublayer. Without "mlp_output" the paths through MLPs count too. More can be held:
            "attention_probabilities", "expert_indices", a norm's scale.
        positions, attention_mask, batch_size, progress: as `activation_patching` takes them.

    Returns:
        [layers *sizes receivers], or [layers *sizes] `together`, and a metric of rows has its batch behind. The
        `baseline` is the corrupted run's, which is also the entry of a receiver that the sender comes after.

    Raises:
        ValueError: a receiver that is none of these, a head or place that there is none of, or what
            `activation_patching` says.
        TypeError: a `clean` that is no cache, or a metric that gives no number.
        UnknownName, Unavailable: as elsewhere, and where `clean` lacks the sender.
    """
    check_cache(clean)
    senders, receivers = swept_points(model, sender), _receivers(model, receiver, heads)
    check_holds(clean, senders)
    held = swept_points(model, list(freeze)) if freeze else []
    swept = {point.name: places(point, over) for point in senders}
    size = same_size([[clean[point.name].shape[place] for place in swept[point.name]] for point in senders])
    names = [axes(senders[0].layout)[place] for place in swept[senders[0].name]]
    chosen = _chosen(names, size, at or {})
    asked = ask(model, corrupted, attention_mask, metric, positions)
    _, plain = model.run_with_cache(asked.tokens, names_filter=held, attention_mask=asked.mask, return_type=None)

    rows = asked.baseline.shape
    cells = list(itertools.product(*chosen))
    apart: list[tuple[str, Sequence[Label]]] = [] if together else [("receiver", [each.label for each in receivers])]
    found = asked.baseline.expand(len(senders), len(cells), 1 if together else len(receivers), *rows).clone()
    layers = [*map(layer_of, senders), *(each.layer for each in receivers)]
    begin = beginning(model, asked, layers, batch_size)
    doing = "following paths" if shown(progress) else None
    for i, point in enumerate(senders):
        reached = [each for each in receivers if _comes_after(model, each.point, point)]
        if not reached:
            continue
        patch = functools.partial(put_cells, clean[point.name], swept[point.name])
        between = {each.name: plain[each.name] for each in held if _comes_after(model, each, point)}
        heard = _heard(model, begin, point, cells, patch, between, reached)
        numbers = run_cells(model, asked, _jobs(heard, reached, len(cells), together), batch_size, doing, begin)
        if together:
            found[i, :, 0] = numbers
        else:  # by receiver, as jobs are, then by cell
            at_receiver = [receivers.index(each) for each in reached]
            found[i][:, at_receiver] = rearrange(numbers, "(to cell) ... -> cell to ...", to=len(reached))
    labels: list[tuple[str, Sequence[Label]]] = [("layer", layer_labels([[point] for point in senders]))]
    for name, whole, kept in zip(names, size, chosen, strict=True):
        every = place_labels(model, asked.tokens, name, whole)
        labels.append((name, [every[place] for place in kept]))
    labels += apart
    if rows:
        labels.append(("batch", range(*rows)))
    what = f"{senders[0].value} -> {', '.join(dict.fromkeys(each.point.value for each in receivers))}"
    return Sweep.of(found.reshape([len(each) for _, each in labels]), labels, what, asked.baseline)


def _receivers(model: Hooked, receiver: NamesFilter, heads: Sequence[int] | None) -> list[Receiver]:
    found = []
    for point in sorted(swept_points(model, receiver), key=layer_of):
        if point.value not in RECEIVERS:
            raise ValueError(f"{point.name} is no receiver of a path: name {', '.join(RECEIVERS[:-1])} or layer_output")
        if point.value not in BY_HEAD:
            if heads is not None:
                raise ValueError(f"heads is {list(heads)}, and {point.name} is not by head: name {', '.join(BY_HEAD)}")
            found.append(Receiver(point, None))
            continue
        cfg = model.layers[layer_of(point)].self_attn.cfg
        count = cfg.num_heads if point.value == BY_HEAD[0] else cfg.num_kv_heads
        for head in range(count) if heads is None else heads:
            if not 0 <= head < count:
                raise ValueError(f"head {head} is out of range: {point.name} is of heads 0 to {count - 1}")
            found.append(Receiver(point, head))
    return found


def _chosen(names: Sequence[str], size: Sequence[int], at: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """The places to sweep on each axis."""
    wanted = {axis(name, list(names)): list(each) for name, each in at.items()}
    for name, chosen in wanted.items():
        if name not in names:
            raise ValueError(f"at names {name!r}, which is not swept: over has {', '.join(names) or 'nothing'}")
        count = size[names.index(name)]
        if wrong := [each for each in chosen if not 0 <= each < count]:
            raise ValueError(f"at has {name} {wrong[0]}: there are 0 to {count - 1}")
    return [wanted.get(name, list(range(count))) for name, count in zip(names, size, strict=True)]


def _stage(model: Hooked, point: HookPoint) -> float:
    """When a value of a block is computed: both sublayers at once where the block is parallel."""
    if point.value in ("layer_input", "layer_mid", "layer_output"):
        return {"layer_input": 0.0, "layer_mid": 2.0, "layer_output": 4.0}[point.value]
    is_attention = ".self_attn." in point.name or point.value.startswith("attention")
    return 1.0 if is_attention or not model.layers[layer_of(point)].has("layer_mid") else 3.0


def _comes_after(model: Hooked, point: HookPoint, sender: HookPoint) -> bool:
    """Whether it hears of the sender by the stream; what is in the sender's own sublayer does not."""
    return (layer_of(point), _stage(model, point)) > (layer_of(sender), _stage(model, sender))


def _heard(
    model: Hooked,
    begin: Beginning,
    sender: HookPoint,
    cells: Sequence[Cell],
    patch: Any,
    between: Mapping[str, Tensor],
    reached: Sequence[Receiver],
) -> dict[str, Float[Tensor, "cell batch seq width"]]:
    """What each receiver's point would read in the run of every cell: all copies of the heads are of one tensor."""
    first, last = layer_of(sender), max(each.layer for each in reached)
    read = {each.point.name: _read_at(each.point) for each in reached}
    found: dict[str, list[Tensor]] = {name: [] for name in read}
    for start in range(0, len(cells), begin.at_once):
        some = cells[start : start + begin.at_once]
        hold = [(name, functools.partial(_hold, value, len(some))) for name, value in between.items()]
        with model.hooks(fwd_hooks=[(sender.name, patch(some)), *hold]):
            _, cache = model.run_with_cache(
                names_filter=list(dict.fromkeys(read.values())), stop_at_layer=last + 1, **begin.of(first, len(some))
            )
        for name, where in read.items():
            found[name].append(rearrange(cache[where], "(cell batch) ... -> cell batch ...", cell=len(some)))
    return {name: torch.cat(each) for name, each in found.items()}


def _read_at(point: HookPoint) -> str:
    return point.name.replace(f"self_attn.{point.value}", "attention_input") if point.value in BY_HEAD else point.name


def _hold(value: Tensor, cells: int, here: Tensor, hook: HookPoint) -> None:
    here.copy_(repeat(value, "batch ... -> (cell batch) ...", cell=cells))


def _jobs(heard: Mapping[str, Tensor], reached: Sequence[Receiver], cells: int, together: bool) -> list[Job]:
    """The second runs, of each receiver and each cell of the sender: those whose receivers read at one hook point are a
    job; or, `together`, one job, whose runs write all receivers."""
    if together:
        groups = [(list(reached), [(i, *range(len(reached))) for i in range(cells)])]
    else:
        apart = [list(each) for _, each in itertools.groupby(reached, lambda each: each.point)]
        groups = [(group, [(i, to) for to in range(len(group)) for i in range(cells)]) for group in apart]

    def hooks(group: Sequence[Receiver], runs: Sequence[Cell]) -> list[tuple[str, HookFn]]:
        points = dict.fromkeys(each.point.name for each in group)
        return [(name, functools.partial(_tell, heard[name], group, runs)) for name in points]

    return [Job(group[0].layer, runs, functools.partial(hooks, group)) for group, runs in groups]


def _tell(heard: Tensor, group: Sequence[Receiver], cells: Sequence[Cell], value: Tensor, hook: HookPoint) -> None:
    runs = rearrange(value, "(cell batch) ... -> cell batch ...", cell=len(cells))
    for run, (cell, *to) in zip(runs, cells, strict=True):
        for _, head in (group[i] for i in to if group[i].point.name == hook.name):
            if head is None:
                run.copy_(heard[cell])
            else:
                run[:, :, head] = heard[cell]
