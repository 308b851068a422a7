"""Mixtures taken apart: what each expert does for a metric, which tokens go where, and other routes. Functions of a
model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from transformer_std.analysis.attribution import slopes
from transformer_std.analysis.decomposition import ActivationCache, frozen
from transformer_std.analysis.interventions import Places, Positions
from transformer_std.analysis.labels import Label, Sweep
from transformer_std.analysis.sweeps import Cell, Job, Metric, ask, layer_of, place_labels, run_cells, shown
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookFn, HookPoint
from transformer_std.inputs import Input
from transformer_std.layouts import ExpertIndices, ExpertWeights, RouterLogits, axes

Hooks = list[tuple[tuple[str, int], HookFn]]
HOW = ("silenced", "renormalised", "banned")
SHARED = "shared"
SHOWN = 16  # tokens in a printout


# -- what is changed -------------------------------------------------------------------------------------------------


def ablate_expert(model: Hooked, layer: int, expert: int) -> Hooks:
    """Hooks that take `expert` of block `layer` out wherever it is chosen: its slots weigh nothing."""
    _check_experts(model, layer, [expert])
    return _without(layer, torch.tensor([expert]), "silenced")


def reroute(model: Hooked, layer: int, expert: int, to: int) -> Hooks:
    """Hooks that send every slot of block `layer` that chose `expert` to expert `to`, at the weight it had."""
    _check_experts(model, layer, [expert, to])
    return [(("expert_indices", layer), lambda indices, hook: indices.masked_fill(indices == expert, to))]


def ban(model: Hooked, layer: int, experts: int | Sequence[int]) -> Hooks:
    """Hooks by which block `layer`'s router passes `experts` over, and chooses and weighs as if there were none of
    them.

        with moe.hooks(fwd_hooks=[*moe.ban(3, [0, 5]), *moe.ban(4, 1)]): ...

    Raises:
        ValueError: an expert that there is none of, or too few left to choose; in the forward, where the open groups
            of a router that chooses groups first have too few left.
    """
    banned = sorted({experts} if isinstance(experts, int) else set(experts))
    _check_experts(model, layer, banned)
    mixture = model.layers[layer].mlp
    if len(banned) > mixture.num_experts - mixture.top_k:
        raise ValueError(
            f"{len(banned)} experts banned: block {layer} has {mixture.num_experts}, and a token needs {mixture.top_k}"
        )
    return _without(layer, torch.tensor([banned]), "banned", mixture.expert_bias is not None)


def force(
    model: Hooked, layer: int, expert: int, token_positions: Positions = None, batch_index: Positions = None
) -> Hooks:
    """Hooks by which block `layer` sends tokens to `expert`: its logit changes places with the largest of the token's.
    The other choices and all weights follow.

    Args:
        token_positions, batch_index: which tokens, as `steer` takes them; all by default.

    Raises:
        ValueError: an expert that there is none of; in the forward, where a router's selection bias or its groups keep
            it out all the same, or for places that the input does not have.
    """
    _check_experts(model, layer, [expert])
    places = Places(token_positions, batch_index)
    forced: dict[str, Any] = {}

    def swap(logits: RouterLogits, hook: HookPoint) -> Tensor | None:
        forced["at"] = at = places.of(len(logits), logits.shape[1], hook.step)
        if at is None:
            return None
        new, there = logits.clone(), logits[at]
        best = there.argmax(-1, keepdim=True)
        swapped = there.scatter(-1, best, there[..., expert, None])
        swapped[..., expert] = there.max(-1).values
        new[at] = swapped
        return new

    def check(indices: ExpertIndices, hook: HookPoint) -> None:
        if forced["at"] is not None and not bool((indices[forced["at"]] == expert).any(-1).all()):
            raise ValueError(
                f"expert {expert} of {hook.name.rsplit('.', 1)[0]} is not chosen even with the largest logit: the "
                "router's selection bias or its groups keep it out. Write expert_indices"
            )

    return [(("router_logits", layer), swap), (("expert_indices", layer), check)]


def _without(layer: int, experts: Tensor, how: str, biased: bool = False) -> Hooks:
    """Hooks that take experts out: those of `experts`, [rows n] or one row for all."""
    experts = experts if experts.ndim == 2 else experts[:, None]
    seen: dict[str, Tensor] = {}

    def of(rows: Tensor) -> Tensor:
        return experts.to(rows.device).expand(len(rows), -1)

    def hit(indices: ExpertIndices) -> Bool[Tensor, "batch seq top_k"]:
        return (indices[..., None] == rearrange(of(indices), "batch n -> batch 1 1 n")).any(-1)

    def look(indices: ExpertIndices, hook: HookPoint) -> None:
        seen["indices"] = indices

    def weigh(weights: ExpertWeights, hook: HookPoint) -> Tensor:
        left = weights.masked_fill(hit(seen["indices"]), 0)
        if how == "silenced":
            return left
        total, rest = weights.sum(-1, keepdim=True), left.sum(-1, keepdim=True)
        return torch.where(rest == 0, left, left * (total / rest))

    def close(logits: RouterLogits, hook: HookPoint) -> Tensor:
        where = repeat(of(logits), "batch n -> batch seq n", seq=logits.shape[1])
        return logits.scatter(-1, where, -torch.inf)

    def check(indices: ExpertIndices, hook: HookPoint) -> None:
        if bool(hit(indices).any()):
            raise ValueError(f"{hook.name}: too few experts are left to choose from in the groups that are open")

    if how != "banned":
        return [(("expert_indices", layer), look), (("expert_weights", layer), weigh)]
    # A selection bias can lift what scores nothing: such a score goes too.
    scores: Hooks = [(("router_scores", layer), close)] if biased else []
    return [(("router_logits", layer), close), *scores, (("expert_indices", layer), check)]


def _check_experts(model: Hooked, layer: int, experts: Sequence[int]) -> None:
    model.names.at("expert_indices", layer)
    count = model.layers[layer].mlp.num_experts
    for expert in experts:
        if not 0 <= expert < count:
            raise ValueError(f"expert {expert} is out of range: block {layer} has experts 0 to {count - 1}")


# -- what it comes to ------------------------------------------------------------------------------------------------


@torch.no_grad()
def expert_sweep(
    model: Hooked,
    input: Input,
    metric: Metric,
    how: str = "silenced",
    *,
    layers: Sequence[int] | None = None,
    positions: str | None = None,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Takes each expert of each mixture out, one at a time, and measures what comes of it. An expert that no token
    chose needs no run.

    Args:
        input: what `forward` takes.
        metric: from the logits of one run to a number, or to a tensor [batch].
        how: "silenced", its slots weigh nothing; "renormalised", the token's other slots make up for its weight;
            "banned", the router chooses another, as `ban` does.
        layers: which blocks; None: all that have a mixture.
        positions, attention_mask, batch_size, progress: as `activation_patching` takes them.

    Returns:
        [layer expert], or [layer expert batch]; its `baseline` is the plain run's.

    Raises:
        ValueError: another `how`.
        Unavailable: a block without a mixture.
    """
    if how not in HOW:
        raise ValueError(f"how is {how!r}; give {', '.join(map(repr, HOW))}")
    points = _mixtures(model, layers)
    asked = ask(model, input, attention_mask, metric, positions)
    _, cache = model.run_with_cache(asked.tokens, names_filter=points, attention_mask=asked.mask, return_type=None)
    rows, jobs = len(asked.tokens), []
    for point in points:
        mixture = model.layers[layer_of(point)].mlp
        chosen = [(int(expert),) for expert in cache[point.name].unique()]

        def hooks(layer: int, biased: bool, cells: Sequence[Cell]) -> list[Any]:
            experts = repeat(torch.tensor(cells), "cell one -> (cell row) one", row=rows)
            return _without(layer, experts, how, biased)

        biased = mixture.expert_bias is not None
        jobs.append(Job(layer_of(point), chosen, functools.partial(hooks, layer_of(point), biased)))
    numbers = run_cells(model, asked, jobs, batch_size, "taking experts out" if shown(progress) else None)
    count = _same(model, points, "num_experts")
    found = asked.baseline.expand(len(points), count, *asked.baseline.shape).clone()
    at = [(i, expert) for i, job in enumerate(jobs) for (expert,) in job.cells]
    found[tuple(torch.tensor(at).T)] = numbers
    labels: list[tuple[str, Sequence[Label]]] = [
        ("layer", [layer_of(each) for each in points]),
        ("expert", range(count)),
    ]
    return Sweep.of(found, [*labels, *_rows(asked.baseline)], f"experts {how}", asked.baseline)


def expert_attribution(
    model: Hooked,
    input: Input,
    metric: Metric,
    *,
    direct: bool = False,
    by: str = "slot",
    attention_mask: Tensor | None = None,
) -> Sweep:
    """What each slot's expert, and the shared one, does for a metric: its share of what its block's MLP adds to the
    stream, times the metric's gradient there. A block's entries at a token sum to those of its whole `mlp_output`.

    Args:
        input: what `forward` takes.
        metric: from the logits to a number, or to a tensor [batch], which autograd can follow.
        direct: count the way straight to the logits alone, through the final norm with its frozen scale: of a metric
            that is linear in the logits, by how much the part moves it. Otherwise all ways, to first order.
        by: "slot", or "expert": each where its token chose it, and zero elsewhere.

    Returns:
        [layer seq slot], summed over rows, or [layer seq slot batch] of a metric of rows; "shared" is the last slot,
        where there is one. By expert the axis is `expert`.

    Raises:
        ValueError: another `by`, or a model without mixtures.
        TypeError: a metric that gives no number or no gradient.
    """
    if by not in ("slot", "expert"):
        raise ValueError(f"by is {by!r}; give 'slot' or 'expert'")
    points = _mixtures(model, None)
    with torch.no_grad():
        asked = ask(model, input, attention_mask, metric, "all")
    outputs = [model.names.at("mlp_output", layer_of(point)).point for point in points]
    reading = [model.names.points["final_norm_output"]] if direct else outputs
    _, gradients = slopes(model, asked, reading)
    keep = ["expert_indices", "expert_outputs", "layer_output"]
    keep += [value for value in ("shared_expert_output", "mlp_unnormed_output") if _there(model, value)]
    with torch.no_grad():
        _, cache = model.run_with_cache(asked.tokens, names_filter=keep, attention_mask=asked.mask, return_type=None)
        found = []
        for point, output in zip(points, outputs, strict=True):
            parts = _parts(model, cache, layer_of(point))
            if direct:
                parts = cache.apply_ln_to_stack(parts)
            gradient = gradients[reading[0].name if direct else output.name]
            scores = (parts.float() * gradient.float()).sum(-1)
            found.append(_by_expert(model, cache, point, scores) if by == "expert" else scores)
    values = rearrange(torch.stack(found), "layer slot batch seq -> layer seq slot batch")
    first: Any = model.layers[layer_of(points[0])].mlp
    is_shared = first.cfg.shared is not None
    count = values.shape[2] - is_shared
    places = place_labels(model, asked.tokens, "seq", values.shape[1])
    labels: list[tuple[str, Sequence[Label]]] = [
        ("layer", [layer_of(each) for each in points]), ("seq", places), (by, [*range(count), *[SHARED] * is_shared]),
    ]  # fmt: skip
    of_rows = asked.baseline.ndim == 1
    what = "experts, direct" if direct else "experts, by gradient"
    return Sweep.of(values if of_rows else values.sum(-1), [*labels, *_rows(asked.baseline)], what)


def _parts(model: Hooked, cache: ActivationCache, layer: int) -> Float[Tensor, "slot batch seq hidden_size"]:
    """What a block's slots, and its shared expert, add to the stream, of a sandwich through its frozen norm."""
    mixture: Any = model.layers[layer].mlp
    parts = rearrange(cache["expert_outputs", layer], "batch seq slot hidden -> slot batch seq hidden")
    if mixture.cfg.shared:
        parts = torch.cat((parts, cache["shared_expert_output", layer][None]))
    if mixture.post_norm is None:
        return parts
    return frozen(mixture, "post_norm", parts, cache["mlp_unnormed_output", layer])


def _by_expert(
    model: Hooked, cache: ActivationCache, point: HookPoint, scores: Float[Tensor, "slot batch seq"]
) -> Float[Tensor, "expert batch seq"]:
    indices = rearrange(cache[point.name], "batch seq slot -> slot batch seq")
    routed, shared = scores[: len(indices)], scores[len(indices) :]
    count = model.layers[layer_of(point)].mlp.num_experts
    return torch.cat((routed.new_zeros(count, *routed.shape[1:]).scatter_add(0, indices, routed), shared))


class Routing(NamedTuple):
    """Which experts a run chose.

    Attributes:
        experts: [layer batch seq slot], an expert's number each.
        weights: the same, the weight of each.
        real: [batch seq], which tokens are no padding.
        num_experts: how many there are to choose from.
    """

    experts: Sweep
    weights: Sweep
    real: Tensor
    num_experts: int

    def counts(self) -> Sweep:
        """How many slots of real tokens went to each expert, [layer expert]."""
        rows = [torch.bincount(each[self.real].flatten(), minlength=self.num_experts) for each in self.experts.values]
        return Sweep.of(torch.stack(rows), [self.experts.axes[0], ("expert", range(self.num_experts))], "slots")

    def to_pandas(self) -> Any:
        """A row a token, a column a layer, and in each cell the experts with their weights, the heaviest first."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas") from None
        rows = [(f"{label[0]} {label[1]!r}" if isinstance(label, tuple) else str(label)) for label in self._places]
        names = rows if len(self.real) == 1 else [f"{i}: {row}" for i in range(len(self.real)) for row in rows]
        cells = {
            layer: [self._cell(i, row, place) for row in range(len(self.real)) for place in range(len(rows))]
            for i, layer in enumerate(self.experts.axes[0].labels)
        }
        return pandas.DataFrame(cells, index=pandas.Index(names, name="token")).rename_axis(columns="layer")

    @property
    def _places(self) -> Sequence[Label]:
        return self.experts.axes[2].labels

    def _cell(self, layer: int, row: int, place: int) -> str:
        if not self.real[row, place]:
            return ""
        experts, weights = self.experts.values[layer, row, place], self.weights.values[layer, row, place]
        order = weights.argsort(descending=True).tolist()
        return ", ".join(f"{int(experts[i])} ({float(weights[i]):.2f})" for i in order)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis.name} {len(axis.labels)}" for axis in self.experts.axes)
        table = [["", *(f"layer {layer}" for layer in self.experts.axes[0].labels)]]
        for place, label in list(enumerate(self._places))[:SHOWN]:
            cells = [self._cell(i, 0, place) or "padding" for i in range(len(self.experts))]
            table.append([repr(label[1]) if isinstance(label, tuple) else str(label), *cells])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        more = len(self._places) > SHOWN or len(self.real) > 1
        return "\n".join([f"Routing [{sizes}]", *(f"  {line}".rstrip() for line in lines), *["  ..."] * more])


@torch.no_grad()
def routing(model: Hooked, input: Input, *, attention_mask: Tensor | None = None) -> Routing:
    """Which experts each token goes to, in every mixture, and by what weight.

    table = moe.routing("the cat sat on the mat")
    table.experts.at(layer=1, seq=" cat"), table.counts(), table.to_pandas()
    """
    tokens, mask = model.read(input, attention_mask)
    points = _mixtures(model, None)
    names = ["expert_indices", "expert_weights"]
    _, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=mask, return_type=None)
    layers = [layer_of(point) for point in points]
    experts = torch.stack([cache["expert_indices", layer] for layer in layers])
    weights = torch.stack([cache["expert_weights", layer] for layer in layers])
    labels: list[tuple[str, Sequence[Label]]] = [
        ("layer", layers), ("batch", range(len(tokens))),
        ("seq", place_labels(model, tokens, "seq", tokens.shape[1])), ("slot", range(experts.shape[-1])),
    ]  # fmt: skip
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    count = _same(model, points, "num_experts")
    return Routing(Sweep.of(experts, labels, "experts"), Sweep.of(weights, labels, "weights"), real, count)


class Comparison(NamedTuple):
    """How two models differ on one input, at its real tokens.

    Attributes:
        values: how far each value of each block is from the first model's, relative to its length there, [value
            layer]; NaN where a block has no such value.
        routes: the share of its experts that a real token keeps, on average, [layer]; None where there are none.
        logits: how far the logits are, relative to their length in the first.
    """

    values: Sweep
    routes: Sweep | None
    logits: float


@torch.no_grad()
def compare(
    model: Hooked,
    other: Hooked,
    input: Input,
    *,
    values: Sequence[str] = ("attention_output", "mlp_output", "layer_output"),
    attention_mask: Tensor | None = None,
) -> Comparison:
    """Where another model, a checkpoint of the same shape, computes something else on an input: values, and routes.

    Args:
        other: of the same number of blocks, and tokens.
        values: which values of the blocks.

    Raises:
        ValueError: two models that differ in their numbers of blocks, or in a value's shape.
    """
    tokens, mask = model.read(input, attention_mask)
    if model.num_layers != other.num_layers:
        raise ValueError(f"{model.num_layers} blocks and {other.num_layers}: compare two checkpoints of one shape")
    wanted = [(value, layer) for value in values for layer in _there(model, value)]
    mixed = _there(model, "expert_indices")
    keep = [*wanted, *[("expert_indices", layer) for layer in mixed]]
    logits, first = model.run_with_cache(tokens, names_filter=keep, attention_mask=mask)
    other_logits, second = other.run_with_cache(tokens, names_filter=keep, attention_mask=mask)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    found = torch.full((len(values), model.num_layers), torch.nan)
    for value, layer in wanted:
        a, b = first[value, layer], second[value, layer]
        if a.shape != b.shape:
            raise ValueError(f"{value} of block {layer} is {list(a.shape)} in one and {list(b.shape)} in the other")
        if "seq" in (names := axes(model.names.at(value, layer).point.layout)):
            a, b = (each.movedim(names.index("seq"), 1)[real] for each in (a, b))
        found[list(values).index(value), layer] = _apart(a, b)
    of_values = Sweep.of(found, [("value", list(values)), ("layer", range(model.num_layers))], "relative difference")
    routes = None
    if mixed:
        kept = [_kept(first["expert_indices", layer][real], second["expert_indices", layer][real]) for layer in mixed]
        routes = Sweep.of(torch.tensor(kept), [("layer", mixed)], "experts in common")
    return Comparison(of_values, routes, float(_apart(logits[real], other_logits[real])))


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return (b.to(a.device).float() - a.float()).norm() / a.float().norm()


def _kept(a: Tensor, b: Tensor) -> float:
    return float((a[:, :, None] == b.to(a.device)[:, None, :]).any(-1).float().mean())


def _rows(baseline: Tensor) -> list[tuple[str, Sequence[Label]]]:
    return [("batch", range(len(baseline)))] if baseline.ndim else []


def _same(model: Hooked, points: Sequence[HookPoint], attribute: str) -> int:
    counts = [getattr(model.layers[layer_of(point)].mlp, attribute) for point in points]
    if len(set(counts)) > 1:
        raise ValueError(f"blocks differ in {attribute}, {counts}: name the layers")
    return counts[0]


def _there(model: Hooked, value: str) -> list[int]:
    """The blocks that have a value. Raises `UnknownName` where none can."""
    if value not in model.names.by_value:
        raise model.names.miss(value)
    return [layer for layer, entry in model.names.by_value[value].items()
            if layer is not None and isinstance(entry, HookPoint)]  # fmt: skip


def _mixtures(model: Hooked, layers: Sequence[int] | None) -> list[HookPoint]:
    wanted: Any = "expert_indices" if layers is None else [("expert_indices", layer) for layer in layers]
    return [target.point for target in model.names.targets(wanted)]
