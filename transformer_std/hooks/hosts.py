"""Hosts: the modules that have standard values, and which values each has."""

from __future__ import annotations

from collections.abc import Iterator

from transformer_std.hooks.hook_point import HookPoint
from transformer_std.modules import Direct


class Unavailable(KeyError):
    """A standard value that this block does not have; the message says why."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Host(Direct):
    """A module with standard values. `HookPoint`s of its class become its own; a value of its kind of host that the
    instance lacks is an `Unavailable` in the same place, or falls under `lacks`.

    `host` names the kind of host; all classes of one kind share a vocabulary.
    """

    host: str = ""
    lacks: str = "this block does not compute it"

    def __init__(self) -> None:
        super().__init__()
        for name in own_values(type(self)):
            self.__dict__[name] = getattr(type(self), name).fresh()

    def without(self, reason: str, *names: str) -> None:
        """Says that this instance does not have the values `names`, and why."""
        for name in names:
            self.__dict__[name] = Unavailable(reason)

    def hook_points(self) -> dict[str, HookPoint]:
        return {name: self.__dict__[name] for name in own_values(type(self)) if self.has(name)}

    @property
    def path(self) -> str:
        """Where the host is in its model, `layers.3.self_attn`; empty for the model."""
        return next(iter(self.hook_points().values())).name.rpartition(".")[0]

    def has(self, name: str) -> bool:
        return isinstance(self.__dict__.get(name), HookPoint)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - set(self.absent()))

    def absent(self) -> dict[str, str]:
        """Each value of this kind of host that the instance does not have, with the reason."""
        return {
            name: missing.reason if isinstance(missing := self.__dict__.get(name), Unavailable) else self.lacks
            for name in vocabulary(self.host)
            if not self.has(name)
        }


class Missing(Host):
    """In the place of a host that a block does not have: all of its values are unavailable, for one reason."""

    def __init__(self, host: str, reason: str):
        super().__init__()
        self.host, self.lacks = host, reason


def own_values(cls: type) -> list[str]:
    """The values that a class declares, those of its bases first."""
    declared = [vars(base) for base in reversed(cls.__mro__)]
    return [name for names in declared for name, item in names.items() if isinstance(item, HookPoint)]


def subclasses(cls: type[Host]) -> Iterator[type[Host]]:
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def vocabulary(host: str) -> dict[str, HookPoint]:
    """Every value that any class of this kind of host declares, in order of declaration."""
    classes = [cls for cls in subclasses(Host) if cls.host == host]
    return {name: getattr(cls, name) for cls in classes for name in own_values(cls)}
