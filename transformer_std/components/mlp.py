"""MLPs: plain, gated, and gated with gate and up in one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from transformer_std import config
from transformer_std.components.norms import norm_or_none, normed
from transformer_std.components.reuse import free
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.hosts import Host
from transformer_std.layouts import Neurons, PerToken, Residual
from transformer_std.modules import Linear
from transformer_std.weights import linear_map

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def gelu_new(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """GPT-2's approximation by a tanh, in the order of its release: `F.gelu(approximate="tanh")` rounds differently."""
    half, cube = 0.5 * x, torch.pow(x, 3.0)
    if not free(cube, half):
        return half * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * cube)))
    return half.mul_(cube.mul_(0.044715).add_(x).mul_(SQRT_2_OVER_PI).tanh_().add_(1.0))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


class Mlp(Host):
    """An MLP that reads the stream; the subclasses say what its neurons are."""

    host = "mlp"
    lacks = "a dense MLP: it has no router and no experts"

    mlp_preactivation = HookPoint(Neurons, "The activation function's input")
    mlp_up = HookPoint(Neurons, "The up half of a gated MLP")
    mlp_activation = HookPoint(Neurons, "The activation function's output")
    mlp_neurons = HookPoint(Neurons, "What the down projection receives")
    mlp_unnormed_output = HookPoint(Residual, "The down projection's output, entering the post-norm")
    mlp_post_norm_scale = HookPoint(PerToken, "What the norm after the MLP divides by", derived=True)
    mlp_output = HookPoint(Residual, "What the MLP adds to the residual stream")

    def __init__(self, cfg: config.Mlp, hidden_size: int, post_norm: config.Norm | None = None):
        super().__init__()
        self.cfg, self.hidden_size = cfg, hidden_size
        self.activation = ACTIVATIONS[cfg.activation]
        self.down = Linear(cfg.intermediate_size, hidden_size, bias=cfg.bias)
        self.post_norm = norm_or_none(post_norm, hidden_size)
        if not post_norm:
            self.without("no norm follows this MLP: read mlp_output", "mlp_unnormed_output", "mlp_post_norm_scale")

    @property
    def intermediate_size(self) -> int:
        return self.cfg.intermediate_size

    def neurons(self, x: Residual) -> Neurons:
        raise NotImplementedError

    def forward(self, x: Residual) -> Residual:
        out = self.down(self.mlp_neurons(self.neurons(x)))
        if self.post_norm is not None:
            out = normed(self.post_norm, self.mlp_unnormed_output(out), self.mlp_post_norm_scale)
        return self.mlp_output(out)

    def gated(self, gate: Neurons, up: Neurons) -> Neurons:
        return self.mlp_activation(self.activation(self.mlp_preactivation(gate))) * self.mlp_up(up)

    @property
    def W_out(self) -> Float[Tensor, "intermediate_size hidden_size"]:
        return rearrange(linear_map(self, "down", self.intermediate_size)[0], "hidden neuron -> neuron hidden")

    @property
    def b_out(self) -> Float[Tensor, " hidden_size"]:
        return linear_map(self, "down", self.intermediate_size)[1]


class PlainMlp(Mlp):
    """down(act(up(x)))"""

    def __init__(self, cfg: config.Mlp, hidden_size: int, post_norm: config.Norm | None = None):
        super().__init__(cfg, hidden_size, post_norm)
        self.up = Linear(hidden_size, cfg.intermediate_size, bias=cfg.bias)
        self.without("this MLP is not gated: it has one half, read mlp_preactivation", "mlp_up")

    def neurons(self, x: Residual) -> Neurons:
        return self.mlp_activation(self.activation(self.mlp_preactivation(self.up(x))))

    @property
    def W_in(self) -> Float[Tensor, "hidden_size intermediate_size"]:
        return rearrange(linear_map(self, "up", self.hidden_size)[0], "neuron hidden -> hidden neuron")

    @property
    def b_in(self) -> Float[Tensor, " intermediate_size"]:
        return linear_map(self, "up", self.hidden_size)[1]


class GatedMlp(Mlp):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, cfg: config.Mlp, hidden_size: int, post_norm: config.Norm | None = None):
        super().__init__(cfg, hidden_size, post_norm)
        self.gate = Linear(hidden_size, cfg.intermediate_size, bias=cfg.bias)
        self.up = Linear(hidden_size, cfg.intermediate_size, bias=cfg.bias)

    def neurons(self, x: Residual) -> Neurons:
        return self.gated(self.gate(x), self.up(x))

    @property
    def W_gate(self) -> Float[Tensor, "hidden_size intermediate_size"]:
        return rearrange(linear_map(self, "gate", self.hidden_size)[0], "neuron hidden -> hidden neuron")

    @property
    def W_in(self) -> Float[Tensor, "hidden_size intermediate_size"]:
        return rearrange(linear_map(self, "up", self.hidden_size)[0], "neuron hidden -> hidden neuron")

    @property
    def b_gate(self) -> Float[Tensor, " intermediate_size"]:
        return linear_map(self, "gate", self.hidden_size)[1]

    @property
    def b_in(self) -> Float[Tensor, " intermediate_size"]:
        return linear_map(self, "up", self.hidden_size)[1]


class SharedExpert(GatedMlp):
    """The part of a mixture that every token runs through: an MLP host of its own."""

    host = "shared_experts"

    mlp_ungated_output = HookPoint(Residual, "The shared expert's own output, before any gate")

    def __init__(self, cfg: config.Mlp, hidden_size: int):
        super().__init__(cfg, hidden_size)
        self.without(
            "the mixture adds the sum: read the mixture's mlp_output, or mlp_ungated_output here", "mlp_output"
        )

    def forward(self, x: Residual) -> Residual:
        return self.mlp_ungated_output(self.down(self.mlp_neurons(self.neurons(x))))


class FusedMlp(Mlp):
    """A gated MLP with one matrix for both halves: the gate's rows first, then the up's."""

    def __init__(self, cfg: config.Mlp, hidden_size: int, post_norm: config.Norm | None = None):
        super().__init__(cfg, hidden_size, post_norm)
        self.gate_up = Linear(hidden_size, 2 * cfg.intermediate_size, bias=cfg.bias)

    def neurons(self, x: Residual) -> Neurons:
        both, size = self.gate_up(x), self.cfg.intermediate_size
        return self.gated(both.narrow(-1, 0, size), both.narrow(-1, size, size))

    @property
    def W_gate(self) -> Float[Tensor, "hidden_size intermediate_size"]:
        both, _ = linear_map(self, "gate_up", self.hidden_size)
        return rearrange(both[: self.cfg.intermediate_size], "neuron hidden -> hidden neuron")

    @property
    def W_in(self) -> Float[Tensor, "hidden_size intermediate_size"]:
        both, _ = linear_map(self, "gate_up", self.hidden_size)
        return rearrange(both[self.cfg.intermediate_size :], "neuron hidden -> hidden neuron")

    @property
    def b_gate(self) -> Float[Tensor, " intermediate_size"]:
        return linear_map(self, "gate_up", self.hidden_size)[1][: self.cfg.intermediate_size]

    @property
    def b_in(self) -> Float[Tensor, " intermediate_size"]:
        return linear_map(self, "gate_up", self.hidden_size)[1][self.cfg.intermediate_size :]


MLPS: dict[str, type[Mlp]] = {"plain": PlainMlp, "gated": GatedMlp, "fused": FusedMlp}
