"""The values of one run, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from transformer_std.hook_points import HookPoint
from transformer_std.names import Names, UnknownName

GRAD = "_grad"


class ActivationCache(Mapping[str, Any]):
    """What `run_with_cache` saw. Keys are full names; `cache["attention_queries", 3]` is block 3's.

    Gradients, where they were asked for, are under the value's name with `_grad` behind it.
    """

    def __init__(self, values: dict[str, Any], names: Names):
        self._values, self._names = values, names

    def __getitem__(self, key: str | tuple[str, int]) -> Any:
        if isinstance(key, str) and key in self._values:
            return self._values[key]
        full = self._full_name(key)
        if full not in self._values:
            raise UnknownName(f"{full} is not in this cache: {self._why_missing(full)}")
        return self._values[full]

    def _full_name(self, key: str | tuple[str, int]) -> str:
        name = key[0] if isinstance(key, tuple) else key
        if not isinstance(name, str) or not name.endswith(GRAD):
            return self._names.full_name(key)
        plain = name.removesuffix(GRAD)
        return self._names.full_name((plain, key[1]) if isinstance(key, tuple) else plain) + GRAD

    def _why_missing(self, full: str) -> str:
        if full.endswith(GRAD):
            return "run with incl_bwd=True, and call backward() on the output or a loss made of it"
        return "names_filter left it out, or the run did not reach it"

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stack(self, value: str) -> Tensor:
        """`value` of every layer that has it, [layers ...]."""
        entries = [entry for entry in self._names.by_value.get(value, {}).values() if isinstance(entry, HookPoint)]
        if not entries:
            raise self._names.miss(value)
        return torch.stack([self[point.name] for point in entries])

    def map(self, fn: Callable[[Tensor], Tensor]) -> ActivationCache:
        """A cache of the same names, each tensor through `fn`."""
        values = {name: fn(value) if isinstance(value, Tensor) else value for name, value in self._values.items()}
        return ActivationCache(values, self._names)

    def to(self, *args: Any, **kwargs: Any) -> ActivationCache:
        """The cache with its tensors moved or cast as `Tensor.to` does; the model stays where it is."""
        return self.map(lambda value: value.to(*args, **kwargs))

    def without_batch(self) -> ActivationCache:
        """The cache of a batch of one, without the batch axis."""
        return self.map(lambda value: rearrange(value, "1 ... -> ..."))

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in self._values.values() if isinstance(value, Tensor))

    def __repr__(self) -> str:
        return f"ActivationCache({len(self)} values, {self.num_bytes / 1e6:.1f} MB: {', '.join(list(self)[:3])}, ...)"
