"""Rotary angles and turning, and who may see whom: pure functions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from transformer_std.components.reuse import plus, times
from transformer_std.components.tracing import can_look, kept
from transformer_std.config import Rotary
from transformer_std.layouts import Keys, Queries

SMALL = 2**15  # elements, which torch works through on one thread
Angles = tuple[Float[Tensor, "rows 1 seq rotated"], Float[Tensor, "rows 1 seq rotated"]]


@kept(maxsize=None)  # none is ever let go: a CUDA graph may read it
def inverse_frequencies(rotary: Rotary, long: bool, device: torch.device) -> Float[Tensor, " pairs"]:
    """Radians a position for each pair of rotated dimensions, computed in float32 on the CPU on every device."""
    exponents = torch.arange(0, rotary.dims, 2, dtype=torch.float32, device="cpu") / rotary.dims
    steps = rotary.theta**exponents
    factors = rotary.long_factors if long else rotary.short_factors
    if factors is not None:
        steps = torch.tensor(factors, dtype=torch.float32, device="cpu") * steps
    return (1.0 / steps).to(device)


def rotary_angles(rotary: Rotary, positions: Int[Tensor, "rows seq"], dtype: torch.dtype) -> Angles:
    """cos, and sin with the sign of its term, of every rotated dimension; in float32, then cast to `dtype`.

    The largest position of the pass decides for all of its rows and positions whether longrope's long factors and
    scale hold, as in transformers: a long row switches its batch mates.
    """
    frequencies = inverse_frequencies(rotary, False, positions.device)
    scale: float | Tensor = rotary.short_scale
    if rotary.original_length is not None:
        past = positions.max() >= rotary.original_length
        frequencies = torch.where(past, inverse_frequencies(rotary, True, positions.device), frequencies)
        if rotary.long_scale != rotary.short_scale:
            scale = torch.full_like(past, rotary.short_scale, dtype=torch.float32).masked_fill(past, rotary.long_scale)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if rotary.original_length is not None:
        cos, sin = cos * scale, sin * scale
    half = rotary.dims // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return cos.to(dtype), sin.to(dtype)


def angles_from_zero(rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device) -> Angles:
    return rotary_angles(rotary, torch.arange(length, device=device)[None], dtype)


kept_angles = kept(maxsize=8)(angles_from_zero)


def prompt_angles(rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device) -> Angles:
    """The angles of positions 0 to length - 1: the same for every prompt of a length, and kept for the next one."""
    # A CUDA graph under capture makes them anew each time it runs, in memory of its own.
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (angles_from_zero if captured else kept_angles)(rotary, length, dtype, device)


def turn(
    heads: Float[Tensor, "batch heads seq dim"], angles: Angles, rotary: Rotary
) -> Float[Tensor, "batch heads seq dim"]:
    """Rotates the first dimensions of every head, dimension i paired with i + dims / 2; the rest pass."""
    (cos, signed_sin), dims, rest = angles, rotary.dims, heads.shape[-1] - rotary.dims
    first = heads.narrow(-1, 0, dims) if rest else heads
    turned, crossed = first * cos, first.roll(dims // 2, -1)
    turned = plus(turned, times(crossed, signed_sin))
    if rest:
        return torch.cat((turned, heads.narrow(-1, dims, rest)), dim=-1)
    return turned.clone(memory_format=torch.contiguous_format) if rotary.joined else turned


def turn_both(q: Queries, k: Keys, angles: Angles, rotary: Rotary) -> tuple[Queries, Keys]:
    """Turns queries and keys; as one tensor where they are so few that a kernel is sooner done than begun."""
    if torch.is_grad_enabled() or q.numel() > SMALL:
        return turn(q, angles, rotary), turn(k, angles, rotary)
    if rotary.joined:
        turned = turn(torch.cat((q, k), dim=1), angles, rotary)
    else:  # positions before heads in memory, as the projections have them
        turned = turn(torch.cat((q.transpose(1, 2), k.transpose(1, 2)), dim=2).transpose(1, 2), angles, rotary)
    return turned.narrow(1, 0, q.shape[1]), turned.narrow(1, q.shape[1], k.shape[1])


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
