"""Norms over the last axis."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std import config
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.modules import LayerNorm, Norm
from transformer_std.weights import computes_as, refusal


class RMSNorm(Norm):
    """x / rms(x) * weight in float32 (https://arxiv.org/abs/1910.07467), cast back before or after the weight."""

    def __init__(self, size: int, cfg: config.Norm):
        super().__init__()
        self.cfg, self.eps, self.cast_before_weight = cfg, cfg.eps, cfg.cast == "before_weight"
        self.weight = nn.Parameter(torch.ones(size))

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.cfg.wide_in_half and dtype == torch.float16 else dtype

    def fill_fresh(self, name: str, std: float, generator: torch.Generator | None) -> None:
        self.weight.fill_(0.0 if self.cfg.around_one else 1.0)

    def gain(self, weight: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        return 1.0 + weight.float() if self.cfg.around_one else weight

    def forward(self, x: Float[Tensor, "*axes size"]) -> Float[Tensor, "*axes size"]:
        weight, dtype = self.gain(self.weight), x.dtype
        # The fused kernel has these very bits forward, but others backward, and in float64 it is finer.
        if torch.is_grad_enabled() or dtype == torch.float64:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return weight * normed.to(dtype) if self.cast_before_weight else (weight * normed).to(dtype)
        if self.cast_before_weight and dtype != torch.float32:
            return weight * torch.rms_norm(x.float(), weight.shape, None, self.eps).to(dtype)
        if dtype != weight.dtype:
            x, weight = x.float(), weight.float()
        return torch.rms_norm(x, weight.shape, weight, self.eps).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


AnyNorm = RMSNorm | LayerNorm


def build_norm(norm: config.Norm, size: int) -> AnyNorm:
    return LayerNorm(size, eps=norm.eps) if norm.kind == "layer" else RMSNorm(size, norm)


def norm_or_none(norm: config.Norm | None, size: int) -> AnyNorm | None:
    return None if norm is None else build_norm(norm, size)


def normed(norm: Any, x: Float[Tensor, "*axes size"], point: HookPoint) -> Float[Tensor, "*axes size"]:
    """`norm(x)`, whose scale shows at `point`. A change of the scale goes in as the change it makes in float32, so that
    to read it leaves every bit; a watched gradient flows through it."""
    out = norm(x)
    if not point.watched:
        return out
    if not computes_as(norm, RMSNorm, LayerNorm):
        kind = type(norm).__name__
        unread = f"{point.name}: the norm is {kind}, which does not say what it divides by: merge an adapter first"
        point.beside(refusal(unread))
        return out
    shown = point.beside(norm.scale, x, wait=False)
    if shown is None:
        return out
    plain, edited = shown
    return out.detach() + (norm.divided(x, edited) - norm.divided(x, plain).detach())
