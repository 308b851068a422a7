"""Keys and values of the positions a model has read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from transformer_std.components.tracing import can_look

CHUNK = 64  # positions by which a cache grows


class LayerKV:
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
        """Takes the new positions in; gives the keys and values that their queries attend over."""
        new = keys.shape[2]
        kept = len(self) if self.window is None else min(len(self), self.window - 1)
        self._start = self._end - kept
        tracked = any(each is not None and each.requires_grad for each in (keys, values, self._keys, self._values))
        if tracked:  # autograd needs tensors that later steps leave alone
            self._keys, self._values = self._joined(self._keys, keys), self._joined(self._values, values)
            self._start, self._end = 0, kept + new
            return self._keys, self._values
        if self._keys is None or self._values is None or self._end + new > self._keys.shape[2]:
            self._grow(keys, values, kept, new)
        self._keys[:, :, self._end : self._end + new] = keys  # type: ignore[index]
        self._values[:, :, self._end : self._end + new] = values  # type: ignore[index]
        self._end += new
        seen = slice(self._start, self._end)
        return self._keys[:, :, seen], self._values[:, :, seen]  # type: ignore[index]

    def state(self) -> tuple[Any, ...]:
        return self._keys, self._values, self._start, self._end

    def restore(self, state: tuple[Any, ...]) -> None:
        self._keys, self._values, self._start, self._end = state

    def _joined(self, held: Tensor | None, new: Tensor) -> Tensor:
        return new if held is None else torch.cat((held[:, :, self._start : self._end], new), dim=2)

    def _grow(self, keys: Tensor, values: Tensor, kept: int, new: int) -> None:
        """New room: views that were handed out keep what they show."""
        room = max(self._room if self.window is None else 0, -(-(kept + new) // CHUNK) * CHUNK + CHUNK)
        held = (self._keys, self._values)
        fresh = [each.new_empty(*each.shape[:2], room, each.shape[3]) for each in (keys, values)]
        for old, to in zip(held, fresh, strict=True):
            if old is not None:
                to[:, :, :kept] = old[:, :, self._start : self._end]
        (self._keys, self._values), self._start, self._end = fresh, 0, kept


class KVCache:
    """What a model has read so far, for `model(tokens, kv_cache=cache)` to go on from.

    Args:
        model: the model that it is for.
        length: how many positions to make room for at once; it grows past them.

    Attributes:
        mask: [batch length], which of the positions read are real; None while all of them are.
    """

    def __init__(self, model: nn.Module, length: int = 0):
        self.config = model.config
        self.layers = [LayerKV(layer.attention.window, length) for layer in self.config.layers]
        self.batch: int | None = None
        self.mask: Tensor | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def check(self, config: object, batch: int) -> None:
        """Raises `ValueError` where the cache is of another model, or of another number of rows."""
        if config is not self.config:
            raise ValueError("the kv_cache is of another model")
        if self.batch not in (None, batch):
            raise ValueError(f"the kv_cache holds {self.batch} rows; the input has {batch}")

    def whole_mask(self, given: Tensor | None, batch: int, new: int) -> Tensor | None:
        """The mask of everything read and of `new` positions, from the mask of either; None where all are real.

        Raises:
            ValueError: `given` is of another length, or says otherwise of what was read.
        """
        held = self.mask
        if given is None:
            if held is None:
                return None
            given = held.new_ones(batch, new)
        if given.shape[1] == new:
            past = given.new_ones(batch, len(self)) if held is None else held
            return torch.cat((past, given), dim=1)
        if given.shape[1] != len(self) + new:
            raise ValueError(
                f"the attention_mask has {given.shape[1]} positions; the kv_cache holds {len(self)} and the input {new}"
            )
        past = given[:, : len(self)]
        expected = torch.ones_like(past) if held is None else held
        if can_look(past) and not torch.equal(past.bool(), expected.bool()):
            raise ValueError("the attention_mask says otherwise of the positions that the kv_cache holds")
        return given

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """For the length of a pass: if it fails half-way, the cache is as it was before."""
        states = [layer.state() for layer in self.layers]
        try:
            yield
        except BaseException:
            for layer, state in zip(self.layers, states, strict=True):
                layer.restore(state)
            raise

    def advance(self, mask: Tensor | None, batch: int, new: int) -> None:
        """Notes that `new` positions were read, under the `mask` of everything; None where all are real."""
        self.batch, self.mask = batch, mask
        self._length += new

    def __repr__(self) -> str:
        return f"KVCache({len(self)} positions of {self.batch or 0} rows, {len(self.layers)} layers)"
