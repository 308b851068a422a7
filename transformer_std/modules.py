"""Modules whose call is no more than their forward. A small model's products take less time than `nn.Module`'s call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as globals_of

# On every module there is.
HOOKS = globals_of._global_forward_hooks
PRE_HOOKS = globals_of._global_forward_pre_hooks
BACKWARD_HOOKS = globals_of._global_backward_hooks
BACKWARD_PRE_HOOKS = globals_of._global_backward_pre_hooks


class Direct(nn.Module):
    """A module that is called straight through, unless anything of torch's is attached to it or its forward is
    replaced, as accelerate does: then it is called as ever."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or "_compiled_call_impl" in own
            or HOOKS
            or PRE_HOOKS
            or BACKWARD_HOOKS
            or BACKWARD_PRE_HOOKS
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if name in (held := own.get("_modules", ())) or name in (held := own.get("_parameters", ())):
            return held[name]
        found = getattr(type(self), name, None)
        if isinstance(found, property):  # one that raised an AttributeError: told again, as torch hides its cause
            return found.__get__(self)
        return super().__getattr__(name)

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the parameter `name` has in a model loaded in `dtype`."""
        return dtype

    def fill_fresh(self, name: str, std: float, generator: torch.Generator | None) -> None:
        """Gives the parameter `name` what a fresh model has there: a bias zeros, all else noise of `std`."""
        parameter = self.get_parameter(name)
        parameter.zero_() if name.endswith("bias") else parameter.normal_(0.0, std, generator=generator)


class Linear(Direct, nn.Linear):
    """Its parameters are as they were allocated: the model draws all of its own, see `init_weights`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self._parameters
        if "weight" in own and "bias" in own:  # they are not where a parametrization computes them
            return F.linear(x, own["weight"], own["bias"])
        return F.linear(x, self.weight, self.bias)


class DrawnLinear(Linear):
    """A linear map whose bias starts as noise, as its matrix does."""

    def fill_fresh(self, name: str, std: float, generator: torch.Generator | None) -> None:
        self.get_parameter(name).normal_(0.0, std, generator=generator)


class WideLinear(Linear):
    """A matrix that is float32, and multiplies in it, whatever dtype the model has."""

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.weight.data
        super()._apply(fn, recurse)
        if self.weight.dtype != before.dtype:  # model.half() and the like
            self.weight.data = before.to(self.weight.device)
        return self


class ZeroedLinear(Linear):
    """A matrix that starts from zeros."""

    def fill_fresh(self, name: str, std: float, generator: torch.Generator | None) -> None:
        super().fill_fresh(name, 0.0, generator)


class Norm(Direct):
    """A norm that starts as one without weight and bias.

    Seen as arithmetic it is `divided(x, scale(x))`: what it centres, over its scale, times its gain, and its bias.
    """

    eps: float
    weight: nn.Parameter

    def fill_fresh(self, name: str, std: float, generator: torch.Generator | None) -> None:
        self.get_parameter(name).fill_(0.0 if name == "bias" else 1.0)

    def centred(self, x: Tensor) -> Tensor:
        """What is divided by the scale."""
        return x

    def scale(self, x: Tensor) -> Tensor:
        """What the norm divides `x` by, [... 1], in float32 or wider: the root of the mean square and eps."""
        return (self.centred(widened(x)).pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def gain(self, weight: Tensor) -> Tensor:
        """What the normed input is multiplied by."""
        return weight

    def divided(self, x: Tensor, scale: Tensor) -> Tensor:
        """The norm of `x` with another `scale`."""
        out, bias = self.centred(widened(x)) / scale * widened(self.gain(self.weight)), getattr(self, "bias", None)
        return (out if bias is None else out + widened(bias)).to(x.dtype)

    def frozen(self, parts: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
        """The linear map that a norm of `weight` is on `whole`, without its bias, of parts that sum to it; in
        float32."""
        return self.centred(parts) / self.scale(whole) * self.gain(weight).to(parts)


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LayerNorm(Norm, nn.LayerNorm):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # to fill what has no values imports a second's worth of torch
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Embedding(Direct, nn.Embedding):
    """Its rows are as they were allocated, as a `Linear`'s."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        rows = torch.empty(num_embeddings, embedding_dim)
        super().__init__(num_embeddings, embedding_dim, padding_idx, _weight=rows)

    def fill_fresh(self, name: str, std: float, generator: torch.Generator | None) -> None:
        super().fill_fresh(name, std, generator)
        if self.padding_idx is not None:
            self.weight[self.padding_idx].zero_()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
