"""What a model keeps of the positions that it has read: its blocks' states, and which positions were real."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_std.components.states import State
from transformer_std.components.tracing import can_look


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

    def __init__(self, model: Any, length: int = 0):
        self.config: object = model.config
        self.layers: list[State | None] = [block.new_state(length) for block in model.layers]
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
        layers = [None if state is None else state.mapped(fn) for state in self.layers]
        mask = None if self.mask is None else fn(self.mask)
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
    def reading(self, mask: Tensor | None, batch: int, new: int) -> Iterator[None]:
        """For the length of a pass that reads `new` positions of `batch` rows, under the `mask` of everything, None
        where all are real: counted when it ends. If it fails half-way, the cache is as it was before."""
        states = [(state, state.snapshot()) for state in self.layers if state is not None]
        try:
            yield
        except BaseException:
            for state, before in states:
                state.restore(before)
            raise
        self.batch, self.mask = batch, mask
        self._length += new

    def __repr__(self) -> str:
        return f"KVCache({len(self)} positions of {self.batch or 0} rows, {len(self.layers)} layers)"
