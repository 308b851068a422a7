"""A mixture of experts: the mixture hooks, a router computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std import config
from transformer_std.components.experts import ClampedExperts, Experts
from transformer_std.components.mlp import SharedExpert
from transformer_std.components.norms import norm_or_none, normed
from transformer_std.components.routers import ROUTERS, Choice
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.hosts import Host, Missing
from transformer_std.layouts import (
    ExpertIndices,
    ExpertOutputs,
    ExpertWeights,
    PerToken,
    Residual,
    RouterLogits,
    SlotNeurons,
)
from transformer_std.modules import DrawnLinear, Linear, WideLinear, ZeroedLinear
from transformer_std.weights import own_weight

# Of routers that have one of their own. One starts from ties, which its selection bias breaks.
MATRICES: dict[type, type[Linear]] = {
    config.SigmoidTopK: ZeroedLinear,
    config.GroupedSigmoid: WideLinear,
    config.TopKSoftmax: DrawnLinear,
}


def shared_experts(cfg: config.Mlp | None, hidden_size: int) -> SharedExpert | Missing:
    return SharedExpert(cfg, hidden_size) if cfg else Missing("shared_experts", "this mixture has no shared expert")


class Mixture(Host):
    """routed = sum over slots of weight * expert(x), plus what every token runs through where there is a shared expert.

    Attributes:
        expert_bias: with sigmoid scoring, what is added to the scores to choose and never weighs; float32 always.
    """

    host = "mlp"

    router_logits = HookPoint(RouterLogits, "The router's logits, one per expert, before the scoring")
    router_scores = HookPoint(RouterLogits, "The scores of all experts, before the choice and any selection bias")
    expert_weights = HookPoint(ExpertWeights, "The weight each chosen expert's output is scaled by")
    expert_indices = HookPoint(ExpertIndices, "The expert each routing slot sends the token to")
    mlp_preactivation = HookPoint(SlotNeurons, "The activation function's input, of each slot's expert")
    mlp_up = HookPoint(SlotNeurons, "The up half, of each slot's expert")
    mlp_activation = HookPoint(SlotNeurons, "The activation function's output, of each slot's expert")
    mlp_neurons = HookPoint(SlotNeurons, "What the down projection receives, of each slot's expert")
    expert_outputs = HookPoint(ExpertOutputs, "Each routing slot's expert output times its weight")
    routed_output = HookPoint(Residual, "The routed experts' combined output")
    shared_expert_gate = HookPoint(PerToken, "The shared expert's gate, before its sigmoid")
    shared_expert_output = HookPoint(Residual, "What the mixture adds of the shared expert, after any gate")
    mlp_unnormed_output = HookPoint(Residual, "The mixture's output, entering the post-norm")
    mlp_post_norm_scale = HookPoint(PerToken, "What the norm after the mixture divides by", derived=True)
    mlp_output = HookPoint(Residual, "What the mixture adds to the residual stream")

    def __init__(self, cfg: config.Mixture, hidden_size: int, post_norm: config.Norm | None = None):
        super().__init__()
        self.cfg, scoring = cfg, cfg.router.scoring
        self.router = MATRICES.get(type(cfg.router), Linear)(hidden_size, cfg.num_experts, bias=cfg.bias)
        self.expert_bias = (
            nn.Parameter(torch.zeros(cfg.num_experts), requires_grad=False) if scoring == "sigmoid" else None
        )
        self.experts = (ClampedExperts if cfg.clamp else Experts)(cfg, hidden_size)
        self.shared_experts = shared_experts(cfg.shared, hidden_size)
        self.shared_gate = Linear(hidden_size, 1, bias=False) if cfg.shared_gate else None
        self.post_norm = norm_or_none(post_norm, hidden_size)
        if scoring == "sparsemixer":
            self.without("sparsemixer scores each slot on its own: read router_logits", "router_scores")
        if scoring == "chosen":
            self.without("this router scores the chosen experts alone: read router_logits", "router_scores")
        if not cfg.shared:
            self.without("this mixture has no shared expert", "shared_expert_output", "shared_expert_gate")
        elif not cfg.shared_gate:
            self.without("this mixture's shared expert has no gate", "shared_expert_gate")
        if not post_norm:
            self.without("no norm follows this mixture: read mlp_output", "mlp_unnormed_output", "mlp_post_norm_scale")

    def forward(self, x: Residual) -> Residual:
        x = self.jittered(x)
        first, last = self.cfg.shared_first, self.cfg.shared_last
        shared = self.shared_experts(x) if self.cfg.shared and first else None
        weights, indices = self.select(self.router_logits(self.router(x)))
        if self.cfg.shared and not (first or last):
            shared = self.shared_experts(x)
        indices = self._checked(self.expert_indices(indices))
        weights = self.expert_weights(weights)
        slots = self.expert_outputs(self.experts(x, weights, indices, self))
        out = self.routed_output(slots.sum(2).to(x.dtype))
        if self.cfg.shared and last:
            shared = self.shared_experts(x)
        if shared is not None:
            out = out + self.shared(x, shared)
        if self.post_norm is not None:
            out = normed(self.post_norm, self.mlp_unnormed_output(out), self.mlp_post_norm_scale)
        return self.mlp_output(out)

    def select(self, logits: RouterLogits) -> Choice:
        router = ROUTERS[type(self.cfg.router)]
        scores = None if router.score is None else self.router_scores(router.score(logits))
        return router.choose(self, logits, scores)

    def shared(self, x: Residual, out: Residual) -> Residual:
        if self.shared_gate is not None:
            out = torch.sigmoid(self.shared_expert_gate(self.shared_gate(x))) * out
        return self.shared_expert_output(out)

    def jittered(self, x: Residual) -> Residual:
        """The input under the training noise of sparsemixer, drawn for the mixture and again for its router."""
        noise = getattr(self.cfg.router, "input_jitter", 0.0)
        if self.training and noise > 0:
            for _ in range(2):
                x = x * torch.empty_like(x).uniform_(1.0 - noise, 1.0 + noise)
        return x

    def _checked(self, indices: ExpertIndices) -> ExpertIndices:
        if self.expert_indices.writes and not bool(((indices >= 0) & (indices < self.cfg.num_experts)).all()):
            last = self.cfg.num_experts - 1
            raise ValueError(f"{self.expert_indices.name} was written with experts outside 0 to {last}")
        return indices

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name == "expert_bias" else dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = None if self.expert_bias is None else self.expert_bias.data
        super()._apply(fn, recurse)
        bias = self.expert_bias
        if bias is not None and before is not None and bias.dtype != before.dtype:  # model.half() and the like
            bias.data = before.to(bias.device)
        return self

    @property
    def scoring(self) -> str:
        return self.cfg.router.scoring

    @property
    def num_experts(self) -> int:
        return self.cfg.num_experts

    @property
    def top_k(self) -> int:
        return self.cfg.top_k

    @property
    def intermediate_size(self) -> int:
        return self.cfg.intermediate_size

    @property
    def W_gate(self) -> Float[Tensor, "num_experts hidden_size intermediate_size"]:
        return self._halves()[0]

    @property
    def W_in(self) -> Float[Tensor, "num_experts hidden_size intermediate_size"]:
        return self._halves()[1]

    @property
    def W_out(self) -> Float[Tensor, "num_experts intermediate_size hidden_size"]:
        return rearrange(self._stacked("down"), "expert hidden neuron -> expert neuron hidden")

    @property
    def b_gate(self) -> Float[Tensor, "num_experts intermediate_size"]:
        both = self._bias("gate_up")
        return self.experts.halves(both)[0]

    @property
    def b_in(self) -> Float[Tensor, "num_experts intermediate_size"]:
        both = self._bias("gate_up")
        return self.experts.halves(both)[1]

    @property
    def b_out(self) -> Float[Tensor, "num_experts hidden_size"]:
        return self._bias("down")

    def _halves(self) -> tuple[Tensor, Tensor]:
        both = rearrange(self._stacked("gate_up"), "expert both hidden -> expert hidden both")
        return self.experts.halves(both)

    def _bias(self, name: str) -> Float[Tensor, "num_experts out"]:
        weight = self._stacked(name)
        return self._stacked(f"{name}_bias") if self.cfg.bias else weight.new_zeros(weight.shape[:2])

    def _stacked(self, name: str) -> Tensor:
        return own_weight(self, "experts", name, Experts)
