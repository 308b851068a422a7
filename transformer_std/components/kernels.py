"""The arithmetic of attention, between the queries and what the heads say: pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from transformer_std.components.positions import causal
from transformer_std.components.reuse import filled, plus, times
from transformer_std.components.tracing import can_look
from transformer_std.layouts import HeadOutputs, HeadResults, Pattern, Queries, Sinks

AllKeys = Float[Tensor, "batch num_kv_heads key qk_head_dim"]
AllValues = Float[Tensor, "batch num_kv_heads key head_dim"]
Mask = Bool[Tensor, "batch_or_1 1 query key"] | None
SHARED_UP_TO = 256  # transformers' own rule: past this width it repeats grouped keys before its kernel


def expand_kv(heads: Float[Tensor, "batch kv_heads key dim"], groups: int) -> Float[Tensor, "batch heads key dim"]:
    """Each key or value head once for every query head of its group."""
    if groups == 1:
        return heads
    return repeat(heads, "batch kv_heads key dim -> batch (kv_heads groups) key dim", groups=groups)


def mix_fast(q: Queries, k: AllKeys, v: AllValues, mask: Mask, scale: float) -> HeadOutputs:
    """Softmax attention in one fused call, arranged as transformers' sdpa path so that its kernel is the same one."""
    queries, groups = q.shape[2], q.shape[1] // k.shape[1]
    shares = groups > 1 and mask is None and k.shape[-1] <= SHARED_UP_TO
    # In this order a bool, too, where a compiler has symbols for sizes.
    whole, attend = queries > 1 and mask is None, F.scaled_dot_product_attention
    if groups == 1 or shares:
        return positions_first(attend(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=shares))
    if queries == 1:  # one token: a group's queries stand in for positions, nothing is repeated
        q = rearrange(q, "batch (kv_head group) 1 dim -> batch kv_head group dim", group=groups)
        heads = attend(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=shares)
        return positions_first(rearrange(heads, "batch kv_head group dim -> batch (kv_head group) 1 dim"))
    k, v = expand_kv(k, groups), expand_kv(v, groups)
    return positions_first(attend(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=shares))


def positions_first(heads: Float[Tensor, "batch num_heads seq head_dim"]) -> HeadOutputs:
    return heads.transpose(1, 2).contiguous()


def scaled_scores(q: Queries, k: Float[Tensor, "batch num_heads key qk_head_dim"], scale: float) -> Pattern:
    return times(torch.matmul(q, rearrange(k, "batch head key dim -> batch head dim key")), scale)


def capped(x: Float[Tensor, "*axes"], cap: float | None) -> Float[Tensor, "*axes"]:
    """Numbers between -cap and cap, almost as they are where they are small beside it."""
    return x if cap is None else times(torch.tanh(x / cap), cap)


def masked_scores(
    q: Queries, k: AllKeys, mask: Mask, scale: float, softcap: float | None = None, shifts: bool = True
) -> Pattern:
    """The scores entering the softmax, capped by a tanh where there is a `softcap`. A masked entry is the dtype's
    lowest finite number. `shifts`: a row of float16 scores may be given relative to its largest, where it overflows."""
    # In one piece, as they come out of transformers' key/value cache, which a plain call of it has too: in float16 the
    # product of queries and keys rounds differently on other strides.
    k = expand_kv(k.contiguous(), q.shape[1] // k.shape[1])
    scores = capped(scaled_scores(q, k, scale), softcap)
    if scores.dtype != torch.float16:  # a score is nothing beside the lowest number, and to add is faster
        return plus(scores, hiding(mask, scores, torch.finfo(scores.dtype).min))
    if mask is None:
        mask = causal(q.shape[2], k.shape[2], None, q.device)[None, None]
    scores = filled(scores, ~mask, torch.finfo(scores.dtype).min)
    if shifts and not (can_look(scores) and bool(scores.isfinite().all())):
        return _refined(
            scores, capped(scaled_scores(q.float(), k.float(), scale), softcap).masked_fill(~mask, -torch.inf)
        )
    return scores


def hiding(mask: Mask, scores: Pattern, lowest: float) -> Float[Tensor, "batch_or_1 1 query key"]:
    """What is added to scores: `lowest` where a query does not see a key."""
    if mask is None:
        queries, keys = scores.shape[-2:]
        return scores.new_full((queries, keys), lowest).triu_(keys - queries + 1)[None, None]
    return torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~mask, lowest)


def softmax_beside(scores: Pattern, sinks: Sinks) -> Pattern:
    """The softmax of the scores and a sink's, without the sink's share; in their own dtype, as transformers has it."""
    dtype = torch.promote_types(scores.dtype, sinks.dtype)  # two, under autocast
    both = torch.cat((scores.to(dtype), sinks.to(dtype)), dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]


def wide_scores(q: Queries, k: AllKeys, mask: Mask, scale: float) -> Pattern:
    """The scores in float32. A mask is added to them, as large as the queries' dtype can say."""
    k = expand_kv(k.contiguous(), q.shape[1] // k.shape[1])
    scores = scaled_scores(q.float(), k.float(), scale)
    return plus(scores, hiding(mask, scores, torch.finfo(q.dtype).min))


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
