"""What the blocks of a pass share. Each block says what it needs, and what several need is made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from transformer_std.components.positions import seen_keys, visible
from transformer_std.components.rotary import Angles, prompt_angles, rotary_angles
from transformer_std.config import Rotary
from transformer_std.layouts import Residual


class Pass:
    """One pass through the blocks, as they may ask about it.

    Attributes:
        seq: how many positions are read; `past`: how many a cache holds before them.
        real: [batch past+seq], False on padding; None where there is none.
        packed: [batch seq], the number of each position's document; None where each row is one.
        positions: [rows seq], counted from 0 over a row's real ones if they were not given; None where they are 0 to
            seq - 1.
    """

    def __init__(
        self,
        stream: Residual,
        past: int = 0,
        real: Bool[Tensor, "batch position"] | None = None,
        packed: Int[Tensor, "batch seq"] | None = None,
        positions: Int[Tensor, "rows seq"] | None = None,
    ):
        self.seq, self.past, self.dtype, self.device = stream.shape[1], past, stream.dtype, stream.device
        self.real, self.packed = real, packed
        if positions is None and real is not None:
            positions = (real.cumsum(-1) - 1).clamp(min=0)[:, past:]
        elif positions is None and past:
            positions = torch.arange(past, past + self.seq, device=self.device)[None]
        self.positions = positions


class Need:
    """Something that blocks ask of a pass. Equal ones are made once."""

    @property
    def restart(self) -> int | None:
        """The length past which it is another for the positions before, too: a generation that comes there reads its
        text again."""
        return None

    def of(self, this: Pass) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Turns(Need):
    """The angles by which a rotary turns the positions."""

    rotary: Rotary | None

    @property
    def restart(self) -> int | None:
        scaling = None if self.rotary is None else self.rotary.scaling
        return None if scaling is None else scaling.restart

    def of(self, this: Pass) -> Angles | None:
        if self.rotary is None:
            return None
        dtype = torch.float32 if self.rotary.wide else this.dtype
        if this.positions is None:
            return prompt_angles(self.rotary, this.seq, dtype, this.device)
        return rotary_angles(self.rotary, this.positions, dtype)


@dataclass(frozen=True)
class Sees(Need):
    """Which keys each query sees, of the last `window`."""

    window: int | None

    def of(self, this: Pass) -> Bool[Tensor, "rows 1 query key"] | None:
        keys = seen_keys(this.past, this.seq, self.window)
        return visible(this.real, this.seq, keys, self.window, this.device, this.packed)
