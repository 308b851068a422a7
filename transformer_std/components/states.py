"""What a block keeps of the positions that it has read, for the next ones to go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 64  # positions by which keys and values grow


class State:
    """A block's part of a `KVCache`. The block changes it when it reads; the cache copies it, and takes it back where a
    pass fails half-way."""

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> State:
        """Another, which holds what `fn` makes of each tensor of this one, whose first axis is the batch."""
        raise NotImplementedError

    def snapshot(self) -> tuple[Any, ...]:
        """What `restore` needs to bring back what is held now."""
        raise NotImplementedError

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        raise NotImplementedError


class LayerKV(State):
    """One block's keys and values, [batch num_kv_heads position dim], in room that grows by chunks.

    A block with a window keeps no more than its next query can see.
    """

    def __init__(self, window: int | None, room: int):
        self.window, self._room = window, room
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._start = self._end = 0  # the filled part of the room

    def __len__(self) -> int:
        return self._end - self._start

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the new positions in; gives the keys and values that their queries attend over. These are views of this
        memory, which later passes go on from: who keeps one, or edits it, takes a copy."""
        new = keys.shape[2]
        kept = len(self) if self.window is None else min(len(self), self.window - 1)
        self._start = self._end - kept
        tracked = any(each is not None and each.requires_grad for each in (keys, values, self._keys, self._values))
        if tracked:  # autograd needs tensors that later steps leave alone
            self._keys, self._values = self._joined(self._keys, keys), self._joined(self._values, values)
            self._start, self._end = 0, kept + new
            return self._keys, self._values
        k, v = self._keys, self._values
        if k is None or v is None or not self._takes(k, new):
            k, v = self._keys, self._values = self._grown(keys, values, kept, new)
        fresh = slice(self._end, self._end + new)
        k[:, :, fresh], v[:, :, fresh] = keys, values
        self._end += new
        seen = slice(self._start, self._end)
        return k[:, :, seen], v[:, :, seen]

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> LayerKV:
        """Another, which holds what `fn` makes of the filled part of this one's keys and values."""
        other = LayerKV(self.window, self._room)
        if self._keys is not None and self._values is not None:
            filled = slice(self._start, self._end)
            other._keys, other._values = (fn(each[:, :, filled]) for each in (self._keys, self._values))
            other._end = len(self)
        return other

    def snapshot(self) -> tuple[Any, ...]:
        return self._keys, self._values, self._start, self._end

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        self._keys, self._values, self._start, self._end = snapshot

    def _takes(self, room: Tensor, new: int) -> bool:
        """Whether `new` positions fit; what inference mode made can only be written to there."""
        fits = self._end + new <= room.shape[2]
        if torch.compiler.is_compiling():  # which inference mode is not part of
            return fits
        return fits and (torch.is_inference_mode_enabled() or not room.is_inference())

    def _joined(self, held: Tensor | None, new: Tensor) -> Tensor:
        return new if held is None else torch.cat((held[:, :, self._start : self._end], new), dim=2)

    def _grown(self, keys: Tensor, values: Tensor, kept: int, new: int) -> tuple[Tensor, Tensor]:
        """New room, with what is kept: views that were handed out keep what they show."""
        room = max(self._room if self.window is None else 0, -(-(kept + new) // CHUNK) * CHUNK + CHUNK)
        held = (self._keys, self._values)
        fresh = [each.new_empty(*each.shape[:2], room, each.shape[3]) for each in (keys, values)]
        for old, to in zip(held, fresh, strict=True):
            if old is not None:
                to[:, :, :kept] = old[:, :, self._start : self._end]
        self._start, self._end = 0, kept
        return fresh[0], fresh[1]
