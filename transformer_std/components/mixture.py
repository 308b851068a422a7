"""A mixture of experts: the mixture hooks, a router computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_std import config
from transformer_std.components.grouped import Rows, by_expert, group, take, unsorted
from transformer_std.components.mlp import ACTIVATIONS, SharedExpert
from transformer_std.components.norms import build_norm
from transformer_std.components.reuse import times
from transformer_std.components.routers import Choice, sigmoid_top_k, softmax_top_k, sparsemixer
from transformer_std.hook_points import HookPoint, Host, Missing, laid_out_as
from transformer_std.layouts import (
    ExpertIndices,
    ExpertOutputs,
    ExpertWeights,
    Residual,
    RouterLogits,
    SharedGate,
    SlotNeurons,
)
from transformer_std.modules import Direct, Linear, ZeroedLinear
from transformer_std.weights import own_weight


class Experts(Direct):
    """The experts' matrices, stacked: gate over up [num_experts 2*intermediate hidden], and down."""

    def __init__(self, cfg: config.Mixture, hidden_size: int):
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        self.gate_up = nn.Parameter(torch.empty(cfg.num_experts, 2 * cfg.intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(cfg.num_experts, hidden_size, cfg.intermediate_size))

    def extra_repr(self) -> str:
        return f"gate_up={list(self.gate_up.shape)}, down={list(self.down.shape)}"

    def forward(
        self, x: Residual, weights: ExpertWeights, indices: ExpertIndices, meet: Callable[..., Tensor]
    ) -> ExpertOutputs:
        """Every slot's output times its weight, in slot order. `meet` shows the values on the way, rows by expert."""
        expert, order = torch.sort(indices.flatten())
        groups = group(expert, len(self.down))
        # No rows outlive their use: over a few hundred tokens, memory fresh from the system costs more than arithmetic.
        both = by_expert(take(x.flatten(0, 1), order // indices.shape[-1]), self.gate_up, groups)
        neurons = self.neurons(both, functools.partial(meet, order=order))
        del both
        out = by_expert(neurons, self.down, groups)
        del neurons
        out = times(out, weights.flatten()[order, None])
        return take(out, unsorted(order)).view(*indices.shape, -1)

    def neurons(
        self, both: Float[Tensor, "rows gate_and_up"], meet: Callable[..., Tensor]
    ) -> Float[Tensor, "rows intermediate_size"]:
        size = self.down.shape[-1]
        gate, up = meet("mlp_preactivation", both.narrow(-1, 0, size)), meet("mlp_up", both.narrow(-1, size, size))
        return meet("mlp_neurons", meet("mlp_activation", self.activation(gate)) * up)


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
    shared_expert_gate = HookPoint(SharedGate, "The shared expert's gate, before its sigmoid")
    shared_expert_output = HookPoint(Residual, "What the mixture adds of the shared expert, after any gate")
    mlp_unnormed_output = HookPoint(Residual, "The mixture's output, entering the post-norm")
    mlp_output = HookPoint(Residual, "What the mixture adds to the residual stream")

    def __init__(self, cfg: config.Mixture, hidden_size: int, post_norm: config.Norm | None = None):
        super().__init__()
        self.cfg, scoring = cfg, cfg.router.scoring
        # Beside a selection bias a router starts from ties, which the bias breaks.
        self.router = (ZeroedLinear if scoring == "sigmoid" else Linear)(hidden_size, cfg.num_experts, bias=False)
        self.expert_bias = (
            nn.Parameter(torch.zeros(cfg.num_experts), requires_grad=False) if scoring == "sigmoid" else None
        )
        self.experts = Experts(cfg, hidden_size)
        self.shared_experts = shared_experts(cfg.shared, hidden_size)
        self.shared_gate = Linear(hidden_size, 1, bias=False) if cfg.shared_gate else None
        self.post_norm = build_norm(post_norm, hidden_size) if post_norm else None
        if scoring == "sparsemixer":
            self.without("sparsemixer scores each slot on its own: read router_logits", "router_scores")
        if not cfg.shared:
            self.without("this mixture has no shared expert", "shared_expert_output", "shared_expert_gate")
        elif not cfg.shared_gate:
            self.without("this mixture's shared expert has no gate", "shared_expert_gate")
        if not post_norm:
            self.without("no norm follows this mixture: read mlp_output", "mlp_unnormed_output")

    def forward(self, x: Residual) -> Residual:
        x = self.jittered(x)
        shared = self.shared_experts(x) if self.cfg.shared and self.cfg.shared_first else None
        weights, indices = self.select(self.router_logits(self.router(x)))
        if self.cfg.shared and not self.cfg.shared_first:
            shared = self.shared_experts(x)
        indices = self._checked(self.expert_indices(indices))
        weights = self.expert_weights(weights)
        meet = functools.partial(self._meet, indices.shape)
        slots = self.expert_outputs(self.experts(x, weights, indices, meet))
        out = self.routed_output(slots.sum(2).to(x.dtype))
        if shared is not None:
            out = out + self.shared(x, shared)
        if self.post_norm is not None:
            out = self.post_norm(self.mlp_unnormed_output(out))
        return self.mlp_output(out)

    def select(self, logits: RouterLogits) -> Choice:
        router = self.cfg.router
        if isinstance(router, config.SparseMixer):
            return sparsemixer(logits, router.jitter, self.training)
        if isinstance(router, config.SoftmaxTopK):
            scores = self.router_scores(logits.softmax(-1, dtype=torch.float32))
            weights, indices = softmax_top_k(scores, self.cfg.top_k, router.normalized)
            return weights.to(logits.dtype), indices
        scores = self.router_scores(logits.float().sigmoid())
        return sigmoid_top_k(scores, self.expert_bias, self.cfg.top_k, router.scale)

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

    def _meet(self, size: torch.Size, name: str, rows: Rows, order: Int[Tensor, " rows"]) -> Rows:
        """Passes rows sorted by expert through the hook point `name`, which has them in slot order."""
        point: HookPoint = self.__dict__[name]
        if not point.watched:
            return rows
        if point.can_wait:
            rows_now = rows.detach()
            point.later(lambda: take(rows_now, unsorted(order)).view(*size, -1))
            return rows
        slots = take(rows, unsorted(order)).view(*size, -1)
        edited = point(slots)
        if edited is slots and not point.watches_gradient:
            return rows
        return laid_out_as(edited.flatten(0, 2)[order], rows)

    def _checked(self, indices: ExpertIndices) -> ExpertIndices:
        if self.expert_indices.writes and not bool(((indices >= 0) & (indices < self.cfg.num_experts)).all()):
            last = self.cfg.num_experts - 1
            raise ValueError(f"{self.expert_indices.name} was written with experts outside 0 to {last}")
        return indices

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name == "expert_bias" else dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = None if self.expert_bias is None else self.expert_bias.data
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:  # model.half() and the like leave it as it is
            self.expert_bias.data = bias.to(self.expert_bias.device)
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
        return rearrange(
            self._stacked("gate_up")[:, : self.intermediate_size], "expert neuron hidden -> expert hidden neuron"
        )

    @property
    def W_in(self) -> Float[Tensor, "num_experts hidden_size intermediate_size"]:
        return rearrange(
            self._stacked("gate_up")[:, self.intermediate_size :], "expert neuron hidden -> expert hidden neuron"
        )

    @property
    def W_out(self) -> Float[Tensor, "num_experts intermediate_size hidden_size"]:
        return rearrange(self._stacked("down"), "expert hidden neuron -> expert neuron hidden")

    def _stacked(self, name: str) -> Float[Tensor, "num_experts out width"]:
        return own_weight(self, "experts", name, Experts)
