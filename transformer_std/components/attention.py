"""Attention: projections, rotary, the fast path and the open one, and every value between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std import config
from transformer_std.components.kernels import (
    AllKeys,
    AllValues,
    Mask,
    by_head,
    expand_kv,
    head_results,
    masked_scores,
    mix_fast,
    positions_first,
    softmax_beside,
    wide_scores,
)
from transformer_std.components.norms import AnyNorm, norm_or_none, normed
from transformer_std.components.projections import (
    PROJECTIONS,
    Heads,
    OfHeads,
    changed_projection,
    merge_heads,
    side_by_side,
    split_heads,
)
from transformer_std.components.rotary import Angles, turn_both
from transformer_std.components.states import LayerKV
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.hosts import Host
from transformer_std.layouts import (
    HeadOutputs,
    HeadResults,
    Keys,
    KvHeadInputs,
    Pattern,
    PerToken,
    Queries,
    Residual,
    Sinks,
    Values,
)
from transformer_std.modules import Linear
from transformer_std.weights import UnreadableWeight, linear_map, refusal


class SoftmaxAttention(Host):
    """From queries, keys and values on. A subclass says where these come from: its `__init__` calls `build_output` when
    it has built that."""

    host = "self_attn"

    attention_query_inputs = HookPoint(
        HeadResults, "What the queries are projections of, a copy for each head", derived=True
    )
    attention_key_inputs = HookPoint(
        KvHeadInputs, "What the keys are projections of, a copy for each key/value head", derived=True
    )
    attention_value_inputs = HookPoint(
        KvHeadInputs, "What the values are projections of, a copy for each key/value head", derived=True
    )
    attention_queries_before_rotary = HookPoint(Queries, "The queries after any q norm, before the rotary")
    attention_keys_before_rotary = HookPoint(Keys, "The keys after any k norm, before the rotary")
    attention_queries = HookPoint(Queries, "The queries entering attention")
    attention_keys = HookPoint(Keys, "The keys entering attention, one a key/value head, with any cached prefix")
    attention_values = HookPoint(Values, "The values entering attention, one a key/value head, with any cached prefix")
    attention_scores = HookPoint(Pattern, "The attention scores entering the softmax, scaled and masked")
    attention_sinks = HookPoint(Sinks, "The score of each head's sink, which enters the softmax beside the others")
    attention_probabilities = HookPoint(Pattern, "The attention pattern the values are mixed with")
    attention_head_outputs = HookPoint(HeadOutputs, "Each head's mixed values")
    attention_gate = HookPoint(HeadOutputs, "The output gate of every head, before its sigmoid")
    attention_premix = HookPoint(HeadOutputs, "Every head's output side by side, as the output projection takes it")
    attention_result = HookPoint(
        HeadResults, "Each head's own contribution through the output projection, no bias", derived=True
    )
    attention_unnormed_output = HookPoint(Residual, "The output projection's output, entering the post-norm")
    attention_post_norm_scale = HookPoint(PerToken, "What the norm after the attention divides by", derived=True)
    attention_output = HookPoint(Residual, "What the attention adds to the residual stream")

    def __init__(self, cfg: config.Attention, hidden_size: int, eager: bool):
        super().__init__()
        self.cfg, self.hidden_size = cfg, hidden_size
        self.openly = eager or cfg.open_always
        scale = cfg.qk_head_dim**-0.5 if cfg.scale is None else cfg.scale
        self.query_scale = scale if cfg.scaled_queries else 1.0
        self.scale = 1.0 if cfg.scaled_queries else scale

    def build_output(self, post_norm: config.Norm | None) -> None:
        cfg, hidden_size = self.cfg, self.hidden_size
        self.o = Linear(cfg.num_heads * cfg.head_dim, hidden_size, bias=cfg.output_bias)
        self.sinks = nn.Parameter(torch.empty(cfg.num_heads)) if cfg.sinks else None
        self.post_norm = norm_or_none(post_norm, hidden_size)
        if not cfg.sinks:
            self.without("this attention has no sinks", "attention_sinks")
        if not cfg.output_gate:
            self.without("this attention has no output gate", "attention_gate")
        if not post_norm:
            self.without(
                "no norm follows this attention: read attention_output",
                "attention_unnormed_output",
                "attention_post_norm_scale",
            )

    def attend(self, q: Queries, k: AllKeys, v: AllValues, mask: Mask) -> HeadOutputs:
        heads = self.mix(self.attention_queries(q), self.attention_keys(k), self.attention_values(v), mask)
        return self.attention_head_outputs(heads)

    def leave(self, heads: HeadOutputs) -> Residual:
        out = self.project(self.attention_premix(heads))
        if self.post_norm is not None:
            out = normed(self.post_norm, self.attention_unnormed_output(out), self.attention_post_norm_scale)
        return self.attention_output(out)

    def mix(self, q: Queries, k: AllKeys, v: AllValues, mask: Mask) -> HeadOutputs:
        if not (self.openly or self.attention_scores.watched or self.attention_probabilities.watched):
            return mix_fast(q, k, v, mask, self.scale)
        scores = self.attention_scores(self.scores(q, k, mask))
        pattern = self.attention_probabilities(self.pattern(scores).to(q.dtype))
        heads = torch.matmul(pattern, expand_kv(v.contiguous(), self.cfg.num_heads // self.cfg.num_kv_heads))
        return positions_first(heads)

    def scores(self, q: Queries, k: AllKeys, mask: Mask) -> Pattern:
        if self.cfg.wide_scores:
            return wide_scores(q, k, mask, self.scale)
        return masked_scores(q, k, mask, self.scale, self.cfg.softcap, shifts=not self.cfg.sinks)

    def pattern(self, scores: Pattern) -> Pattern:
        if self.sinks is None:
            return F.softmax(scores, dim=-1, dtype=torch.float32)
        batch, _, queries, _ = scores.shape
        sinks = repeat(self.sinks, "head -> batch head query 1", batch=batch, query=queries).contiguous()
        return softmax_beside(scores, self.attention_sinks(sinks))

    def project(self, premix: HeadOutputs) -> Residual:
        out = self.o(merge_heads(premix))
        if not self.attention_result.watched:
            return out
        try:
            weight, bias = self._output_map()
        except UnreadableWeight as error:
            self.attention_result.beside(refusal(str(error)))
            return out
        wait = self._results_are_larger(premix, weight)
        shown = self.attention_result.beside(head_results, premix, weight, wait=wait)
        return out if shown is None else self._with_results(out, *shown, bias)

    def _results_are_larger(self, premix: HeadOutputs, weight: Float[Tensor, "hidden_size width"]) -> bool:
        """Whether the results take more memory than what they are computed from, give or take a head's width."""
        return premix.shape[0] * premix.shape[1] >= self.cfg.head_dim and premix.dtype == weight.dtype

    def _with_results(
        self, out: Residual, result: HeadResults, edited: HeadResults, bias: Float[Tensor, " hidden_size"]
    ) -> Residual:
        """`out` with what hooks changed in the heads' own results. These round differently from their sum by one
        product: only the change is added, so that reading them leaves every bit; a watched gradient flows through
        them."""
        difference = (edited - result.detach()).masked_fill(result.isinf() & (edited == result), 0)  # inf - inf is none
        changed = reduce(difference, "batch seq head hidden -> batch seq hidden", "sum")
        return out.detach() + changed + (bias - bias.detach())

    def _output_map(self) -> tuple[Float[Tensor, "hidden_size width"], Float[Tensor, " hidden_size"]]:
        return linear_map(self, "o", self.cfg.num_heads * self.cfg.head_dim)

    def by_query_head(self, of_kv_heads: Float[Tensor, "kv_heads ..."]) -> Float[Tensor, "num_heads ..."]:
        """`W_K`, `W_V`, `b_K` or `b_V` with a key/value head's entry once for each query head of its group, so that
        `by_query_head(W_V)[3] @ W_O[3]` is query head 3's own; `W_V[3]` is another's where heads are grouped."""
        if len(of_kv_heads) != self.cfg.num_kv_heads:
            raise ValueError(f"{len(of_kv_heads)} heads: give one of the {self.cfg.num_kv_heads} key/value heads' own")
        groups = self.cfg.num_heads // self.cfg.num_kv_heads
        return repeat(of_kv_heads, "kv_head ... -> (kv_head group) ...", group=groups)

    @property
    def W_O(self) -> Float[Tensor, "num_heads head_dim hidden_size"]:
        return by_head(self._output_map()[0], self.cfg.head_dim)

    @property
    def b_O(self) -> Float[Tensor, " hidden_size"]:
        return self._output_map()[1]


class Attention(SoftmaxAttention):
    """Multi-head attention with grouped key/value heads (https://arxiv.org/abs/2305.13245)."""

    lacks = "keys and values are projections of the stream: there is no latent"

    def __init__(self, cfg: config.Attention, hidden_size: int, post_norm: config.Norm | None, eager: bool = False):
        super().__init__(cfg, hidden_size, eager)
        self.projections = PROJECTIONS[cfg.fused](cfg, hidden_size)
        over = {"head": (1, 1), "heads": (cfg.num_heads, cfg.num_kv_heads)}[cfg.qk_norm_over]
        self.q_norm = norm_or_none(cfg.qk_norm, over[0] * cfg.head_dim)
        self.k_norm = norm_or_none(cfg.qk_norm, over[1] * cfg.head_dim)
        self.gate = Linear(hidden_size, cfg.num_heads * cfg.head_dim, bias=False) if cfg.output_gate else None
        self.build_output(post_norm)

    def forward(self, x: Residual, angles: Angles | None, mask: Mask, cache: LayerKV | None = None) -> Residual:
        q, k, v = self.projected(x)
        gate = None if self.gate is None else side_by_side(self.gate(x), self.cfg.head_dim)
        q, k = self.qk_normed(q, self.q_norm), self.qk_normed(k, self.k_norm)
        q, k = self.attention_queries_before_rotary(q), self.attention_keys_before_rotary(k)
        if angles is not None and self.cfg.rotary is not None:
            q, k = turn_both(q, k, angles, self.cfg.rotary)
        if self.cfg.scaled_queries:
            q = q * self.query_scale
        if cache is not None:
            k, v = cache.update(k, v)
        heads = self.attend(q, k, v, mask)
        if gate is not None:
            heads = heads * torch.sigmoid(self.attention_gate(gate))
        return self.leave(heads)

    def projected(self, x: Residual) -> Heads:
        heads = self.projections(x)
        if not (
            self.attention_query_inputs.watched
            or self.attention_key_inputs.watched
            or self.attention_value_inputs.watched
        ):
            return heads
        points = (self.attention_query_inputs, self.attention_key_inputs, self.attention_value_inputs)
        try:
            parts = self._parts()
        except UnreadableWeight as error:
            for point in points:
                point.beside(refusal(str(error)))
            return heads
        q, k, v = (changed_projection(*each, x) for each in zip(heads, points, parts, strict=True))
        return q, k, v

    def qk_normed(
        self, x: Float[Tensor, "batch heads seq dim"], norm: AnyNorm | None
    ) -> Float[Tensor, "batch heads seq dim"]:
        if norm is None:
            return x
        if self.cfg.qk_norm_over == "head":
            return norm(x)
        return split_heads(norm(merge_heads(x.transpose(1, 2))), self.cfg.head_dim)

    def _parts(self) -> list[OfHeads]:
        return self.projections.parts(lambda name: linear_map(self, f"projections.{name}", self.hidden_size))

    def _weight(self, index: int) -> Float[Tensor, "heads hidden dim"]:
        return rearrange(self._parts()[index][0], "head dim hidden -> head hidden dim")

    def _bias(self, index: int) -> Float[Tensor, "heads dim"]:
        return self._parts()[index][1]

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
    def b_Q(self) -> Float[Tensor, "num_heads head_dim"]:
        return self._bias(0)

    @property
    def b_K(self) -> Float[Tensor, "num_kv_heads head_dim"]:
        return self._bias(1)

    @property
    def b_V(self) -> Float[Tensor, "num_kv_heads head_dim"]:
        return self._bias(2)
