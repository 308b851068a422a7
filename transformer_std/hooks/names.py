"""Names of values: what a user may ask for, and which hook points that means."""

from __future__ import annotations

import difflib
import fnmatch
import operator
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from torch import nn

from transformer_std.hooks import transformer_lens
from transformer_std.hooks.hook_point import HookFn, HookPoint
from transformer_std.hooks.hosts import Host, Unavailable, vocabulary

# A full name, a value name, a (value, layer) pair, a glob, a list of these, a function of the full name, or None.
if TYPE_CHECKING:
    Name = str | tuple[str, SupportsIndex] | HookPoint
    NamesFilter = Name | Iterable[Name] | Callable[[str], bool] | None
else:
    NamesFilter = Any  # what is none of them is told by an error of ours


class Target(NamedTuple):
    """A hook point that was asked for. `theirs`: by this name of TransformerLens; `positions_first`: which has its axes
    in that order."""

    point: HookPoint
    theirs: str = ""
    positions_first: bool = False

    def adapt(self, fn: HookFn, here: HookPoint) -> HookFn:
        """`fn` as it is called at the point, in the manner of the name."""
        return transformer_lens.spoken(fn, here, self.theirs, self.positions_first) if self.theirs else fn


class UnknownName(KeyError):
    """A name that no module of this model has; the message has the closest ones."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Names:
    """The tree of a model as an index.

    Attributes:
        points: full name -> hook point, in order of the tree.
        absent: full name -> why this block does not have the value.
        by_value: value -> {layer: hook point or reason}; layer is None on the root.
    """

    def __init__(self, model: nn.Module):
        self.points: dict[str, HookPoint] = {}
        self.absent: dict[str, str] = {}
        self.by_value: dict[str, dict[int | None, HookPoint | str]] = {}
        self.num_layers = 0
        for path, module in model.named_modules():
            if isinstance(module, Host):
                self._add(path, module)

    @classmethod
    def of(cls, points: dict[str, tuple[Any, str]]) -> Names:
        """An index of some values of a model that is not here: full name -> layout and description."""
        names = cls(nn.Module())
        for full, (layout, description) in points.items():
            parts = full.split(".")
            point = names.points[full] = HookPoint(layout, description)
            point.name, point.layer = full, int(parts[1]) if len(parts) > 1 else None
            point.value = ".".join(parts[3:] or parts[-1:])
            names.by_value.setdefault(point.value, {})[point.layer] = point
            names.num_layers = max(names.num_layers, -1 if point.layer is None else point.layer + 1)
        return names

    def _add(self, path: str, host: Host) -> None:
        parts = path.split(".") if path else []
        layer = int(parts[1]) if parts else None
        self.num_layers = max(self.num_layers, -1 if layer is None else layer + 1)
        here: dict[str, HookPoint | str] = {**host.hook_points(), **host.absent()}
        for name in vocabulary(host.host):
            entry = here[name]
            full, value = ".".join([*parts, name]), ".".join([*parts[3:], name])
            self.by_value.setdefault(value, {})[layer] = entry
            if isinstance(entry, HookPoint):
                entry.name, entry.value, entry.layer = full, value, layer
                self.points[full] = entry
            else:
                self.absent[full] = entry

    def resolve(self, names_filter: NamesFilter) -> list[HookPoint]:
        """The hook points that a `names_filter` means, each once, in order of the tree; raises as `targets` does."""
        if names_filter is None:
            return list(self.points.values())
        wanted = {id(target.point) for target in self.targets(names_filter)}
        return [point for point in self.points.values() if id(point) in wanted]

    def targets(self, names_filter: NamesFilter) -> list[Target]:
        """The hook points that a `names_filter` means, each once, and whose axes its name speaks.

        Raises:
            Unavailable: a value that exists, but not here.
            UnknownName: a name that exists nowhere in this model.
            TypeError: not a kind of filter.
        """
        return list({id(target.point): target for target in self._find(names_filter)}.values())

    def _find(self, wanted: Any) -> Iterable[Target]:
        if isinstance(wanted, str):
            return self._by_string(wanted)
        if isinstance(wanted, HookPoint):
            return [Target(self.points[wanted.name])]
        if (
            isinstance(wanted, tuple)
            and len(wanted) == 2
            and isinstance(wanted[0], str)
            and isinstance(wanted[1], Integral)
        ):
            return [self.at(*wanted)]
        if callable(wanted):
            found = [Target(point) for name, point in self.points.items() if wanted(name)]
            by_theirs = map(self._by_theirs, self.points.values())
            found = found or [target for target in by_theirs if target.theirs and wanted(target.theirs)]
            if not found:
                raise UnknownName(f"{wanted!r} is true of no name of this model, so it means no value")
            return found
        if isinstance(wanted, Iterable):
            return [target for each in wanted for target in self._find(each)]
        raise TypeError(
            f"names_filter is {wanted!r}; give a name, a value name, a (value, layer) pair, a glob, a list of these, "
            "or a function of the name"
        )

    def _by_string(self, name: str) -> Iterable[Target]:
        if name in self.points:
            return [Target(self.points[name])]
        if name not in self.by_value and (short := name.removeprefix("hook_")) in transformer_lens.SHORT:
            return [self._by_theirs(target.point) for target in self._by_string(transformer_lens.SHORT[short])]
        if (ours := transformer_lens.translate(name)) is not None:
            return [self._by_theirs(target.point) for target in self._by_string(ours)]
        if name in self.by_value:
            return self._everywhere(name)
        if any(each in name for each in "*?["):
            return self._by_glob(name)
        raise self.miss(name)

    def _by_theirs(self, point: HookPoint) -> Target:
        return Target(point, transformer_lens.name_of(point.name) or "", transformer_lens.positions_first(point.value))

    def _by_glob(self, pattern: str) -> list[Target]:
        found = [Target(point) for name, point in self.points.items() if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise UnknownName(f"no value of this model matches {pattern!r}")
        return found

    def _everywhere(self, value: str) -> list[Target]:
        entries = self.by_value[value].values()
        found = [Target(entry) for entry in entries if isinstance(entry, HookPoint)]
        if not found:
            raise Unavailable(f"{value} is unavailable on every layer: {next(iter(entries))}")
        return found

    def at(self, value: str, layer: SupportsIndex) -> Target:
        """The hook point of `value` in block `layer` (negative: from the last block)."""
        if value not in self.by_value and value in transformer_lens.SHORT:
            return self._by_theirs(self.at(transformer_lens.SHORT[value], layer).point)
        if value in self.points and value not in self.by_value:
            raise UnknownName(f"{value!r} is a full name, and has its layer: ask for it alone")
        if value not in self.by_value:
            raise self.miss(value)
        entries = self.by_value[value]
        if None in entries:
            raise UnknownName(f"{value} is a value of the model, not of a block: ask for {value!r} without a layer")
        index = self.layer(layer)
        entry = entries[index]
        if isinstance(entry, str):
            raise Unavailable(f"{value} is unavailable on layer {index}: {entry}")
        return Target(entry)

    def one(self, name: str | tuple[str, SupportsIndex]) -> Target:
        """The one hook point that `name` or `(value, layer)` means; for look-ups."""
        if isinstance(name, tuple):
            return self.at(*name[:2])
        if name in self.points:
            return Target(self.points[name])
        if (ours := transformer_lens.translate(str(name))) is not None:
            return self._by_theirs(self.one(ours).point)
        if name in self.by_value and None not in self.by_value[name]:
            raise UnknownName(f"{name} is a value of every block: ask for ({name!r}, layer)")
        raise self.miss(name)

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """Every value's name -> None where it is there, or {layer: why not}; of one `layer`, None or why not."""
        if layer is None:
            missing = {
                value: {at: entry for at, entry in entries.items() if isinstance(entry, str)}
                for value, entries in self.by_value.items()
            }
            return {value: reasons or None for value, reasons in missing.items()}
        index = self.layer(layer)
        entries = {value: at[index] for value, at in self.by_value.items() if index in at}
        return {value: entry if isinstance(entry, str) else None for value, entry in entries.items()}

    def explicit(self, names_filter: NamesFilter) -> list[HookPoint]:
        """The hook points that a filter names one by one: by a full name, or a value and its layer."""
        if isinstance(names_filter, str):
            return [self.points[names_filter]] if names_filter in self.points else []
        if isinstance(names_filter, tuple) and len(names_filter) == 2 and isinstance(names_filter[1], Integral):
            return [self.at(*names_filter).point]
        if isinstance(names_filter, (list, tuple)):
            return [point for each in names_filter for point in self.explicit(each)]
        return []

    def layer(self, layer: SupportsIndex) -> int:
        """A block's number; a negative one counts from the last."""
        at = operator.index(layer)
        if not -self.num_layers <= at < self.num_layers:
            raise UnknownName(f"layer {layer} is out of range: the model has layers 0 to {self.num_layers - 1}")
        return at % self.num_layers

    def miss(self, name: str) -> KeyError:
        """The error for a `name` without a hook point: `Unavailable` with its reason, or the closest names."""
        if name in self.absent:
            return Unavailable(f"{name} is unavailable: {self.absent[name]}")
        theirs = [their for each in self.points if (their := transformer_lens.name_of(each))]
        known = dict.fromkeys([*self.by_value, *transformer_lens.SHORT, *self.points, *theirs])
        close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(close)}?" if close else "; support() lists what there is"
        return UnknownName(f"this model has no value {name!r}{hint}")
