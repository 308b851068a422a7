"""Who may see whom: pure functions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from transformer_std.components.tracing import can_look


def causal(queries: int, keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "query key"]:
    """True where a query sees a key: not after itself, and of the last `window` keys only. The last query is at the
    last key, so with a cached prefix there are more keys than queries."""
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def real_positions(mask: Shaped[Tensor, "batch position"] | None) -> Bool[Tensor, "batch position"] | None:
    """False on padding; None where there is none, as far as can be seen without waiting for it."""
    return None if mask is None or (can_look(mask) and bool(mask.all())) else mask.bool()


def documents(positions: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"] | None:
    """The number of each position's document in rows that are packed: another begins where positions do, at 0. None
    where each row is one document, as far as can be seen without waiting for it."""
    number = torch.cat((torch.zeros_like(positions[:, :1]), (positions[:, 1:] == 0).cumsum(-1)), dim=1)
    return None if can_look(number) and not bool(number[:, -1].any()) else number


def visible(
    padding: Bool[Tensor, "batch position"] | None,
    queries: int,
    keys: int,
    window: int | None,
    device: torch.device,
    packed: Int[Tensor, "batch position"] | None = None,
) -> Bool[Tensor, "rows 1 query key"] | None:
    """What each query sees; None where that is all keys up to its own, which needs no mask to say.

    `padding` is False on padding; where it is of more positions than there are keys, the last ones count. Of rows that
    are `packed`, which has the number of each position's document, a query sees its own document.
    """
    if padding is None and packed is None and queries in (1, keys) and (window is None or keys < window):
        return None
    seen = causal(queries, keys, window, device)[None, None]
    if packed is not None:
        seen = seen & (packed[:, None, :, None] == packed[:, None, None, :])
    return seen if padding is None else seen & padding[:, None, None, -keys:]


def seen_keys(past: int, new: int, window: int | None) -> int:
    """How many keys the queries of `new` positions attend over when `past` were read before."""
    return new + (past if window is None else min(past, window - 1))
