"""Many MLPs as one: every slot's row through its own expert."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std import config
from transformer_std.components.grouped import Rows, by_expert, group, take, unsorted
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.components.reuse import times
from transformer_std.hooks.hook_point import HookPoint, laid_out_as
from transformer_std.layouts import ExpertIndices, ExpertOutputs, ExpertWeights, Residual
from transformer_std.modules import Direct


class Route:
    """Which rows go to which expert in one call: a token's row once a slot, rows sorted by expert."""

    def __init__(self, indices: ExpertIndices, num_experts: int):
        expert, self.order = torch.sort(indices.flatten())
        self.groups, self.size = group(expert, num_experts), indices.shape

    def tokens(self, x: Residual) -> Rows:
        """The rows of the slots' tokens."""
        return take(x.flatten(0, 1), self.order // self.size[-1])

    def slots(self, rows: Rows) -> Float[Tensor, "batch seq top_k width"]:
        """The rows back in the slots' order."""
        return take(rows, unsorted(self.order)).view(*self.size, -1)

    def show(self, point: HookPoint, rows: Rows) -> Rows:
        """Passes rows through a hook point, which has them in the slots' order."""
        shown = point.beside(self.slots, rows, copy=False)
        return rows if shown is None else laid_out_as(shown[1].flatten(0, 2)[self.order], rows)


class Experts(Direct):
    """The experts' matrices, stacked: gate over up [num_experts 2*intermediate hidden], and down."""

    def __init__(self, cfg: config.Mixture, hidden_size: int):
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        self.gate_up = nn.Parameter(torch.empty(cfg.num_experts, 2 * cfg.intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(cfg.num_experts, hidden_size, cfg.intermediate_size))

    def extra_repr(self) -> str:
        return f"gate_up={list(self.gate_up.shape)}, down={list(self.down.shape)}"

    def forward(self, x: Residual, weights: ExpertWeights, indices: ExpertIndices, host: Any) -> ExpertOutputs:
        """Every slot's output times its weight, in slot order. `host` has the hook points of the values on the way."""
        route = Route(indices, len(self.down))
        out = by_expert(self.neurons(x, route, host), self.down, route.groups)
        return route.slots(times(out, weights.flatten()[route.order, None]))

    def neurons(self, x: Residual, route: Route, host: Any) -> Float[Tensor, "rows intermediate_size"]:
        # No rows outlive their use: over a few hundred tokens, memory fresh from the system costs more than arithmetic.
        both, size = by_expert(route.tokens(x), self.gate_up, route.groups), self.down.shape[-1]
        gate = route.show(host.mlp_preactivation, both.narrow(-1, 0, size))
        up = route.show(host.mlp_up, both.narrow(-1, size, size))
        return route.show(host.mlp_neurons, route.show(host.mlp_activation, self.activation(gate)) * up)
