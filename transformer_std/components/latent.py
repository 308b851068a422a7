"""Attention whose keys and values come of a latent (https://arxiv.org/abs/2405.04434, section 2.1)."""

from __future__ import annotations

from typing import NoReturn

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from transformer_std import config
from transformer_std.components.attention import SoftmaxAttention
from transformer_std.components.kernels import Mask
from transformer_std.components.norms import build_norm
from transformer_std.components.projections import changed_projection, of_heads, split_heads
from transformer_std.components.rotary import Angles, turn
from transformer_std.components.states import LayerKV
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.layouts import Latent, Queries, Residual, SharedKeys
from transformer_std.modules import Direct, Linear
from transformer_std.weights import UnreadableWeight, linear_map, place, refusal


def beside(plain: Float[Tensor, "*axes plain"], shared: Float[Tensor, "*axes shared"]) -> Float[Tensor, "*axes both"]:
    """Copied, as in transformers: the gradient of what all heads share is a sum, which a concatenation would hand
    another layout."""
    size = plain.shape[-1]
    both = plain.new_empty(*plain.shape[:-1], size + shared.shape[-1])
    both[..., :size].copy_(plain)
    both[..., size:].copy_(shared)
    return both


class LatentQueries(Direct):
    """up(norm(down(x)))"""

    def __init__(self, cfg: config.LatentAttention, hidden_size: int, size: int):
        super().__init__()
        self.down = Linear(hidden_size, size, bias=cfg.bias)
        self.norm = build_norm(cfg.norm, size)
        self.up = Linear(size, cfg.num_heads * cfg.qk_head_dim, bias=False)

    def forward(self, x: Residual) -> Float[Tensor, "batch seq width"]:
        return self.up(self.norm(self.down(x)))


class LatentAttention(SoftmaxAttention):
    """A head's keys are a projection of the latent beside the turned part that all heads share; its values are another
    projection of the latent. A cache keeps the latent and the shared part."""

    cfg: config.LatentAttention

    attention_latent = HookPoint(Latent, "The latent that keys and values are projections of, normed")
    attention_shared_keys = HookPoint(SharedKeys, "The part of the keys that all heads share, before the rotary")

    def __init__(
        self, cfg: config.LatentAttention, hidden_size: int, post_norm: config.Norm | None, eager: bool = False
    ):
        super().__init__(cfg, hidden_size, eager)
        if cfg.query_size is None:
            self.q: Linear | LatentQueries = Linear(hidden_size, cfg.num_heads * cfg.qk_head_dim, bias=False)
        else:
            self.q = LatentQueries(cfg, hidden_size, cfg.query_size)
        self.kv_down = Linear(hidden_size, cfg.latent_size + cfg.rotary.dims, bias=cfg.bias)
        self.kv_norm = build_norm(cfg.norm, cfg.latent_size)
        self.kv_up = Linear(cfg.latent_size, cfg.num_heads * (cfg.plain_dims + cfg.head_dim), bias=False)
        self.build_output(post_norm)
        self.without(
            "only the part that all heads share turns: read attention_shared_keys", "attention_keys_before_rotary"
        )
        self.without(
            "keys and values are projections of the latent: read attention_latent",
            "attention_key_inputs",
            "attention_value_inputs",
        )
        if cfg.query_size is not None:
            self.without("the queries are of a latent of their own: read attention_input", "attention_query_inputs")

    def forward(self, x: Residual, angles: Angles, mask: Mask, cache: LayerKV | None = None) -> Residual:
        cfg, dims = self.cfg, self.cfg.rotary.dims
        q = self.attention_queries_before_rotary(self.queries(x))
        turned = turn(q.narrow(-1, cfg.plain_dims, dims), angles, cfg.rotary)
        q = torch.cat((q.narrow(-1, 0, cfg.plain_dims), turned), dim=-1)
        both = self.kv_down(x)
        latent = self.attention_latent(self.kv_norm(both.narrow(-1, 0, cfg.latent_size)))
        shared = self.attention_shared_keys(both.narrow(-1, cfg.latent_size, dims))
        latent, shared = latent[:, None], turn(shared[:, None], angles, cfg.rotary)
        if cache is not None:
            latent, shared = cache.update(latent, shared)
        kv = split_heads(self.kv_up(latent[:, 0]), cfg.plain_dims + cfg.head_dim)
        k = beside(kv.narrow(-1, 0, cfg.plain_dims), shared.expand(-1, cfg.num_heads, -1, -1))
        return self.leave(self.attend(q, k, kv.narrow(-1, cfg.plain_dims, cfg.head_dim), mask))

    def queries(self, x: Residual) -> Queries:
        q = split_heads(self.q(x), self.cfg.qk_head_dim)
        if not (self.has("attention_query_inputs") and self.attention_query_inputs.watched):
            return q
        try:
            part = linear_map(self, "q", self.hidden_size)
        except UnreadableWeight as error:
            self.attention_query_inputs.beside(refusal(str(error)))
            return q
        return changed_projection(q, self.attention_query_inputs, of_heads(part, self.cfg.qk_head_dim), x)

    @property
    def latent_size(self) -> int:
        return self.cfg.latent_size

    @property
    def rotary_dims(self) -> int:
        return self.cfg.rotary.dims

    def _refuse(self, name: str) -> NoReturn:
        raise UnreadableWeight(
            f"{place(self, name)} is two matrices with a norm between, so no one matrix of the stream: read W_UK and "
            "W_UV, which are of attention_latent"
        )

    @property
    def W_Q(self) -> Float[Tensor, "num_heads hidden_size qk_head_dim"]:
        """Where there is no latent of queries."""
        if isinstance(self.q, LatentQueries):
            self._refuse("q")
        weight, _ = linear_map(self, "q", self.hidden_size)
        return rearrange(weight, "(head dim) hidden -> head hidden dim", dim=self.cfg.qk_head_dim)

    @property
    def W_K(self) -> NoReturn:
        self._refuse("keys")

    @property
    def W_V(self) -> NoReturn:
        self._refuse("values")

    def _of_latent(self) -> Float[Tensor, "num_heads latent_size both"]:
        weight, _ = linear_map(self, "kv_up", self.cfg.latent_size)
        return rearrange(weight, "(head both) latent -> head latent both", head=self.cfg.num_heads)

    @property
    def W_UK(self) -> Float[Tensor, "num_heads latent_size plain_dims"]:
        """From the latent to the part of each head's keys that does not turn."""
        return self._of_latent()[..., : self.cfg.plain_dims]

    @property
    def W_UV(self) -> Float[Tensor, "num_heads latent_size head_dim"]:
        """From the latent to each head's values."""
        return self._of_latent()[..., self.cfg.plain_dims :]
