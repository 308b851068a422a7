"""Many MLPs as one: every slot's row through its own expert."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std import config
from transformer_std.components.grouped import Rows, by_expert, group, take, unsorted
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.components.reuse import plus, times
from transformer_std.hooks.hook_point import HookPoint, laid_out_as
from transformer_std.layouts import ExpertIndices, ExpertOutputs, ExpertWeights, Residual
from transformer_std.modules import Direct


class Route:
    """Which rows go to which expert in one call: a token's row once a slot, rows sorted by expert."""

    def __init__(self, indices: ExpertIndices, num_experts: int):
        self.expert, self.order = torch.sort(indices.flatten())
        self.groups, self.size = group(self.expert, num_experts), indices.shape

    def tokens(self, x: Residual) -> Rows:
        """The rows of the slots' tokens."""
        return take(x.flatten(0, 1), self.order // self.size[-1])

    def through(self, weights: Tensor, bias: Tensor | None, rows: Rows) -> Float[Tensor, "rows out"]:
        """Each row through its own expert's matrix."""
        out = by_expert(rows, weights, self.groups)
        return out if bias is None else plus(out, bias[self.expert])

    def slots(self, rows: Rows) -> Float[Tensor, "batch seq top_k width"]:
        """The rows back in the slots' order."""
        return take(rows, unsorted(self.order)).view(*self.size, -1)

    def show(self, point: HookPoint, rows: Rows) -> Rows:
        """Passes rows through a hook point, which has them in the slots' order."""
        shown = point.beside(self.slots, rows, copy=False)
        return rows if shown is None else laid_out_as(shown[1].flatten(0, 2)[self.order], rows)


class Experts(Direct):
    """The experts' matrices, stacked: gate over up [num_experts 2*intermediate hidden], and down; biases where the
    mixture has them."""

    def __init__(self, cfg: config.Mixture, hidden_size: int):
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        self.gate_up = nn.Parameter(torch.empty(cfg.num_experts, 2 * cfg.intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(cfg.num_experts, hidden_size, cfg.intermediate_size))
        for name, width in (("gate_up_bias", 2 * cfg.intermediate_size), ("down_bias", hidden_size)):
            bias = nn.Parameter(torch.empty(cfg.num_experts, width)) if cfg.bias else None
            self.register_parameter(name, bias)

    def extra_repr(self) -> str:
        return f"gate_up={list(self.gate_up.shape)}, down={list(self.down.shape)}"

    def forward(self, x: Residual, weights: ExpertWeights, indices: ExpertIndices, host: Any) -> ExpertOutputs:
        """Every slot's output times its weight, in slot order. `host` has the hook points of the values on the way."""
        route = Route(indices, len(self.down))
        out = route.through(self.down, self.down_bias, self.neurons(x, route, host))
        return route.slots(times(out, weights.flatten()[route.order, None]))

    def neurons(self, x: Residual, route: Route, host: Any) -> Float[Tensor, "rows intermediate_size"]:
        # No rows outlive their use: over a few hundred tokens, memory fresh from the system costs more than arithmetic.
        gate, up = self.halves(route.through(self.gate_up, self.gate_up_bias, route.tokens(x)))
        gate, up = route.show(host.mlp_preactivation, gate), route.show(host.mlp_up, up)
        return route.show(host.mlp_neurons, self.gated(route.show(host.mlp_activation, self.activated(gate)), up))

    def halves(
        self, both: Float[Tensor, "*axes both"]
    ) -> tuple[Float[Tensor, "*axes half"], Float[Tensor, "*axes half"]]:
        """The gate's and the up's, along the last axis."""
        size = both.shape[-1] // 2
        return both.narrow(-1, 0, size), both.narrow(-1, size, size)

    def activated(self, gate: Rows) -> Rows:
        return self.activation(gate)

    def gated(self, activated: Rows, up: Rows) -> Rows:
        return activated * up


class ClampedExperts(Experts):
    """Experts whose gate and up are clamped and lie interleaved (https://arxiv.org/abs/2508.10925)."""

    def __init__(self, cfg: config.Mixture, hidden_size: int):
        super().__init__(cfg, hidden_size)
        assert cfg.clamp is not None
        self.alpha, self.limit = cfg.clamp.alpha, cfg.clamp.limit

    def halves(
        self, both: Float[Tensor, "*axes both"]
    ) -> tuple[Float[Tensor, "*axes half"], Float[Tensor, "*axes half"]]:
        return both[..., ::2], both[..., 1::2]

    def activated(self, gate: Rows) -> Rows:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha)

    def gated(self, activated: Rows, up: Rows) -> Rows:
        return (up.clamp(-self.limit, self.limit) + 1) * activated
