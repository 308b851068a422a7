"""Where transformers' modules have each standard value: the words of a family's `VALUES`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from einops import rearrange
from torch import Tensor

from transformer_std.config import Layer


@dataclass(frozen=True)
class At:
    """Where a view stands: our config of the block, and the call's (batch, seq)."""

    layer: Layer
    size: tuple[int, int]


View = Callable[[Tensor, At], Tensor]


@dataclass(frozen=True)
class Place:
    """A module's input or output, and the part of it, as a view, that is the value.

    `stream`: the module's caller keeps the very tensor too, so that a write must be in place to reach it.
    `each_row`: all rows of a batch share it; each is given its own.
    """

    module: str
    side: Literal["input", "output"]
    view: View | None = None
    stream: bool = False
    each_row: bool = False


@dataclass(frozen=True)
class Between:
    """A torch function that a module's forward calls, and its output or second argument."""

    module: str
    function: str
    side: Literal["output", "second"]
    view: View | None = None


@dataclass(frozen=True)
class Gating:
    """The inside of transformers' experts: the parts of the first product that are the gate's and the up's, and the
    activation, as the output of their module `act_fn`, or of a torch function, the `call`-th that they call."""

    gate: View
    up: View
    function: str | None = None
    call: int = 0


# A list where blocks differ: the first whose module a block has.
Places = Place | Between | list[Place]

Input = functools.partial(Place, side="input")
Output = functools.partial(Place, side="output")


def by_heads(x: Tensor, at: At) -> Tensor:
    """[batch seq (head dim)] as queries are laid out."""
    return rearrange(x, "batch seq (head dim) -> batch head seq dim", dim=at.layer.attention.qk_head_dim)


def last(x: Tensor, at: At) -> Tensor:
    """The dimensions that turn, of what has them last."""
    rotary = at.layer.attention.rotary
    assert rotary is not None
    return x[..., -rotary.dims :]


def heads_apart(x: Tensor, at: At) -> Tensor:
    """[batch seq head dim] as queries are laid out."""
    return rearrange(x, "batch seq head dim -> batch head seq dim")


def fused_queries(x: Tensor, at: At) -> Tensor:
    return by_heads(x, at)[:, : at.layer.attention.num_heads]


def fused_keys(x: Tensor, at: At) -> Tensor:
    return by_heads(x, at)[:, at.layer.attention.num_heads :][:, : at.layer.attention.num_kv_heads]


def by_head_queries(x: Tensor, at: At) -> Tensor:
    return by_head(x, at)[0]


def by_head_keys(x: Tensor, at: At) -> Tensor:
    return by_head(x, at)[1]


def by_head(x: Tensor, at: At) -> Tensor:
    """Queries, keys and values of what has them head after head."""
    dim = at.layer.attention.head_dim
    return rearrange(x, "batch seq (head three dim) -> three batch head seq dim", three=3, dim=dim)


def side_by_side(x: Tensor, at: At) -> Tensor:
    """[batch seq (head dim)] as head outputs are laid out."""
    return rearrange(x, "batch seq (head dim) -> batch seq head dim", dim=at.layer.attention.head_dim)


def tokens_apart(x: Tensor, at: At) -> Tensor:
    """[(batch seq) width] with its tokens back in rows."""
    return x if x.ndim == 3 else rearrange(x, "(batch seq) width -> batch seq width", batch=at.size[0])


def first_half(x: Tensor, at: At) -> Tensor:
    return x[..., : x.shape[-1] // 2]


def second_half(x: Tensor, at: At) -> Tensor:
    return x[..., x.shape[-1] // 2 :]


def evens(x: Tensor, at: At) -> Tensor:
    return x[..., ::2]


def odds(x: Tensor, at: At) -> Tensor:
    return x[..., 1::2]


HALVES = Gating(first_half, second_half)
