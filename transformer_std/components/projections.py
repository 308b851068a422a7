"""From the stream to the queries, keys and values of every head."""

from __future__ import annotations

import functools
from collections.abc import Callable

from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor

from transformer_std import config
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.layouts import HeadOutputs, Keys, Queries, Residual, Values
from transformer_std.modules import Direct, Linear

Heads = tuple[Queries, Keys, Values]
WeightAndBias = tuple[Float[Tensor, "out hidden_size"], Float[Tensor, " out"]]
OfHeads = tuple[Float[Tensor, "heads dim hidden_size"], Float[Tensor, "heads dim"]]


def split_heads(x: Float[Tensor, "batch seq width"], dim: int) -> Float[Tensor, "batch heads seq dim"]:
    batch, seq, _ = x.shape
    return x.view(batch, seq, -1, dim).transpose(1, 2)  # einops says it better, in 2 us more, five times a block


def of_heads(part: WeightAndBias, dim: int) -> OfHeads:
    weight, bias = part
    return weight.unflatten(0, (-1, dim)), bias.unflatten(0, (-1, dim))


def side_by_side(x: Float[Tensor, "batch seq width"], dim: int) -> HeadOutputs:
    return x.view(*x.shape[:2], -1, dim)


def merge_heads(x: HeadOutputs) -> Float[Tensor, "batch seq width"]:
    return x.flatten(2)


def one_each(x: Residual, heads: int) -> Float[Tensor, "batch seq heads hidden_size"]:
    return repeat(x, "batch seq hidden -> batch seq head hidden", head=heads).contiguous()


def changed_projection(
    out: Float[Tensor, "batch heads seq dim"], point: HookPoint, part: OfHeads, x: Residual
) -> Float[Tensor, "batch heads seq dim"]:
    """`out`, a projection of `x` by `part`, where `point` shows a copy of `x` for each head. A change of a copy goes in
    as the change that it makes, so that to read them leaves every bit; a watched gradient flows through them."""
    weight, bias = part
    shown = point.beside(functools.partial(one_each, heads=len(weight)), x)
    if shown is None:
        return out
    pattern = "batch seq head hidden, head dim hidden -> batch head seq dim"
    plain, edited = (einsum(each, weight, pattern) for each in shown)
    return out.detach() + (edited - plain.detach()) + (bias - bias.detach())[:, None]


class SplitProjections(Direct):
    """Queries, keys and values by a matrix each."""

    def __init__(self, cfg: config.Attention, hidden_size: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q = Linear(hidden_size, cfg.num_heads * cfg.head_dim, bias=cfg.bias)
        self.k = Linear(hidden_size, cfg.num_kv_heads * cfg.head_dim, bias=cfg.bias)
        self.v = Linear(hidden_size, cfg.num_kv_heads * cfg.head_dim, bias=cfg.bias)

    def forward(self, x: Residual) -> Heads:
        dim = self.head_dim
        return split_heads(self.q(x), dim), split_heads(self.k(x), dim), split_heads(self.v(x), dim)

    def parts(self, read: Callable[[str], WeightAndBias]) -> list[OfHeads]:
        """Weight and bias of queries, keys and values, of what `read` finds in the projections by name."""
        return [of_heads(read(name), self.head_dim) for name in ("q", "k", "v")]


class FusedProjections(Direct):
    """One matrix; its output is the queries, then the keys, then the values, head after head."""

    def __init__(self, cfg: config.Attention, hidden_size: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.sizes = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
        self.qkv = Linear(hidden_size, sum(self.sizes) * cfg.head_dim, bias=cfg.bias)

    def _parts(self, x: Tensor, dim: int) -> list[Tensor]:
        # Slices, not split(): autograd refuses in-place edits of a view that came with siblings.
        h, kv, _ = self.sizes
        return [x.narrow(dim, start, size) for start, size in ((0, h), (h, kv), (h + kv, kv))]

    def forward(self, x: Residual) -> Heads:
        q, k, v = self._parts(split_heads(self.qkv(x), self.head_dim), 1)
        return q, k, v

    def parts(self, read: Callable[[str], WeightAndBias]) -> list[OfHeads]:
        """Weight and bias of queries, keys and values, of what `read` finds in the projections by name."""
        weight, bias = of_heads(read("qkv"), self.head_dim)
        return list(zip(self._parts(weight, 0), self._parts(bias, 0), strict=True))


class ByHeadProjections(Direct):
    """One matrix; its output is each head's queries, keys and values, head after head."""

    def __init__(self, cfg: config.Attention, hidden_size: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.qkv = Linear(hidden_size, 3 * cfg.num_heads * cfg.head_dim, bias=cfg.bias)

    def forward(self, x: Residual) -> Heads:
        each, dim = split_heads(self.qkv(x), 3 * self.head_dim), self.head_dim
        return each.narrow(-1, 0, dim), each.narrow(-1, dim, dim), each.narrow(-1, 2 * dim, dim)

    def parts(self, read: Callable[[str], WeightAndBias]) -> list[OfHeads]:
        """Weight and bias of queries, keys and values, of what `read` finds in the projections by name."""
        weight, bias = of_heads(read("qkv"), self.head_dim)  # a head's queries, its keys, its values, the next head's
        return [(weight[i::3], bias[i::3]) for i in range(3)]


PROJECTIONS = {False: SplitProjections, True: FusedProjections, "by_head": ByHeadProjections}
