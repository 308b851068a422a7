"""Norms over the last axis."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std import config
from transformer_std.modules import LayerNorm, Norm


class RMSNorm(Norm):
    """x / rms(x) * weight in float32 (https://arxiv.org/abs/1910.07467), cast back before or after the weight."""

    def __init__(self, size: int, cfg: config.Norm):
        super().__init__()
        self.cfg, self.eps, self.cast_before_weight = cfg, cfg.eps, cfg.cast == "before_weight"
        self.weight = nn.Parameter(torch.ones(size))

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.cfg.wide_in_half and dtype == torch.float16 else dtype

    def forward(self, x: Float[Tensor, "*axes size"]) -> Float[Tensor, "*axes size"]:
        weight = self.weight
        if torch.is_grad_enabled():  # the fused kernel has these very bits forward, but others backward
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return weight * normed.to(x.dtype) if self.cast_before_weight else (weight * normed).to(x.dtype)
        if self.cast_before_weight and x.dtype != torch.float32:
            return weight * torch.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype)
        return torch.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(norm: config.Norm, size: int) -> RMSNorm | LayerNorm:
    if norm.kind == "layer":
        return LayerNorm(size, eps=norm.eps)
    return RMSNorm(size, norm)
