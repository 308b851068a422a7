"""Hook points: where a standard value is computed, read and written.

A value is declared once, as a class attribute of the module that computes it:

    class Attention(Host):
        attention_scores = HookPoint(Pattern, "The attention scores entering the softmax, scaled and masked")

and passed through it in the forward: `scores = self.attention_scores(scores)`. Its path in the tree is its name. With
nothing attached the call hands its argument back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from transformer_std.layouts import describe, is_integer
from transformer_std.modules import Direct
from transformer_std.runs import Scope, heard_now, step_now

# A reader is the library's own: it looks, never edits, and costs no copy.
Kind = Literal["forward", "backward", "read", "read_backward"]

BACKWARD, READERS = ("backward", "read_backward"), ("read", "read_backward")


class Unavailable(KeyError):
    """A standard value that this block does not have; the message says why."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


LOCK = threading.Lock()  # of the points' handles: several threads may use one model


class Handle:
    """One function attached to hook points. `remove()` detaches it; so does leaving `with handle:`."""

    def __init__(
        self,
        kind: Kind,
        fn: Callable[..., Any],
        permanent: bool = False,
        takes_later: bool = False,
        scope: Scope | None = None,
    ):
        self.kind, self.fn, self.permanent = kind, fn, permanent
        self.takes_later = takes_later  # a reader that is content with a `Later` in the place of a value
        # Of the run or `with` block that it belongs to; None: every run hears it. (Not the scope, which holds handles:
        # what is deleted is to be freed without waiting for the garbage collector.)
        self.scope = None if scope is None else scope.token
        self.active = True
        self._places: list[tuple[HookPoint, Callable[..., Any], HookPoint]] = []
        self.attached = False
        if scope is not None:
            scope.handles.append(self)

    def attach(self, point: HookPoint, lens: str = "", heads_behind: bool = False) -> None:
        """To `point`. Under a `lens` name the function hears that name from its hook; `heads_behind`: and speaks
        [batch seq head dim] where the value is [batch head seq dim]."""
        point.check_takes(self)
        here = point if self.scope is None or self.kind in READERS else point.with_notes()
        fn = functools.partial(_through_lens, self.fn, LensPoint(here, lens), heads_behind) if lens else self.fn
        self._places.append((point, fn, here))
        self._put(*self._places[-1])

    def _put(self, point: HookPoint, fn: Callable[..., Any], here: HookPoint) -> None:
        # Between the others and the backward hooks, which watch what those made of the value, the last attached first:
        # so the gradient comes to the first attached first.
        with LOCK:
            if others := point._handles:
                at = sum(each.handle.kind not in BACKWARD for each in others)
                point._handles = (*others[:at], Attached(self, fn, here), *others[at:])
            else:
                point._handles = (Attached(self, fn, here),)
        self.attached = True

    def attach_again(self) -> None:
        """To all points that it was attached to."""
        for place in self._places:
            self._put(*place)

    def detach(self) -> None:
        """Off the model; a graph that was built while it was attached still calls it in its backward."""
        for point, *_ in self._places if self.attached else ():
            with LOCK:
                others = len(point._handles) > 1
                point._handles = tuple([each for each in point._handles if each.handle is not self]) if others else ()
                if self.scope is None and not any(each.handle.scope is None for each in point._handles):
                    point.ctx.clear()
        self.attached = False

    def remove(self) -> None:
        self.detach()
        self.active = False

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        where = ", ".join(point.name for point, *_ in self._places) if self.attached else "removed"
        return f"<{self.kind} hook {getattr(self.fn, '__name__', self.fn)!s} at {where}>"


class Attached(NamedTuple):
    """A handle at one hook point, its function as this point calls it, and the point as the function sees it."""

    handle: Handle
    fn: Callable[..., Any]
    here: HookPoint


class LensPoint:
    """A hook point as TransformerLens' scripts know it: under its name there, and with `layer()`."""

    def __init__(self, point: HookPoint, name: str):
        self._point, self.name = point, name

    def layer(self) -> int | None:
        return self._point.layer

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_point"), name)


def _through_lens(fn: Callable[..., Any], lens: LensPoint, heads_behind: bool, value: Tensor, hook: HookPoint) -> Any:
    if not heads_behind:
        return fn(value, lens)
    seen = rearrange(value, "batch head seq dim -> batch seq head dim")
    new = fn(seen, lens)
    if not isinstance(new, Tensor) or new.ndim != 4:
        return new
    return None if new is seen else rearrange(new, "batch seq head dim -> batch head seq dim")


class Later:
    """A value that is computed when it is first looked at, from tensors that nothing changes until then."""

    def __init__(self, compute: Callable[[], Tensor]):
        self.compute = compute


class HookPoint:
    """A standard value's place in the forward.

    Attributes:
        name: the full name in the tree, `layers.3.self_attn.attention_queries`.
        value: the name without the host, `attention_queries`.
        layer: the block's index, None on the root.
        layout: jaxtyping alias of the value's shape and kind.
        description: what the value is.
        step: 0 on a prompt pass, then the number of the decode step; of the run that asks.
        ctx: a dict for hooks to keep things in: those of one run or `with` block as long as it lasts, those of
            `add_hook` as long as any is attached here.
    """

    __slots__ = ("__weakref__", "_handles", "ctx", "description", "layer", "layout", "name", "value", "write")

    def __init__(self, layout: Any, description: str, write: str | None = None):
        self.layout, self.description = layout, description
        self.write = write  # on a read-only value, the one to write instead
        self.name = self.value = ""
        self.layer: int | None = None
        self.ctx: dict[Any, Any] = {}
        self._handles: tuple[Attached, ...] = ()

    def __call__(self, value: Any) -> Any:
        return self._pass(value) if self._handles else value

    @property
    def step(self) -> int:
        return step_now()

    def heard(self) -> list[Attached]:
        """What is attached here for the run that asks."""
        scopes = heard_now()
        return [each for each in self._handles if _belongs(each.handle.scope, scopes)]

    @property
    def watched(self) -> bool:
        return bool(self._handles) and bool(self.heard())

    @property
    def can_wait(self) -> bool:
        """Whether all that watches here takes a `Later`."""
        return all(each.handle.takes_later for each in self.heard())

    def later(self, compute: Callable[[], Tensor]) -> None:
        for each in self.heard():
            if each.handle.active:
                each.fn(Later(compute), self)

    @property
    def writes(self) -> bool:
        return bool(self._handles) and any(each.handle.kind == "forward" for each in self.heard())

    @property
    def watches_gradient(self) -> bool:
        return any(each.handle.kind in BACKWARD for each in self.heard())

    def __getstate__(self) -> dict[str, Any]:
        """Without its hooks: a copy is a place of its own."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("__weakref__", "_handles", "ctx")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "_handles": (), "ctx": {}}.items():
            if name in self.__slots__:  # files of earlier versions have a step
                setattr(self, name, value)

    def with_notes(self) -> HookPoint:
        """The point as the hooks of one scope see it: with a `ctx` of their own."""
        here = HookPoint.__new__(HookPoint)
        here.__setstate__(self.__getstate__())
        return here

    def fresh(self) -> HookPoint:
        return HookPoint(self.layout, self.description, self.write)

    def check_takes(self, handle: Handle) -> None:
        if handle.kind in BACKWARD and is_integer(self.layout):
            raise ValueError(f"{self.name} holds integers: it has no gradient, and a backward hook could never fire")

    def _pass(self, value: Any) -> Any:
        mine, scopes = False, heard_now()
        for attached in self._handles:
            handle, fn, here = attached
            if not _belongs(handle.scope, scopes):
                continue
            if handle.kind == "read":
                if handle.active:  # it is not in a block that is computed again for its gradients
                    fn(value, self)
                mine = False
            elif handle.kind == "forward":
                # A hook may edit in place, and the same tensor can be another value's or be held by a cache.
                if not mine and isinstance(value, Tensor):
                    value, mine = laid_out_as(value, value), True
                new = self._edited(value, fn, here)
                value, mine = new, mine and new is value
            else:
                value = self._watch_gradient(value, attached)
        return value

    def _edited(self, value: Any, fn: Callable[[Any, HookPoint], Any], here: HookPoint) -> Any:
        before = value.clone() if self.write and isinstance(value, Tensor) else None
        new = fn(value, here)
        if self.write and (new is not None or (before is not None and not _same(value, before))):
            raise ValueError(f"{self.name} is derived and read-only: write {self.write} instead")
        if new is None or new is value:
            return value
        if not isinstance(new, Tensor):
            raise TypeError(
                f"a hook on {self.name} returned {type(new).__name__}; return a tensor {self._shaped(value)}, "
                "or None to leave the value"
            )
        if (new.shape, new.dtype, new.device) != (value.shape, value.dtype, value.device):
            raise ValueError(
                f"a hook on {self.name} returned {self._shaped(new)}; the value is {self._shaped(value)}: "
                f"{describe(self.layout)}"
            )
        return new if new.stride() == value.stride() else laid_out_as(new, value)

    def _watch_gradient(self, value: Tensor, attached: Attached) -> Tensor:
        if not value.requires_grad:
            if torch.is_grad_enabled():
                return value  # nothing before it needs a gradient, so none is computed
            raise RuntimeError(f"a backward hook on {self.name} needs autograd, and gradients are switched off here")
        value = value.view_as(value)  # neighbouring values can be one tensor; this one's gradient is its own
        value.register_hook(functools.partial(self._pass_gradient, attached))
        return value

    def _pass_gradient(self, attached: Attached, grad: Tensor) -> Tensor | None:
        handle, fn, here = attached
        if not handle.active:
            return None
        if handle.kind == "read_backward":
            fn(grad, self)
            return None
        # Autograd hands one gradient to every summand: a hook that edits in place must have its own.
        return self._edited(grad.clone(), fn, here)

    @staticmethod
    def _shaped(value: Tensor) -> str:
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"

    def __repr__(self) -> str:
        hooks = f", {len(self._handles)} hooks" if self._handles else ""
        return f"HookPoint({self.name or '?'}: {describe(self.layout)}{hooks})"


def laid_out_as(new: Tensor, value: Tensor) -> Tensor:
    """A copy of `new` with the strides of `value`: kernels round differently on other strides."""
    return torch.empty_strided(value.shape, value.stride(), dtype=new.dtype, device=new.device).copy_(new)


def _belongs(scope: object | None, heard: frozenset[object] | None) -> bool:
    return scope is None or heard is None or scope in heard


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


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


def _subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def vocabulary(host: str) -> dict[str, HookPoint]:
    """Every value that any class of this kind of host declares, in order of declaration."""
    classes = [cls for cls in _subclasses(Host) if cls.host == host]  # type: ignore[attr-defined]
    return {name: getattr(cls, name) for cls in classes for name in own_values(cls)}
