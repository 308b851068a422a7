"""Edges: which part of a run speaks to which, for all pairs at once, and a run in which only some of them speak."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_std.activation_cache import CachedValues
from transformer_std.analysis.attribution import slopes
from transformer_std.analysis.decomposition import frozen
from transformer_std.analysis.labels import Sweep
from transformer_std.analysis.sweeps import Metric, Question, ask, bar, measured, shown
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.names import UnknownName
from transformer_std.inputs import Input
from transformer_std.layouts import Residual, Tokens

BY_HEAD = {"attention_query_inputs": "q", "attention_key_inputs": "k", "attention_value_inputs": "v"}
Edge = tuple[str, str]


class Said(NamedTuple):
    """What the senders of one sublayer add to the stream.

    Attributes:
        parts: [part batch seq hidden_size].
        owners: which sender each part is of, at each token; None: the parts are the senders.
    """

    parts: Tensor
    owners: Int[Tensor, "part batch seq"] | None


class Senders(NamedTuple):
    """The senders of one sublayer: the embedding's, a block's heads, its MLP, or its experts.

    Attributes:
        layer, kind: which: "embed", "attention" or "mlp".
        labels: a name for each.
        values: the values that they are made of.
    """

    layer: int
    kind: str
    labels: tuple[str, ...]
    values: tuple[str, ...]


class Receivers(NamedTuple):
    """Those that read at one hook point.

    Attributes:
        point: what they read is written here.
        stream: the hook point of the stream that is normed for them; `point` itself, where it is no norm's output.
        norm: the name of that norm in the block, or None.
        labels: a name for each.
        before: how many groups of senders they hear.
    """

    point: HookPoint
    stream: HookPoint
    norm: str | None
    labels: tuple[str, ...]
    before: int

    @property
    def by_head(self) -> bool:
        return self.point.value in BY_HEAD


@dataclass(frozen=True)
class Edges:
    """Scores of all edges, and what was asked, so that runs of some of them can be made.

        edges = model.edge_attribution(corrupted, clean, metric)
        edges.top(5), edges.scores.at(sender="L3H0", receiver="L5H2.q"), edges.faithfulness([10, 100, 1000])

    Attributes:
        scores: [sender receiver]; zero where the sender does not come before the receiver.
        exists: the same, which pairs are edges.
        corrupted, clean: the metric of the two runs.
    """

    scores: Sweep
    exists: Bool[Tensor, "sender receiver"]
    corrupted: Tensor
    clean: Tensor
    model: Hooked
    metric: Metric
    tokens: tuple[Tokens, Tokens]
    mask: Tensor | None

    def __repr__(self) -> str:
        sizes = "{} senders, {} receivers".format(*self.scores.shape)
        numbers = f"corrupted {float(self.corrupted):.4g}, clean {float(self.clean):.4g}"
        head = f"Edges [{sizes}, {len(self)} edges], {numbers}"
        return "\n".join([head, *(f"  {score:>10.4g}  {sender} -> {to}" for (sender, to), score in self.top(8))])

    def __len__(self) -> int:
        return int(self.exists.sum())

    def top(self, k: int) -> list[tuple[Edge, float]]:
        """The `k` edges of the largest scores, by absolute value, the largest first."""
        chosen = self._order()[:k]
        scores = self.scores.values.flatten()[chosen].tolist()
        return list(zip(map(self._edge, chosen.tolist()), scores, strict=True))

    def faithfulness(self, k: int | Sequence[int], *, progress: bool | None = None) -> Sweep:
        """The metric when only the `k` edges of the largest scores carry the clean run, and all others the corrupted
        one, [k]: with all edges it is the clean run's, with none the corrupted run's. It makes a run for each `k`.

        Returns:
            A sweep whose `baseline` is the corrupted run's metric and whose `clean` is the clean run's.
        """
        sizes = [k] if isinstance(k, int) else list(k)
        order, found = self._order(), []
        with bar("running circuits" if shown(progress) else None, len(sizes)) as advance:
            for size in sizes:
                if not 0 <= size <= len(self):
                    raise ValueError(f"k is {size}: there are 0 to {len(self)} edges")
                found.append(self._run(order[:size]))
                advance(1)
        return Sweep.of(torch.stack(found), [("k", sizes)], "edges kept", self.corrupted, self.clean)

    @torch.no_grad()
    def measure(self, kept: Iterable[Edge]) -> Tensor:
        """The metric when only these edges carry the clean run. Raises `KeyError` for a pair that is none."""
        chosen = []
        for sender, receiver in kept:
            at = self.scores.axes[0].find(sender), self.scores.axes[1].find(receiver)
            if not self.exists[at]:
                raise KeyError(f"{sender} -> {receiver} is no edge: {sender} does not come before")
            chosen.append(at[0] * self.exists.shape[1] + at[1])
        return self._run(torch.tensor(chosen, dtype=torch.long))

    @torch.no_grad()
    def _run(self, chosen: Int[Tensor, " edge"]) -> Tensor:
        kept = torch.zeros(self.exists.numel(), dtype=torch.bool)
        kept[chosen] = True
        return _run_kept(self, kept.view_as(self.exists))

    def _order(self) -> Int[Tensor, " edge"]:
        size = self.scores.values.abs().cpu().masked_fill(~self.exists, -1)
        return size.flatten().argsort(descending=True, stable=True)[: len(self)]

    def _edge(self, flat: int) -> Edge:
        sender, receiver = divmod(flat, self.exists.shape[1])
        return self.scores.axes[0].labels[sender], self.scores.axes[1].labels[receiver]


def edge_attribution(
    model: Hooked,
    corrupted: Input,
    clean: Any,
    metric: Metric,
    *,
    integrated_gradients: int = 0,
    attention_mask: Tensor | None = None,
    progress: bool | None = None,
) -> Edges:
    """A score for every edge: what a sender (the embedding, a head, an MLP, an expert) says more in the clean run,
    times the metric's gradient at what a receiver (a head's queries, keys or values, an MLP, the logits) reads. An
    estimate, to first order, of what that edge alone adds when it carries the clean run into the corrupted one; from
    few forwards and one backward (https://arxiv.org/abs/2310.10348).

        edges = model.edge_attribution(corrupted, clean, metric)
        edges.faithfulness([10, 100])

    With `integrated_gradients` the gradient is the mean over so many runs whose embeddings lie on the line between the
    two (https://arxiv.org/abs/2403.17806). Keys and values are one a key/value head. A mixture reads as one, and each
    expert speaks where it is chosen. An output gate of the attention is a receiver of its own; attention through a
    latent receives as one.

    Args:
        corrupted, clean: two inputs of one size, padded alike; `clean` may be the cache of its run, with `input_ids`.
        metric: from the logits of a run to a number, which autograd can follow.
        integrated_gradients: how many points on the line; 0: the gradient at the corrupted run.
        attention_mask: [batch seq], of both inputs.
        progress: show a bar on standard error; None: on a terminal.

    Raises:
        ValueError: two inputs that differ in size.
        TypeError: a metric that gives no number or no gradient.
        UnreadableWeight: an output projection that is not there to be read.
    """
    asked, tokens = _asked(model, corrupted, clean, attention_mask, metric)
    senders, receivers = _parts(model)
    rows, columns = _spans(senders), _spans(receivers)
    with torch.no_grad():
        keep: list[Any] = ["token_embeddings", *_values_of(senders)]
        _, before = model.run_with_cache(asked.tokens, names_filter=keep, attention_mask=asked.mask, return_type=None)
        logits, after = model.run_with_cache(tokens, names_filter=keep, attention_mask=asked.mask)
        best = measured(metric, logits)
    said = [(_said(model, before, group), _said(model, after, group)) for group in senders]
    start, way = before["token_embeddings"], after["token_embeddings"] - before["token_embeddings"]
    points = list(dict.fromkeys([to.point for to in receivers] + [to.stream for to in receivers]))
    shares = [(i + 0.5) / integrated_gradients for i in range(integrated_gradients)] or [0.0]
    scores = start.new_zeros(rows[-1].stop, columns[-1].stop, dtype=torch.float32)
    exists = torch.zeros(scores.shape, dtype=torch.bool)
    with bar("integrating" if integrated_gradients and shown(progress) else None, len(shares)) as advance:
        for share in shares:
            values, gradients = slopes(model, asked, points, start + share * way)
            for to, column in zip(receivers, columns, strict=True):
                gradient = _at_stream(model, to, values[to.stream.name], gradients) / len(shares)
                for row, two in zip(rows[: to.before], said, strict=False):
                    scores[row, column] += _dots(*two, gradient, row.stop - row.start)
                    exists[row, column] = True
            advance(1)
    named: list[tuple[str, Sequence[str]]] = [("sender", _labels(senders)), ("receiver", _labels(receivers))]
    found = Sweep.of(scores, named, "edges")
    return Edges(found, exists, asked.baseline, best, model, metric, (asked.tokens, tokens), asked.mask)


def _asked(
    model: Hooked, corrupted: Input, clean: Any, attention_mask: Tensor | None, metric: Metric
) -> tuple[Question, Tokens]:
    with torch.no_grad():
        asked = ask(model, corrupted, attention_mask, metric, "all")
    if asked.baseline.ndim:
        raise TypeError("the metric gives a number for each row: edges want one number, so take the mean")
    if isinstance(clean, CachedValues):
        if "input_ids" not in clean:
            raise UnknownName("the clean cache does not hold input_ids: keep it there, or give the clean input")
        clean = clean["input_ids"]
    tokens, _ = model.read(clean, asked.mask)
    if tokens.shape != asked.tokens.shape:
        raise ValueError(
            f"the clean input is {list(tokens.shape)} and the corrupted one {list(asked.tokens.shape)}: edges need two "
            "inputs of one size"
        )
    return asked, tokens


# -- who speaks, and who hears ---------------------------------------------------------------------------------------


def _parts(model: Hooked) -> tuple[list[Senders], list[Receivers]]:
    """All senders and receivers, in the order in which they are computed."""
    senders = [Senders(0, "embed", ("embed",), ("layer_input",))]
    receivers = []
    points = model.names.points
    for layer, block in enumerate(model.layers):
        before = len(senders)
        attention: Any = block.self_attn
        has_middle = block.has("layer_mid")
        for value, receiving in _reading(model, layer, attention).items():
            norm, stream = block.readers["attention"]
            point = model.names.at(value, layer).point
            receivers.append(Receivers(point, points[f"layers.{layer}.{stream}"], norm, receiving, before))
        speaking = tuple(f"L{layer}H{head}" for head in range(attention.cfg.num_heads))
        normed = ("attention_unnormed_output",) if attention.post_norm is not None else ()
        senders.append(Senders(layer, "attention", speaking, ("attention_result", *normed)))
        norm, stream = block.readers["mlp"]
        point = model.names.at("mlp_input", layer).point
        heard = before + 1 if has_middle else before
        receivers.append(Receivers(point, points[f"layers.{layer}.{stream}"], norm, (f"L{layer} MLP",), heard))
        senders.append(_speaking_mlp(model, layer))
    last = model.names.at("layer_output", model.num_layers - 1).point
    receivers.append(Receivers(last, last, None, ("logits",), len(senders)))
    return senders, receivers


def _reading(model: Hooked, layer: int, attention: Any) -> dict[str, tuple[str, ...]]:
    """The values by which an attention reads, and a label for each reader; the gate's first, under the heads."""
    absent = model.support(layer)
    if any(absent[value] is not None for value in BY_HEAD):
        return {"attention_input": (f"L{layer} attention",)}
    counts = (attention.cfg.num_heads, attention.cfg.num_kv_heads, attention.cfg.num_kv_heads)
    found: dict[str, tuple[str, ...]] = (
        {"attention_input": (f"L{layer} gate",)} if absent["attention_gate"] is None else {}
    )
    for (value, letter), count in zip(BY_HEAD.items(), counts, strict=True):
        found[value] = tuple(f"L{layer}H{head}.{letter}" for head in range(count))
    return found


def _speaking_mlp(model: Hooked, layer: int) -> Senders:
    if model.support(layer)["expert_outputs"] is not None:
        return Senders(layer, "mlp", (f"L{layer} MLP",), ("mlp_output",))
    mixture: Any = model.layers[layer].mlp
    labels = tuple(f"L{layer}E{expert}" for expert in range(mixture.num_experts))
    values = ["expert_outputs", "expert_indices"]
    if mixture.cfg.shared:
        labels, values = (*labels, f"L{layer} shared"), [*values, "shared_expert_output"]
    if mixture.post_norm is not None:
        values.append("mlp_unnormed_output")
    return Senders(layer, "mlp", labels, tuple(values))


def _labels(groups: Sequence[Any]) -> list[str]:
    return [label for group in groups for label in group.labels]


def _spans(groups: Sequence[Any]) -> list[slice]:
    """Where the members of each group are among all."""
    ends = list(itertools.accumulate(len(group.labels) for group in groups))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _values_of(senders: Sequence[Senders]) -> list[tuple[str, int]]:
    return [(value, group.layer) for group in senders for value in group.values]


def _said(model: Hooked, cache: Any, senders: Senders) -> Said:
    """What the senders add to the stream, of `cache[value, layer]`: of a sandwich, through its frozen norm."""
    layer, block = senders.layer, model.layers[senders.layer]
    if senders.kind == "embed":
        return Said(cache["layer_input", 0][None], None)
    if senders.kind == "attention":
        attention: Any = block.self_attn
        heads = rearrange(cache["attention_result", layer], "batch seq head hidden -> head batch seq hidden")
        if attention.post_norm is None:
            return Said(heads, None)
        heads = heads + attention.b_O / len(heads)  # by the norm's scale it, too, is another in each run
        return Said(frozen(attention, "post_norm", heads, cache["attention_unnormed_output", layer]), None)
    if "expert_outputs" not in senders.values:
        return Said(cache["mlp_output", layer][None], None)
    mixture: Any = block.mlp
    parts = rearrange(cache["expert_outputs", layer], "batch seq slot hidden -> slot batch seq hidden")
    owners = rearrange(cache["expert_indices", layer], "batch seq slot -> slot batch seq")
    if mixture.cfg.shared:
        parts = torch.cat((parts, cache["shared_expert_output", layer][None].to(parts.dtype)))
        owners = torch.cat((owners, torch.full_like(owners[:1], mixture.num_experts)))
    if mixture.post_norm is not None:
        parts = frozen(mixture, "post_norm", parts, cache["mlp_unnormed_output", layer])
    return Said(parts, owners)


# -- scores ----------------------------------------------------------------------------------------------------------


def _dots(
    before: Said, after: Said, gradient: Float[Tensor, "receiver batch seq hidden_size"], count: int
) -> Float[Tensor, "sender receiver"]:
    """What each sender says more in the second run, times the gradient."""
    if before.owners is None:
        more = after.parts.float() - before.parts.float()
        return einsum(more, gradient, "sender batch seq hidden, receiver batch seq hidden -> sender receiver")
    found = gradient.new_zeros(count, len(gradient))
    for said, sign in ((after, 1.0), (before, -1.0)):
        dots = einsum(
            said.parts.float(), gradient, "part batch seq hidden, receiver batch seq hidden -> part batch seq receiver"
        )
        assert said.owners is not None
        found.index_add_(0, said.owners.flatten(), sign * dots.flatten(0, 2))
    return found


def _at_stream(
    model: Hooked, receivers: Receivers, stream: Residual, gradients: dict[str, Tensor]
) -> Float[Tensor, "receiver batch seq hidden_size"]:
    """The gradient at the stream that each receiver reads: that at its input, back through the norm."""
    gradient = gradients[receivers.point.name].float()
    if receivers.by_head:
        gradient = rearrange(gradient, "batch seq head hidden -> head batch seq hidden")
    else:
        if receivers.labels[0].endswith("gate"):  # what is read by the gate alone
            block = receivers.point.name.removesuffix("attention_input")
            for value in BY_HEAD:
                gradient = gradient - gradients[f"{block}self_attn.{value}"].float().sum(2)
        gradient = gradient[None]
    if receivers.norm is None:
        return gradient
    norm = getattr(model.layers[receivers.point.layer or 0], receivers.norm)
    with torch.enable_grad():
        leaf = repeat(stream.detach(), "batch seq hidden -> each batch seq hidden", each=len(gradient))
        leaf = leaf.clone().requires_grad_()
        out = norm(leaf)
        (found,) = torch.autograd.grad(out, leaf, gradient.to(out.dtype))
    return found.float()


# -- runs of some edges ----------------------------------------------------------------------------------------------


@torch.no_grad()
def _run_kept(edges: Edges, kept: Bool[Tensor, "sender receiver"]) -> Tensor:
    """The metric of the clean input's run, in which each receiver reads what the kept edges say there, and of the
    others what they say in the corrupted run."""
    model, (tokens, clean) = edges.model, edges.tokens
    senders, receivers = _parts(model)
    rows, columns = _spans(senders), _spans(receivers)
    keep = _values_of(senders)
    _, plain = model.run_with_cache(tokens, names_filter=keep, attention_mask=edges.mask, return_type=None)
    corrupted = [_said(model, plain, group) for group in senders]
    live: dict[tuple[str, int], Tensor] = {}
    now: dict[int, Said] = {}

    def look(value: Tensor, hook: HookPoint) -> None:
        live[hook.value, hook.layer or 0] = value

    def removed(missing: Bool[Tensor, "sender receiver"], before: int) -> Tensor | None:
        """What the missing edges of a receiver carry; None where it misses none."""
        parts = []
        for i, row in enumerate(rows[:before]):
            of_group = missing[row]
            if not bool(of_group.any()):
                continue
            if i not in now:
                now[i] = _said(model, live, senders[i])
            parts.append(_weighed(now[i], of_group) - _weighed(corrupted[i], of_group))
        return sum(parts[1:], parts[0]) if parts else None

    def reader(to: Receivers, missing: Bool[Tensor, "sender receiver"]) -> Any:
        def write(value: Tensor, hook: HookPoint) -> Tensor | None:
            change = removed(missing.to(value.device), to.before)
            if change is None:
                return None
            whole = value if to.stream is to.point else live[to.stream.value, hook.layer or 0]
            read = whole - change.to(whole.dtype)
            if to.norm is not None:
                read = getattr(model.layers[hook.layer or 0], to.norm)(read)
            return rearrange(read, "head batch seq hidden -> batch seq head hidden") if to.by_head else read[0]

        return write

    hooks: list[Any] = [([*keep, *dict.fromkeys(to.stream for to in receivers)], look)]
    hooks += [(to.point, reader(to, ~kept[:, column])) for to, column in zip(receivers, columns, strict=True)]
    logits = model.run_with_hooks(clean, fwd_hooks=hooks, attention_mask=edges.mask)
    return measured(edges.metric, logits)


def _weighed(said: Said, chosen: Bool[Tensor, "sender receiver"]) -> Float[Tensor, "receiver batch seq hidden_size"]:
    """The sum of what the chosen senders say, for each receiver."""
    if said.owners is None:
        weights = chosen.to(said.parts.dtype)
        return einsum(said.parts, weights, "part batch seq hidden, part receiver -> receiver batch seq hidden")
    weights = chosen.to(said.parts.dtype)[said.owners]
    return einsum(said.parts, weights, "part batch seq hidden, part batch seq receiver -> receiver batch seq hidden")
