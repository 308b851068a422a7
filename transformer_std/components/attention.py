"""Attention: projections, rotary, the fast path and the open one, and every value between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from transformer_std import config
from transformer_std.components.functions import Angles, causal, expand_kv, turn_both
from transformer_std.components.norms import build_norm
from transformer_std.components.reuse import filled, times
from transformer_std.components.tracing import can_look
from transformer_std.hook_points import HookPoint, Host
from transformer_std.layouts import HeadOutputs, HeadResults, Keys, Pattern, Queries, Residual, Values
from transformer_std.modules import Direct, Linear
from transformer_std.weights import UnreadableWeight, linear_map

Heads = tuple[Queries, Keys, Values]
AllKeys = Float[Tensor, "batch num_kv_heads key qk_head_dim"]
AllValues = Float[Tensor, "batch num_kv_heads key head_dim"]
Mask = Bool[Tensor, "batch_or_1 1 query key"] | None
WeightAndBias = tuple[Float[Tensor, "out hidden_size"], Float[Tensor, " out"]]


@runtime_checkable
class LayerCache(Protocol):
    """A block's part of a key/value cache."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the new positions' keys and values in; gives those of all positions."""
        ...


def split_heads(x: Float[Tensor, "batch seq width"], dim: int) -> Float[Tensor, "batch heads seq dim"]:
    batch, seq, _ = x.shape
    return x.view(batch, seq, -1, dim).transpose(1, 2)  # einops says it better, in 2 us more, five times a block


def side_by_side(x: Float[Tensor, "batch seq width"], dim: int) -> HeadOutputs:
    return x.view(*x.shape[:2], -1, dim)


def merge_heads(x: HeadOutputs) -> Float[Tensor, "batch seq width"]:
    return x.flatten(2)


class SplitProjections(Direct):
    """Queries, keys and values by a matrix each."""

    def __init__(self, cfg: config.Attention, hidden_size: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q = Linear(hidden_size, cfg.num_heads * cfg.head_dim, bias=cfg.bias)
        self.k = Linear(hidden_size, cfg.num_kv_heads * cfg.head_dim, bias=cfg.bias)
        self.v = Linear(hidden_size, cfg.num_kv_heads * cfg.head_dim, bias=cfg.bias)

    def forward(self, x: Residual) -> Heads:
        dim = self.head_dim
        return split_heads(self.q(x), dim), split_heads(self.k(x), dim), split_heads(self.v(x), dim)

    def parts(self, read: Callable[[str], WeightAndBias]) -> list[WeightAndBias]:
        """Weight and bias of queries, keys and values, of what `read` finds in the projections by name."""
        return [read("q"), read("k"), read("v")]


class FusedProjections(Direct):
    """One matrix; its output is the queries, then the keys, then the values, head after head."""

    def __init__(self, cfg: config.Attention, hidden_size: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.sizes = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
        self.qkv = Linear(hidden_size, sum(self.sizes) * cfg.head_dim, bias=cfg.bias)

    def _parts(self, x: Tensor, dim: int, unit: int = 1) -> list[Tensor]:
        # Slices, not split(): autograd refuses in-place edits of a view that came with siblings.
        h, kv, _ = self.sizes
        return [x.narrow(dim, start * unit, size * unit) for start, size in ((0, h), (h, kv), (h + kv, kv))]

    def forward(self, x: Residual) -> Heads:
        q, k, v = self._parts(split_heads(self.qkv(x), self.head_dim), 1)
        return q, k, v

    def parts(self, read: Callable[[str], WeightAndBias]) -> list[WeightAndBias]:
        """Weight and bias of queries, keys and values, of what `read` finds in the projections by name."""
        weight, bias = read("qkv")
        return list(zip(self._parts(weight, 0, self.head_dim), self._parts(bias, 0, self.head_dim), strict=True))


def mix_fast(q: Queries, k: AllKeys, v: AllValues, mask: Mask, scale: float) -> HeadOutputs:
    """Softmax attention in one fused call, arranged as transformers' sdpa path so that its kernel is the same one."""
    queries, groups = q.shape[2], q.shape[1] // k.shape[1]
    share = groups > 1 and mask is None and k.shape[-1] <= 256
    if groups > 1 and not share:
        if queries == 1:  # one token: a group's queries stand in for positions, nothing is repeated
            q = rearrange(q, "batch (kv_head group) 1 dim -> batch kv_head group dim", group=groups)
        else:
            k, v = expand_kv(k, groups), expand_kv(v, groups)
    causal_only = queries > 1 and mask is None  # in this order a bool, too, where a compiler has symbols for sizes
    heads = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, is_causal=causal_only, enable_gqa=share
    )
    if heads.shape[2] != queries:
        heads = rearrange(heads, "batch kv_head group dim -> batch (kv_head group) 1 dim")
    return heads.transpose(1, 2).contiguous()


def scaled_scores(q: Queries, k: Float[Tensor, "batch num_heads key qk_head_dim"], scale: float) -> Pattern:
    return times(torch.matmul(q, rearrange(k, "batch head key dim -> batch head dim key")), scale)


def masked_scores(q: Queries, k: AllKeys, mask: Mask, scale: float) -> Pattern:
    """The scores entering the softmax, where a masked entry is the dtype's lowest finite number."""
    # In one piece, as they come out of transformers' key/value cache, which a plain call of it has too: in float16 the
    # product of queries and keys rounds differently on other strides.
    k = expand_kv(k.contiguous(), q.shape[1] // k.shape[1])
    if mask is None:
        mask = causal(q.shape[2], k.shape[2], None, q.device)[None, None]
    scores = scaled_scores(q, k, scale)
    scores = filled(scores, ~mask, torch.finfo(scores.dtype).min)
    if scores.dtype == torch.float16 and not (can_look(scores) and bool(scores.isfinite().all())):
        return _refined(scores, scaled_scores(q.float(), k.float(), scale).masked_fill(~mask, -torch.inf))
    return scores


def _refined(scores: Pattern, wide: Pattern) -> Pattern:
    """Float16 scores whose product passed 65504 before it was scaled (phi-2's does), with the same in float32 beside.

    A row that it took to infinity is given relative to its largest score: a softmax does not see the shift, and where
    float16 is finest is where the weight is. Other rows stay.
    """
    lowest = torch.finfo(torch.float16).min
    relative = (wide - wide.amax(-1, keepdim=True)).clamp(min=lowest).half()
    return torch.where((scores == torch.inf).any(-1, keepdim=True), relative, scores.clamp(min=lowest))


def by_head(
    weight: Float[Tensor, "hidden_size width"], head_dim: int
) -> Float[Tensor, "num_heads head_dim hidden_size"]:
    return rearrange(weight, "hidden (head dim) -> head dim hidden", dim=head_dim)


def head_results(premix: HeadOutputs, weight: Float[Tensor, "hidden_size width"]) -> HeadResults:
    return einsum(
        premix, by_head(weight, premix.shape[-1]), "batch seq head dim, head dim hidden -> batch seq head hidden"
    )


def _refuse(message: str) -> NoReturn:
    raise UnreadableWeight(message)


class Attention(Host):
    """Multi-head attention with grouped key/value heads (https://arxiv.org/abs/2305.13245)."""

    host = "self_attn"

    attention_queries_before_rotary = HookPoint(Queries, "The queries after any q norm, before the rotary")
    attention_keys_before_rotary = HookPoint(Keys, "The keys after any k norm, before the rotary")
    attention_queries = HookPoint(Queries, "The queries entering attention")
    attention_keys = HookPoint(Keys, "The keys entering attention, one a key/value head, with any cached prefix")
    attention_values = HookPoint(Values, "The values entering attention, one a key/value head, with any cached prefix")
    attention_scores = HookPoint(Pattern, "The attention scores entering the softmax, scaled and masked")
    attention_probabilities = HookPoint(Pattern, "The attention pattern the values are mixed with")
    attention_head_outputs = HookPoint(HeadOutputs, "Each head's mixed values")
    attention_gate = HookPoint(HeadOutputs, "The output gate of every head, before its sigmoid")
    attention_premix = HookPoint(HeadOutputs, "Every head's output side by side, as the output projection takes it")
    attention_result = HookPoint(HeadResults, "Each head's own contribution through the output projection, no bias")
    attention_unnormed_output = HookPoint(Residual, "The output projection's output, entering the post-norm")
    attention_output = HookPoint(Residual, "What the attention adds to the residual stream")

    def __init__(self, cfg: config.Attention, hidden_size: int, post_norm: config.Norm | None, eager: bool = False):
        super().__init__()
        self.cfg, self.hidden_size, self.eager = cfg, hidden_size, eager
        self.scale = cfg.head_dim**-0.5
        self.projections = (FusedProjections if cfg.fused else SplitProjections)(cfg, hidden_size)
        self.q_norm = build_norm(cfg.qk_norm, cfg.head_dim) if cfg.qk_norm else None
        self.k_norm = build_norm(cfg.qk_norm, cfg.head_dim) if cfg.qk_norm else None
        self.gate = Linear(hidden_size, cfg.num_heads * cfg.head_dim, bias=False) if cfg.output_gate else None
        self.o = Linear(cfg.num_heads * cfg.head_dim, hidden_size, bias=cfg.output_bias)
        self.post_norm = build_norm(post_norm, hidden_size) if post_norm else None
        if not cfg.output_gate:
            self.without("this attention has no output gate", "attention_gate")
        if not post_norm:
            self.without("no norm follows this attention: read attention_output", "attention_unnormed_output")

    def forward(self, x: Residual, angles: Angles | None, mask: Mask, cache: LayerCache | None = None) -> Residual:
        q, k, v = self.projections(x)
        gate = None if self.gate is None else side_by_side(self.gate(x), self.cfg.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.attention_queries_before_rotary(q), self.attention_keys_before_rotary(k)
        if angles is not None and self.cfg.rotary is not None:
            q, k = turn_both(q, k, angles, self.cfg.rotary)
        if cache is not None:
            k, v = cache.update(k, v)
        heads = self.mix(self.attention_queries(q), self.attention_keys(k), self.attention_values(v), mask)
        heads = self.attention_head_outputs(heads)
        if gate is not None:
            heads = heads * torch.sigmoid(self.attention_gate(gate))
        out = self.project(self.attention_premix(heads))
        if self.post_norm is not None:
            out = self.post_norm(self.attention_unnormed_output(out))
        return self.attention_output(out)

    def mix(self, q: Queries, k: AllKeys, v: AllValues, mask: Mask) -> HeadOutputs:
        if not (self.eager or self.attention_scores.watched or self.attention_probabilities.watched):
            return mix_fast(q, k, v, mask, self.scale)
        scores = self.attention_scores(masked_scores(q, k, mask, self.scale))
        pattern = self.attention_probabilities(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype))
        heads = torch.matmul(pattern, expand_kv(v.contiguous(), self.cfg.num_heads // self.cfg.num_kv_heads))
        return heads.transpose(1, 2).contiguous()

    def project(self, premix: HeadOutputs) -> Residual:
        out = self.o(merge_heads(premix))
        if not self.attention_result.watched:
            return out
        try:
            weight, bias = self._output_map()
        except UnreadableWeight as error:  # no reason to stop a run whose cache has it among others
            if not self.attention_result.can_wait:
                raise
            self.attention_result.later(functools.partial(_refuse, str(error)))
            return out
        if self._results_can_wait(premix, weight):
            kept = (each.detach().clone() for each in (premix, weight))  # as they are now
            self.attention_result.later(functools.partial(head_results, *kept))
            return out
        # The heads' own contributions round differently from their sum by one product. Only what a hook changed in
        # them is added, so that reading them leaves every bit; a watched gradient flows through them.
        result = head_results(premix, weight)
        edited = self.attention_result(result)
        if edited is result and not self.attention_result.watches_gradient:
            return out
        difference = (edited - result.detach()).masked_fill(result.isinf() & (edited == result), 0)  # inf - inf is none
        changed = reduce(difference, "batch seq head hidden -> batch seq hidden", "sum")
        return out.detach() + changed + (bias - bias.detach())

    def _results_can_wait(self, premix: HeadOutputs, weight: Float[Tensor, "hidden_size width"]) -> bool:
        """Whether the results, which nothing reads on, can be left until they are looked at: where they are larger
        than what they are computed from, give or take a head's width."""
        enough = premix.shape[0] * premix.shape[1] >= self.cfg.head_dim
        return self.attention_result.can_wait and enough and premix.dtype == weight.dtype

    def _output_map(self) -> tuple[Float[Tensor, "hidden_size width"], Float[Tensor, " hidden_size"]]:
        return linear_map(self, "o", self.cfg.num_heads * self.cfg.head_dim)

    def _parts(self) -> list[WeightAndBias]:
        return self.projections.parts(lambda name: linear_map(self, f"projections.{name}", self.hidden_size))

    def _weight(self, index: int) -> Float[Tensor, "heads hidden dim"]:
        return rearrange(self._parts()[index][0], "(head dim) hidden -> head hidden dim", dim=self.cfg.head_dim)

    def _bias(self, index: int) -> Float[Tensor, "heads dim"]:
        return rearrange(self._parts()[index][1], "(head dim) -> head dim", dim=self.cfg.head_dim)

    def by_query_head(self, of_kv_heads: Float[Tensor, "kv_heads ..."]) -> Float[Tensor, "num_heads ..."]:
        """`W_K`, `W_V`, `b_K` or `b_V` with a key/value head's entry once for each query head of its group, so that
        `by_query_head(W_V)[3] @ W_O[3]` is query head 3's own; `W_V[3]` is another's where heads are grouped."""
        if len(of_kv_heads) != self.cfg.num_kv_heads:
            raise ValueError(f"{len(of_kv_heads)} heads: give one of the {self.cfg.num_kv_heads} key/value heads' own")
        groups = self.cfg.num_heads // self.cfg.num_kv_heads
        return repeat(of_kv_heads, "kv_head ... -> (kv_head group) ...", group=groups)

    @property
    def W_Q(self) -> Float[Tensor, "num_heads hidden_size head_dim"]:
        return self._weight(0)

    @property
    def W_K(self) -> Float[Tensor, "num_kv_heads hidden_size head_dim"]:
        """One a key/value head: `by_query_head` repeats them beside `W_Q`."""
        return self._weight(1)

    @property
    def W_V(self) -> Float[Tensor, "num_kv_heads hidden_size head_dim"]:
        """One a key/value head: `by_query_head` repeats them beside `W_O`."""
        return self._weight(2)

    @property
    def W_O(self) -> Float[Tensor, "num_heads head_dim hidden_size"]:
        return by_head(self._output_map()[0], self.cfg.head_dim)

    @property
    def b_Q(self) -> Float[Tensor, "num_heads head_dim"]:
        return self._bias(0)

    @property
    def b_K(self) -> Float[Tensor, "num_kv_heads head_dim"]:
        return self._bias(1)

    @property
    def b_V(self) -> Float[Tensor, "num_kv_heads head_dim"]:
        return self._bias(2)

    @property
    def b_O(self) -> Float[Tensor, " hidden_size"]:
        return self._output_map()[1]
