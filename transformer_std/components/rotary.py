"""Rotary position embedding: frequencies, angles, and the turning of queries and keys. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std import config
from transformer_std.components.reuse import plus, times
from transformer_std.components.tracing import kept
from transformer_std.config import Rotary
from transformer_std.layouts import Keys, Queries

SMALL = 2**15  # elements, which torch works through on one thread
Angles = tuple[Float[Tensor, "rows 1 seq rotated"], Float[Tensor, "rows 1 seq rotated"]]
Frequencies = Float[Tensor, " pairs"]


def periods(dims: int, theta: float | Tensor) -> Frequencies:
    """theta ** (i / dims) of every second dimension i, in float32."""
    return theta ** (torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims)


def linear(rotary: Rotary, by: config.Linear) -> Frequencies:
    return 1.0 / periods(rotary.dims, rotary.theta) / by.factor


def llama3(rotary: Rotary, by: config.Llama3) -> Frequencies:
    frequencies = 1.0 / periods(rotary.dims, rotary.theta)
    waves = 2 * math.pi / frequencies
    longest, shortest = by.original_length / by.low, by.original_length / by.high
    stretched = torch.where(waves > longest, frequencies / by.factor, frequencies)
    share = (by.original_length / waves - by.low) / (by.high - by.low)
    between = (1 - share) * stretched / by.factor + share * stretched
    return torch.where((waves < shortest) | (waves > longest), stretched, between)


def yarn(rotary: Rotary, by: config.Yarn) -> Frequencies:
    def dimension(turns: float) -> float:
        """The one that turns so many times in the original length."""
        return rotary.dims * math.log(by.original_length / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = dimension(by.fast), dimension(by.slow)
    if by.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dims - 1)
    high = high + 0.001 if low == high else high
    ramp = (torch.arange(rotary.dims // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    as_trained, of_period = 1 - ramp.clamp(0, 1), periods(rotary.dims, rotary.theta)
    return 1.0 / (by.factor * of_period) * (1 - as_trained) + 1.0 / of_period * as_trained


def longrope(rotary: Rotary, factors: tuple[float, ...]) -> Frequencies:
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * periods(rotary.dims, rotary.theta))


STRETCHED: dict[type, Callable[..., Frequencies]] = {
    type(None): lambda rotary, _: 1.0 / periods(rotary.dims, rotary.theta),
    config.Linear: linear,
    config.Dynamic: lambda rotary, _: 1.0 / periods(rotary.dims, rotary.theta),
    config.Llama3: llama3,
    config.Yarn: yarn,
    config.LongRope: lambda rotary, by: longrope(rotary, by.short_factors),
}


@kept(maxsize=None)  # none is ever let go: a CUDA graph may read it
def inverse_frequencies(rotary: Rotary, past: bool, device: torch.device) -> Frequencies:
    """Radians a position for each pair of rotated dimensions, computed in float32 on the CPU on every device; with
    `past`, those of a pass past longrope's original length."""
    by = rotary.scaling
    if past and isinstance(by, config.LongRope):
        return longrope(rotary, by.long_factors).to(device)
    return STRETCHED[type(by)](rotary, by).to(device)


def grown_frequencies(rotary: Rotary, by: config.Dynamic, length: Int[Tensor, ""]) -> Frequencies:
    """Those of a pass that reaches to `length`, past the original one (NTK-aware scaling)."""
    growth = (by.factor * length / by.original_length - (by.factor - 1)) ** (rotary.dims / (rotary.dims - 2))
    exponents = torch.arange(0, rotary.dims, 2, dtype=torch.float32, device=length.device) / rotary.dims
    return 1.0 / (rotary.theta * growth) ** exponents


def rotary_angles(rotary: Rotary, positions: Int[Tensor, "rows seq"], dtype: torch.dtype) -> Angles:
    """cos, and sin with the sign of its term, of every rotated dimension; in float32, then cast to `dtype`.

    Where the length of a pass decides, the largest position decides for all of its rows and positions, as in
    transformers: a long row switches its batch mates.
    """
    frequencies = inverse_frequencies(rotary, False, positions.device)
    by = rotary.scaling
    scale: float | Tensor = 1.0 if by is None else by.scale
    if isinstance(by, (config.LongRope, config.Dynamic)):
        past = positions.max() >= by.original_length
        if isinstance(by, config.Dynamic):
            others = grown_frequencies(rotary, by, positions.max() + 1)
        else:
            others = inverse_frequencies(rotary, True, positions.device)
            if by.long_scale != by.scale:
                scale = torch.full_like(past, by.scale, dtype=torch.float32).masked_fill(past, by.long_scale)
        frequencies = torch.where(past, others, frequencies)
    angles = positions[:, None, :, None].float() * frequencies
    woven = rotary.pairs == "neighbours"
    angles = angles.repeat_interleave(2, dim=-1) if woven else torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if not isinstance(scale, float) or scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), signed(sin, rotary).to(dtype)


def signed(sin: Float[Tensor, "*axes rotated"], rotary: Rotary) -> Float[Tensor, "*axes rotated"]:
    """The first of each pair gets minus the other times sin."""
    if rotary.pairs == "neighbours":
        return torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
    half = rotary.dims // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def crossed(x: Float[Tensor, "*axes rotated"], rotary: Rotary) -> Float[Tensor, "*axes rotated"]:
    """Each dimension's partner in its place."""
    if rotary.pairs == "neighbours":
        return torch.stack((x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x.roll(rotary.dims // 2, -1)


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
    """Rotates the first dimensions of every head; the rest pass."""
    (cos, signed_sin), dims, rest = angles, rotary.dims, heads.shape[-1] - rotary.dims
    first = heads.narrow(-1, 0, dims) if rest else heads
    if rotary.pairs == "neighbours_apart":
        first = torch.cat((first[..., ::2], first[..., 1::2]), dim=-1)
    turned, partners = first * cos, crossed(first, rotary)
    turned = plus(turned, times(partners, signed_sin))
    if rotary.wide:
        turned = turned.to(heads.dtype)
    if rest and rotary.contiguous:
        return torch.cat((turned, heads.narrow(-1, dims, rest)), dim=-1)
    if rest:  # positions before heads in memory, as the projections have them
        return torch.cat((turned.transpose(1, 2), heads.narrow(-1, dims, rest).transpose(1, 2)), dim=-1).transpose(1, 2)
    return turned.clone(memory_format=torch.contiguous_format) if rotary.contiguous else turned


def turn_both(q: Queries, k: Keys, angles: Angles, rotary: Rotary) -> tuple[Queries, Keys]:
    """Turns queries and keys; as one tensor where they are so few that a kernel is sooner done than begun."""
    if torch.is_grad_enabled() or q.numel() > SMALL:
        return turn(q, angles, rotary), turn(k, angles, rotary)
    if rotary.contiguous:
        turned = turn(torch.cat((q, k), dim=1), angles, rotary)
    else:  # positions before heads in memory, as the projections have them
        turned = turn(torch.cat((q.transpose(1, 2), k.transpose(1, 2)), dim=2).transpose(1, 2), angles, rotary)
    return turned.narrow(1, 0, q.shape[1]), turned.narrow(1, q.shape[1], k.shape[1])
