"""The values of a run, by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from transformer_std.config import TransformerConfig
from transformer_std.hooks.hook_point import Deferred, Handle, HookPoint
from transformer_std.hooks.names import Names, UnknownName
from transformer_std.hooks.runs import Scope, for_one_run
from transformer_std.kv_cache import KVCache
from transformer_std.layouts import Keys, Values, axes, is_integer, layout_name, layout_named
from transformer_std.transformer import Transformer

GRAD = "_grad"
FORMAT = "transformer_std.cache 1"
if TYPE_CHECKING:
    Value = Tensor
else:
    Value = Any  # `input_size` alone is a pair of numbers
Slice = numbers.Integral | slice | Tensor | list[int]


class CachedValues(Mapping[str, Any]):
    """What `run_with_cache` saw. Keys are full names; `cache["attention_queries", 3]` is block 3's.

    Gradients, where they were asked for, are under the value's name with `_grad` behind it. TransformerLens' names are
    understood, and answered in its order of axes.
    """

    def __init__(self, values: dict[str, Any], names: Names, model: Transformer, *, gone: frozenset[str] = frozenset()):
        self._values, self._names = values, names
        self._gone = gone  # axes that were taken out of every value
        self._new: int | None = None  # positions of a run that went on from a kv_cache
        self._model = weakref.ref(model)  # a cache keeps no model alive
        self._config = model.config

    @property
    def model(self) -> Transformer:
        """The model that ran. A cache that was read from a file has none until it is given one, `cache.model = model`.
        Raises `RuntimeError` when there is none."""
        if (model := self._model()) is None:
            raise RuntimeError(
                "this cache has no model: it was read from a file, or the model is gone; set cache.model"
            )
        return model

    @model.setter
    def model(self, model: Transformer) -> None:
        """Raises `ValueError` where `model` is built otherwise than the one that ran."""
        if not _same_build(self._config, model.config):
            raise ValueError("this cache is of another model: its config differs from this one's")
        self._model, self._names = weakref.ref(model), model.names

    @contextlib.contextmanager
    def recording(
        self,
        points: Sequence[HookPoint],
        *,
        gradients: Sequence[HookPoint] = (),
        device: torch.device | str | None = None,
        keep_graph: bool = False,
        kv_cache: KVCache | None = None,
    ) -> Iterator[None]:
        """The next run in a `with` keeps here what passes its `points`, and what passes its `gradients` in the backward
        of what it gives. What `kv_cache` the run goes on from tells its new positions."""
        values, weak, gone = self._values, weakref.ref(self), "batch" in self._gone
        as_it_is = device is None and not gone
        steps, before = kv_cache is not None, 0 if kv_cache is None else len(kv_cache)
        inference = torch.is_inference_mode_enabled()  # where no tensor says that it is a view

        def keep(value: Any, hook: HookPoint) -> None:
            if isinstance(value, Tensor):
                alias, tracked = steps and hook.layout in (Keys, Values), value.requires_grad
                if not (tracked and keep_graph):  # where gradients are asked of the very tensor
                    part = inference or value._is_view()
                    value = value.detach() if tracked else value
                    value = owned(value, alias) if part or alias else value
            values[hook.name] = value if as_it_is else _placed(value, device, gone)

        def keep_gradient(grad: Tensor, hook: HookPoint) -> None:
            if (alive := weak()) is not None:  # a strong one would tie the graph to the cache it is kept in
                alive._values[hook.name + GRAD] = _placed(owned(grad), device, gone)

        scope = Scope()
        reader = Handle(keep, reads=True, defers=as_it_is and not keep_graph, scope=scope)
        backward = Handle(keep_gradient, reads=True, backward=True, scope=scope)
        try:
            for point in points:
                reader.attach(point)
            for point in gradients:
                if not is_integer(point.layout):
                    backward.attach(point)
            with for_one_run(scope):
                yield
        finally:
            reader.remove()
            backward.detach()
        self._new = None if kv_cache is None else len(kv_cache) - before

    def save(self, file: str | Path) -> None:
        """Writes the cache as safetensors: each value under its name, and in the header the layouts, the model's config
        and the axes that were taken out. `ActivationCache.load` reads it, and so does any safetensors reader."""
        from safetensors.torch import save_file

        values = dict(self)
        tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
        shared = {value.untyped_storage().data_ptr() for value in tensors.values()}
        if len(shared) < len(tensors):  # neighbours that are one tensor
            tensors = {name: value.clone() for name, value in tensors.items()}
        points = {name: self._names.points[name.removesuffix(GRAD)] for name in values}
        header = {
            "format": FORMAT,
            "points": {name: [layout_name(point.layout), point.description] for name, point in points.items()},
            "others": {name: value for name, value in values.items() if not isinstance(value, Tensor)},
            "gone": sorted(self._gone),
            "new": self._new,
            "config": self._config and self._config.to_dict(),
        }
        beside = Path(file).with_name(f".{Path(file).name}.{uuid.uuid4().hex}")
        try:
            save_file(tensors, beside, {key: json.dumps(value) for key, value in header.items()})
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: str | Path, model: Transformer | None = None) -> CachedValues:
        """Reads what `save` wrote, memory-mapped. With the `model` that ran, the cache decomposes and speaks of tokens.

        Raises:
            ValueError: the file holds something else, or is of another model.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                header = {key: json.loads(value) for key, value in (opened.metadata() or {}).items()}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{file} is not a cache that ActivationCache.save wrote: {error}") from None
        if header.get("format") != FORMAT:
            raise ValueError(f"{file} is not a cache that ActivationCache.save wrote: it says {header.get('format')!r}")
        others = {name: tuple(value) if isinstance(value, list) else value for name, value in header["others"].items()}
        held = {**tensors, **others}
        points = {name.removesuffix(GRAD): entry for name, entry in header["points"].items()}
        cache = cls.__new__(cls)
        cache.__setstate__(
            {
                "_values": {name: held[name] for name in header["points"]},
                "_names": Names.of({name: (layout_named(kind), what) for name, (kind, what) in points.items()}),
                "_gone": frozenset(header["gone"]),
                "_new": header["new"],
                "_config": header["config"] and TransformerConfig.from_dict(header["config"]),
            }
        )
        if model is not None:
            cache.model = model
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """Values and names, without the model: `torch.save(cache, file)`, `torch.load(file, weights_only=False)`."""
        values = {name: owned(value) if isinstance(value, Tensor) else value for name, value in self.items()}
        return {
            "_values": values,
            "_names": self._names,
            "_gone": self._gone,
            "_new": self._new,
            "_config": self._config,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_config": None, "_new": None, **state}, _model=lambda: None)

    def __copy__(self) -> CachedValues:
        return self._map(lambda _, value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedValues:
        return self.map(torch.clone)

    def __getitem__(self, key: Any) -> Value:
        if isinstance(key, str) and key in self._values:
            return self._looked_at(key)
        name = key[0] if isinstance(key, tuple) else key
        is_grad = isinstance(name, str) and name.endswith(GRAD)
        plain = name.removesuffix(GRAD) if is_grad else name
        point, _, positions_first = self._names.one((plain, *key[1:]) if isinstance(key, tuple) else plain)
        full = point.name + GRAD if is_grad else point.name
        if full not in self._values:
            raise UnknownName(f"{full} is not in this cache: {self._why_missing(full)}")
        value = self._looked_at(full)
        turn = positions_first and "seq" not in self._gone
        return rearrange(value, "... head seq dim -> ... seq head dim") if turn else value

    def _looked_at(self, full: str) -> Any:
        if isinstance(value := self._values[full], Deferred):
            with torch.inference_mode(False), torch.no_grad():
                value = self._values[full] = value.compute()
        return value

    @staticmethod
    def _why_missing(full: str) -> str:
        if full.endswith(GRAD):
            return "run with incl_bwd=True, and call backward() on the output or a loss made of it"
        return "names_filter left it out, or the run did not reach it"

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stack(self, value: str) -> Tensor:
        """`value`, or `value_grad`, of every layer that has it, [layers ...]."""
        grad = GRAD if value.endswith(GRAD) else ""
        targets = self._names.targets(value.removesuffix(GRAD))
        names = [target.theirs if target.positions_first else target.point.name for target in targets]
        return torch.stack([self[name + grad] for name in names])

    def map(self, fn: Callable[[Tensor], Tensor]) -> CachedValues:
        """A cache of the same names, each tensor through `fn`."""
        return self._map(lambda _, value: fn(value))

    def _map(self, fn: Callable[[HookPoint, Tensor], Tensor]) -> CachedValues:
        values = {
            name: fn(self._names.points[name.removesuffix(GRAD)], value) if isinstance(value, Tensor) else value
            for name, value in self.items()
        }
        mapped = type(self).__new__(type(self))
        mapped.__dict__.update(self.__dict__, _values=values)
        return mapped

    def to(self, *args: Any, **kwargs: Any) -> CachedValues:
        """The cache with its tensors moved or cast as `Tensor.to` does, integers moved alone; the model stays where it
        is."""

        def to(value: Tensor) -> Tensor:
            moved = value.to(*args, **kwargs)
            return moved if value.is_floating_point() else value.to(moved.device)

        return self.map(to)

    def detach(self) -> CachedValues:
        """The cache out of the autograd graph."""
        return self.map(Tensor.detach)

    def slice(self, batch: Slice | None = None, position: Slice | None = None) -> CachedValues:
        """Some rows and positions of every value; a single index takes its axis out. Positions are those of the
        stream, which under a kv_cache are the new ones: of a pattern, its queries, while its keys stay whole. A slice
        holds what it shows: the whole can go."""

        batch, position = _single(batch), _single(position)
        asked = {name for name, index in (("batch", batch), ("seq", position)) if index is not None}
        if gone := asked & self._gone:
            raise ValueError(f"this cache has no {' or '.join(sorted(gone))} axis any more: slice the whole cache")

        def cut(point: HookPoint, value: Tensor) -> Tensor:
            names = [name for name in axes(point.layout) if name not in self._gone]
            for name, index in (("seq", position), ("query", position), ("batch", batch)):
                if index is not None and name in names:
                    at = names.index(name)
                    if name == "seq" and self._new is not None:  # keys and masks have what was read before, too
                        value = value.narrow(at, value.shape[at] - self._new, self._new)
                    value = value[(slice(None),) * at + (index,)]
            return owned(value)

        sliced = self._map(cut)
        taken = {name for name, index in (("batch", batch), ("seq", position)) if isinstance(index, int)}
        sliced._new = self._new if position is None else None
        sliced._gone = self._gone | taken | ({"query"} if "seq" in taken else set())
        return sliced

    @property
    def num_bytes(self) -> int:
        """What is held: memory that several values share, neighbours that are one tensor say, counts once; values that
        wait until they are looked at count when they are there."""
        tensors = [value for value in self._values.values() if isinstance(value, Tensor)]
        held = {(tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in held.values())

    def _ipython_key_completions_(self) -> list[Any]:
        layers = {self._names.points[name.removesuffix(GRAD)] for name in self}
        return [*self, *[(point.value, point.layer) for point in layers if point.layer is not None]]

    def __repr__(self) -> str:
        groups: dict[str, list[str]] = {}
        for name in self:
            point = self._names.points[name.removesuffix(GRAD)]
            groups.setdefault(point.value + (GRAD if name.endswith(GRAD) else ""), []).append(name)
        lines = [f"{type(self).__name__}({len(self)} values, {self.num_bytes / 1e6:.1f} MB"]
        for value, names in groups.items():
            if isinstance(first := self._values[names[0]], Deferred):
                lines.append(f"  {value}: computed when it is looked at x {len(names)} layers")
                continue
            shape = f"{list(first.shape)} {str(first.dtype)[6:]}" if isinstance(first, Tensor) else repr(first)
            count = "" if "." not in names[0] else f" x {len(names)} layers"
            lines.append(f"  {value}: {shape}{count}")
        return "\n".join(lines) + ")"


def owned(value: Tensor, alias: bool = False) -> Tensor:
    """The tensor, or a copy where it is a part of a larger one, which it would keep alive, or an `alias` of memory that
    somebody goes on with."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # has no memory of its own to look at
        return value
    return value.clone() if alias or value.untyped_storage().nbytes() > value.nbytes else value


def _placed(value: Any, device: torch.device | str | None, remove_batch_dim: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if remove_batch_dim and value.shape[0] != 1:
        raise ValueError(f"remove_batch_dim is for a batch of one; this one has {value.shape[0]} rows")
    value = value if device is None else value.to(device)
    return value[0] if remove_batch_dim else value


def _same_build(one: TransformerConfig | None, other: TransformerConfig) -> bool:
    """Whether two models differ in nothing but their dtype; of a file of an earlier version nothing is known."""
    return one is None or dataclasses.replace(one, dtype=other.dtype) == other


def _single(index: Any) -> Any:
    """A single index as a whole number, whatever kind of number it is."""
    if isinstance(index, numbers.Integral) or (isinstance(index, Tensor) and index.ndim == 0):
        return int(index)
    return index


class StepCaches(list[CachedValues]):
    """One cache a step of a generation: the prompt pass first."""

    def cat(self) -> CachedValues:
        """One cache over all positions, where a value's layout has them; else the last step's. A pattern's row has its
        step's keys in their places; elsewhere zero, of scores the lowest finite number, as a pass has it."""
        first = self[0]
        values = {name: self._joined(name) for name in first}
        return type(first)(values, first._names, first.model)

    def _joined(self, name: str) -> Any:
        values, point = [cache[name] for cache in self], self[0]._names.points[name]
        names = axes(point.layout)
        along = next((names.index(each) for each in ("query", "seq") if each in names), None)
        if not isinstance(values[0], Tensor) or along is None or name == "attention_mask":
            return values[-1]
        unseen = torch.finfo(values[0].dtype).min if point.value == "attention_scores" else 0
        prompt = values[0].shape[along]
        joined = values[0].new_empty(0)
        for step, value in enumerate(values):  # a pass covers the last positions up to its own
            end = prompt + step
            if "key" in names:
                before = end - value.shape[-1]
                value = F.pad(value, (before, len(values) - 1 - step), value=unseen)
            start = end - value.shape[along]
            joined = value if start == 0 else torch.cat((joined.narrow(along, 0, start), value), dim=along)
        return joined
