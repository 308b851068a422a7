"""Keys and values of the positions a model has read."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
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
        if self._keys is None or self._values is None or not self._takes(self._keys, new):
            self._grow(keys, values, kept, new)
        self._keys[:, :, self._end : self._end + new] = keys  # type: ignore[index]
        self._values[:, :, self._end : self._end + new] = values  # type: ignore[index]
        self._end += new
        seen = slice(self._start, self._end)
        return self._keys[:, :, seen], self._values[:, :, seen]  # type: ignore[index]

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> LayerKV:
        """Another, which holds what `fn` makes of the filled part of this one's keys and values."""
        other = LayerKV(self.window, self._room)
        if self._keys is not None and self._values is not None:
            filled = slice(self._start, self._end)
            other._keys, other._values = (fn(each[:, :, filled]) for each in (self._keys, self._values))
            other._end = len(self)
        return other

    def state(self) -> tuple[Any, ...]:
        return self._keys, self._values, self._start, self._end

    def restore(self, state: tuple[Any, ...]) -> None:
        self._keys, self._values, self._start, self._end = state

    def _takes(self, room: Tensor, new: int) -> bool:
        """Whether `new` positions fit; what inference mode made can only be written to there."""
        fits = self._end + new <= room.shape[2]
        if torch.compiler.is_compiling():  # which inference mode is not part of
            return fits
        return fits and (torch.is_inference_mode_enabled() or not room.is_inference())

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

    `copy()`, `copy.copy` and `copy.deepcopy` give another that goes on by itself, in the same graph where gradients are
    on; pickled and saved it leaves the graph.

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
        self._loaded = False

    def __len__(self) -> int:
        return self._length

    def copy(self) -> KVCache:
        """Another that holds the same, and goes on by itself: one prompt read once, continued many times."""
        return self._mapped(torch.clone)

    def expand(self, n: Any) -> KVCache:
        """A copy with each row `n` times in a row, as `repeat_interleave` has them; what was read as one row is then
        gone on from as `n`."""
        n = operator.index(n)
        if n < 1:
            raise ValueError(f"a kv_cache is expanded to at least one row a row, not {n}")
        other = self._mapped(lambda held: held.repeat_interleave(n, 0))
        other.batch = None if self.batch is None else self.batch * n
        return other

    def __copy__(self) -> KVCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self._mapped(lambda held: held.detach().clone())), "_loaded": True}

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> KVCache:
        other = object.__new__(type(self))
        layers, mask = [layer.mapped(fn) for layer in self.layers], None if self.mask is None else fn(self.mask)
        vars(other).update({**vars(self), "layers": layers, "mask": mask})
        return other

    def check(self, config: object, batch: int) -> None:
        """Raises `ValueError` where the cache is of another model, or of another number of rows."""
        if config is not self.config:
            if not self._loaded or config != self.config:
                raise ValueError("the kv_cache is of another model")
            self.config, self._loaded = config, False  # one from a file is of the first model it fits
        if self.batch not in (None, batch):
            raise ValueError(
                f"the kv_cache holds {self.batch} rows; the input has {batch}: kv_cache.expand(n) has each row n times"
            )

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
        if len(given) != batch:
            raise ValueError(f"the attention_mask has {len(given)} rows; the input has {batch}")
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
        """For the length of a pass: if it fails half-way, the cache is as it was before, its length and mask too."""
        states = [layer.state() for layer in self.layers]
        own = (self.batch, self.mask, self._length)
        try:
            yield
        except BaseException:
            for layer, state in zip(self.layers, states, strict=True):
                layer.restore(state)
            self.batch, self.mask, self._length = own
            raise

    def advance(self, mask: Tensor | None, batch: int, new: int) -> None:
        """Notes that `new` positions were read, under the `mask` of everything; None where all are real."""
        self.batch, self.mask = batch, mask
        self._length += new

    def __repr__(self) -> str:
        return f"KVCache({len(self)} positions of {self.batch or 0} rows, {len(self.layers)} layers)"
