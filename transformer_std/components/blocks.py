"""A block of a model, and the two wirings of one that attends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from transformer_std import config
from transformer_std.components.attention import Attention
from transformer_std.components.kernels import Mask
from transformer_std.components.latent import LatentAttention
from transformer_std.components.mixture import Mixture
from transformer_std.components.mlp import MLPS, Mlp
from transformer_std.components.norms import AnyNorm, norm_or_none, normed
from transformer_std.components.rotary import Angles
from transformer_std.components.sharing import Need, Sees, Turns
from transformer_std.components.states import LayerKV, State
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.hosts import Host, Missing
from transformer_std.hooks.runs import of_its_run
from transformer_std.layouts import PerToken, Residual

Readers = dict[str, tuple[str | None, str]]


def build_mlp(cfg: config.Mlp | config.Mixture, hidden_size: int, post_norm: config.Norm | None) -> Mlp | Mixture:
    if isinstance(cfg, config.Mixture):
        return Mixture(cfg, hidden_size, post_norm)
    mlp = MLPS[cfg.kind](cfg, hidden_size, post_norm)
    mlp.shared_experts = Missing("shared_experts", "a dense MLP: it has no shared expert beside it")
    return mlp


def build_attention(
    cfg: config.Attention, hidden_size: int, post_norm: config.Norm | None, eager: bool
) -> Attention | LatentAttention:
    if isinstance(cfg, config.LatentAttention):
        return LatentAttention(cfg, hidden_size, post_norm, eager)
    return Attention(cfg, hidden_size, post_norm, eager)


class Block(Host):
    """A step of the residual stream. Its `forward` is called with the stream, then with what it `needs`, each in its
    turn, then with its state in a `KVCache` or None; decorate it with `of_its_run`."""

    host = "block"

    layer_input = HookPoint(Residual, "The residual stream entering the block")

    def needs(self) -> tuple[Need, ...]:
        """What it asks of a pass."""
        return ()

    def new_state(self, room: int) -> State | None:
        """What it keeps of the positions it reads, with room for so many; None: nothing."""
        return None


class AttentionBlock(Block):
    """Attention and MLP on a residual stream, each behind a norm of its own where the wiring has one."""

    # Which norm reads the stream for each sublayer, and which value the stream is there.
    readers: ClassVar[Readers] = {"attention": ("attention_norm", "layer_input"), "mlp": ("mlp_norm", "layer_mid")}

    attention_norm: AnyNorm
    mlp_norm: AnyNorm

    def __init__(self, cfg: config.Layer, hidden_size: int, eager: bool = False):
        super().__init__()
        if (norm := self.readers["attention"][0]) is not None:
            self.register_module(norm, norm_or_none(cfg.norm, hidden_size))
        self.self_attn = build_attention(cfg.attention, hidden_size, cfg.post_norm, eager)
        self.mlp = build_mlp(cfg.mlp, hidden_size, cfg.post_norm)

    def needs(self) -> tuple[Need, ...]:
        return Turns(self.self_attn.cfg.rotary), Sees(self.self_attn.cfg.window)

    def new_state(self, room: int) -> LayerKV:
        return LayerKV(self.self_attn.cfg.window, room)


class SequentialBlock(AttentionBlock):
    """h = x + attention(norm(x));  out = h + mlp(norm(h)), where a sandwich's sublayers end in a norm of their own."""

    attention_norm_scale = HookPoint(PerToken, "What the norm before the attention divides by", derived=True)
    attention_norm_output = HookPoint(Residual, "The normed stream entering the attention")
    attention_input = HookPoint(Residual, "What the attention is called with")
    layer_mid = HookPoint(Residual, "The residual stream after the attention add")
    mlp_norm_scale = HookPoint(PerToken, "What the norm before the MLP divides by", derived=True)
    mlp_norm_output = HookPoint(Residual, "The normed stream entering the MLP")
    mlp_input = HookPoint(Residual, "What the MLP is called with")
    layer_output = HookPoint(Residual, "The residual stream leaving the block")

    def __init__(self, cfg: config.Layer, hidden_size: int, eager: bool = False):
        super().__init__(cfg, hidden_size, eager)
        self.register_module("mlp_norm", norm_or_none(cfg.norm, hidden_size))

    @of_its_run
    def forward(self, x: Residual, angles: Angles | None, mask: Mask, state: LayerKV | None = None) -> Residual:
        x = self.layer_input(x)
        h = self.attention_norm_output(normed(self.attention_norm, x, self.attention_norm_scale))
        x = self.layer_mid(x + self.self_attn(self.attention_input(h), angles, mask, state))
        h = self.mlp_norm_output(normed(self.mlp_norm, x, self.mlp_norm_scale))
        return self.layer_output(x + self.mlp(self.mlp_input(h)))


class PostNormedBlock(AttentionBlock):
    """h = x + norm(attention(x));  out = h + norm(mlp(h)): the sublayers read the stream itself."""

    lacks = "the sublayers read the stream itself: read attention_input or mlp_input"

    attention_input = HookPoint(Residual, "What the attention is called with")
    layer_mid = HookPoint(Residual, "The residual stream after the attention add")
    mlp_input = HookPoint(Residual, "What the MLP is called with")
    layer_output = HookPoint(Residual, "The residual stream leaving the block")

    readers: ClassVar[Readers] = {"attention": (None, "layer_input"), "mlp": (None, "layer_mid")}

    @of_its_run
    def forward(self, x: Residual, angles: Angles | None, mask: Mask, state: LayerKV | None = None) -> Residual:
        x = self.layer_input(x)
        x = self.layer_mid(x + self.self_attn(self.attention_input(x), angles, mask, state))
        return self.layer_output(x + self.mlp(self.mlp_input(x)))


class ParallelBlock(AttentionBlock):
    """h = norm(x);  out = attention(h) + mlp(h) + x"""

    lacks = "the block is parallel: it adds both sublayers at once, and there is no stream between them"

    attention_norm_scale = HookPoint(PerToken, "What the norm before the attention divides by", derived=True)
    attention_norm_output = HookPoint(Residual, "The normed stream entering the attention")
    attention_input = HookPoint(Residual, "What the attention is called with")
    mlp_norm_output = HookPoint(Residual, "The one norm's output, which both sublayers read")
    mlp_input = HookPoint(Residual, "What the MLP is called with")
    layer_output = HookPoint(Residual, "The residual stream leaving the block")

    readers: ClassVar[Readers] = {
        "attention": ("attention_norm", "layer_input"),
        "mlp": ("attention_norm", "layer_input"),
    }

    def __init__(self, cfg: config.Layer, hidden_size: int, eager: bool = False):
        super().__init__(cfg, hidden_size, eager)
        self.without("one norm is before both sublayers: read attention_norm_scale", "mlp_norm_scale")

    @of_its_run
    def forward(self, x: Residual, angles: Angles | None, mask: Mask, state: LayerKV | None = None) -> Residual:
        x = self.layer_input(x)
        h = self.attention_norm_output(normed(self.attention_norm, x, self.attention_norm_scale))
        h = self.mlp_norm_output(h)
        attention = self.self_attn(self.attention_input(h), angles, mask, state)
        return self.layer_output(attention + self.mlp(self.mlp_input(h)) + x)


class TwoNormParallelBlock(AttentionBlock):
    """out = attention(norm(x)) + mlp(other norm(x)) + x"""

    lacks = ParallelBlock.lacks

    attention_norm_scale = HookPoint(PerToken, "What the norm before the attention divides by", derived=True)
    attention_norm_output = HookPoint(Residual, "The normed stream entering the attention")
    attention_input = HookPoint(Residual, "What the attention is called with")
    mlp_norm_scale = HookPoint(PerToken, "What the norm before the MLP divides by", derived=True)
    mlp_norm_output = HookPoint(Residual, "The normed stream entering the MLP")
    mlp_input = HookPoint(Residual, "What the MLP is called with")
    layer_output = HookPoint(Residual, "The residual stream leaving the block")

    readers: ClassVar[Readers] = {"attention": ("attention_norm", "layer_input"), "mlp": ("mlp_norm", "layer_input")}

    def __init__(self, cfg: config.Layer, hidden_size: int, eager: bool = False):
        super().__init__(cfg, hidden_size, eager)
        self.register_module("mlp_norm", norm_or_none(cfg.norm, hidden_size))

    @of_its_run
    def forward(self, x: Residual, angles: Angles | None, mask: Mask, state: LayerKV | None = None) -> Residual:
        x = self.layer_input(x)
        h = self.attention_norm_output(normed(self.attention_norm, x, self.attention_norm_scale))
        attention = self.self_attn(self.attention_input(h), angles, mask, state)
        h = self.mlp_norm_output(normed(self.mlp_norm, x, self.mlp_norm_scale))
        return self.layer_output(attention + self.mlp(self.mlp_input(h)) + x)


if TYPE_CHECKING:

    class Blocks(nn.ModuleList):
        """A model's blocks, which attend in every released model."""

        def __iter__(self) -> Iterator[AttentionBlock]: ...
        def __getitem__(self, i: int) -> AttentionBlock: ...  # type: ignore[override]  # we take no slices


BLOCKS: dict[str, Callable[..., Block]] = {
    "sequential": SequentialBlock,
    "post_normed": PostNormedBlock,
    "parallel": ParallelBlock,
    "parallel_two_norms": TwoNormParallelBlock,
}
