"""Routers: from a token's logits to the weights and indices of its slots. Pure functions, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_std import config
from transformer_std.layouts import ExpertIndices, ExpertWeights, RouterLogits

Choice = tuple[ExpertWeights, ExpertIndices]
Slot = tuple[Float[Tensor, "batch seq 1"], Int[Tensor, "batch seq 1"]]


def softmax_top_k(probabilities: RouterLogits, top_k: int, normalized: bool) -> Choice:
    """The largest `top_k` of a softmax over all experts, in descending order."""
    weights, indices = torch.topk(probabilities, top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights), indices


def sigmoid_top_k(scores: RouterLogits, bias: Float[Tensor, " num_experts"], top_k: int, scale: float) -> Choice:
    """The experts of the largest scores plus `bias`; weights from the scores alone, summing to `scale`."""
    indices = torch.topk(scores + bias, top_k, dim=-1).indices
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, indices


def grouped_sigmoid_top_k(
    scores: RouterLogits, bias: Float[Tensor, " num_experts"], top_k: int, router: config.GroupedSigmoid
) -> Choice:
    """As `sigmoid_top_k`, among the experts of the best groups; the slots are in the order in which topk finds them."""
    grouped = (scores + bias).unflatten(-1, (router.groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1)
    open_groups = torch.topk(best, router.top_groups, dim=-1, sorted=False).indices
    closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, open_groups, False)
    left = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    indices = torch.topk(left, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, indices)
    if router.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.scale, indices


def top_k_softmax(logits: RouterLogits, top_k: int) -> Choice:
    """The largest `top_k` logits, and a softmax over them."""
    chosen, indices = torch.topk(logits, top_k, dim=-1)
    return chosen.softmax(-1), indices


def sparsemixer(logits: RouterLogits, jitter: float, training: bool) -> Choice:
    """Two slots in turn, the second without the first one's expert (SparseMixer-v2, https://arxiv.org/abs/2409.12136).

    In training each slot samples its expert, and gradients are the paper's estimate.
    """
    first = _slot(logits, logits, jitter, training, draws=1)
    # transformers draws the second slot's chance of staying whole twice over: to agree, so do we.
    second = _slot(logits, logits.scatter(-1, first[1], -torch.inf), jitter, training, draws=2)
    return torch.cat((first[0], second[0]), -1), torch.cat((first[1], second[1]), -1)


def _slot(logits: RouterLogits, left: RouterLogits, jitter: float, training: bool, draws: int) -> Slot:
    """One expert of those `left` (the others at -inf), and its share among those within 2 * jitter of the best."""
    with torch.no_grad():
        best, chosen = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
    near = left.masked_fill(far, -torch.inf)
    if not training:
        return near.softmax(-1).gather(-1, chosen), chosen
    gumbel = torch.empty_like(near, memory_format=torch.legacy_contiguous_format).exponential_().log()
    chosen = (near - gumbel).max(dim=-1, keepdim=True).indices
    shares = near.softmax(-1)
    chance = [torch.rand_like(shares[..., :1]) for _ in range(draws)][-1]
    return _heun(logits, shares, chosen, chance), chosen


def _heun(
    logits: RouterLogits, shares: RouterLogits, chosen: Int[Tensor, "batch seq 1"], chance: Float[Tensor, "batch seq 1"]
) -> Float[Tensor, "batch seq 1"]:
    """The weight of a sampled expert: its share, cut to a third three times in four where it is not the likeliest."""
    likeliest = shares.max(dim=-1, keepdim=True).indices
    whole: Bool[Tensor, "batch seq 1"] = (chosen == likeliest) | (chance > 0.75)
    factor = torch.add(0.3333, whole, alpha=0.6667).type_as(shares)
    return _Heun.apply(logits, shares.gather(-1, chosen), chosen, shares, factor)


class _Heun(torch.autograd.Function):
    """share * factor forward; backward the share's own gradient, as if the factor were 1: Heun's third-order method
    estimates the gradient of the sampling by it."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        share: Tensor,
        chosen: Tensor,
        shares: Tensor,
        factor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(share, chosen, shares)
        return share * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, chosen, shares = ctx.saved_tensors
        grad = grad * share
        return (shares * -grad).scatter_add(-1, chosen, grad), None, None, None, None


class Router(NamedTuple):
    """How a mixture routes. `score` makes of the logits the scores that are a value, None where there are none;
    `choose` makes of the mixture, the logits and the scores the slots."""

    score: Callable[[RouterLogits], RouterLogits] | None
    choose: Callable[[Any, RouterLogits, Any], Choice]


def _choose_softmax(mixture: Any, logits: RouterLogits, scores: RouterLogits) -> Choice:
    router = mixture.cfg.router
    weights, indices = softmax_top_k(scores, mixture.top_k, router.normalized)
    return (weights if router.wide else weights.to(logits.dtype)), indices


def _choose_sigmoid(mixture: Any, logits: RouterLogits, scores: RouterLogits) -> Choice:
    return sigmoid_top_k(scores, mixture.expert_bias, mixture.top_k, mixture.cfg.router.scale)


def _choose_grouped(mixture: Any, logits: RouterLogits, scores: RouterLogits) -> Choice:
    return grouped_sigmoid_top_k(scores, mixture.expert_bias, mixture.top_k, mixture.cfg.router)


def _choose_sparsemixer(mixture: Any, logits: RouterLogits, scores: None) -> Choice:
    return sparsemixer(logits, mixture.cfg.router.jitter, mixture.training)


ROUTERS: dict[type, Router] = {
    config.SoftmaxTopK: Router(lambda logits: logits.softmax(-1, dtype=torch.float32), _choose_softmax),
    config.SigmoidTopK: Router(lambda logits: logits.float().sigmoid(), _choose_sigmoid),
    config.GroupedSigmoid: Router(torch.sigmoid, _choose_grouped),
    config.SparseMixer: Router(None, _choose_sparsemixer),
    config.TopKSoftmax: Router(None, lambda mixture, logits, scores: top_k_softmax(logits, mixture.top_k)),
}
