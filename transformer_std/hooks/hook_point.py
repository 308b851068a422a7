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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_std.hooks.runs import Scope, heard_now, step_now
from transformer_std.layouts import describe, is_integer

# Of a value, or its gradient, and the hook point, to the new value, or None to leave it.
if TYPE_CHECKING:
    HookFn = Callable[[Any, "HookPoint"], Tensor | None]
else:
    HookFn = Callable[[Any, Any], Any]


LOCK = threading.Lock()  # of the points' handles: several threads may use one model


class Handle:
    """One function attached to hook points. `remove()` detaches it; so does leaving `with handle:`.

    Args:
        fn: called with the value, or with its gradient, and the hook point.
        backward: it is called in the backward.
        reads: it is the library's own: it looks, never edits, and costs no copy.
        defers: a reader that is content with a `Deferred` in the place of a value.
        permanent: `reset_hooks` leaves it.
        scope: the run or `with` block that it belongs to; None: every run hears it.
    """

    def __init__(
        self,
        fn: HookFn,
        *,
        backward: bool = False,
        reads: bool = False,
        defers: bool = False,
        permanent: bool = False,
        scope: Scope | None = None,
    ):
        self.fn, self.backward, self.reads, self.defers, self.permanent = fn, backward, reads, defers, permanent
        # Not the scope, which holds handles: what is deleted is to be freed without waiting for the garbage collector.
        self.scope = None if scope is None else scope.token
        self.active = True
        self._places: list[tuple[HookPoint, HookFn, HookPoint]] = []
        self.attached = False
        if scope is not None:
            scope.handles.append(self)

    def attach(self, point: HookPoint, adapt: Callable[[HookFn, HookPoint], HookFn] | None = None) -> None:
        """To `point`; `adapt` makes of the function, and of the point as it sees it, the one that is called."""
        point.check_takes(self)
        here = point if self.scope is None or self.reads else point.with_notes()
        self._places.append((point, self.fn if adapt is None else adapt(self.fn, here), here))
        self._put(*self._places[-1])

    def _put(self, point: HookPoint, fn: HookFn, here: HookPoint) -> None:
        # Between the others and the backward hooks, which watch what those made of the value, the last attached first:
        # so the gradient comes to the first attached first.
        with LOCK:
            if others := point._handles:
                at = sum(not each.handle.backward for each in others)
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
        kind = "backward" if self.backward else "forward"
        return f"<{kind} hook {getattr(self.fn, '__name__', self.fn)!s} at {where}>"


class Attached(NamedTuple):
    """A handle at one hook point, its function as this point calls it, and the point as the function sees it."""

    handle: Handle
    fn: HookFn
    here: HookPoint


class Deferred:
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
        derived: it is made beside the forward, where it is watched; only a change of it goes in.
        step: 0 on a prompt pass, then the number of the decode step; of the run that asks.
        ctx: a dict for hooks to keep things in: those of one run or `with` block as long as it lasts, those of
            `add_hook` as long as any is attached here.
    """

    __slots__ = (
        "__weakref__",
        "_handles",
        "ctx",
        "derived",
        "description",
        "layer",
        "layout",
        "name",
        "value",
        "write",
    )

    def __init__(self, layout: Any, description: str, write: str | None = None, *, derived: bool = False):
        self.layout, self.description, self.derived = layout, description, derived
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
    def writes(self) -> bool:
        return bool(self._handles) and any(not (each.handle.reads or each.handle.backward) for each in self.heard())

    def beside(
        self, compute: Callable[..., Tensor], *tensors: Tensor, wait: bool = True, copy: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Shows `compute(*tensors)`, a value that the forward itself goes on without.

        Args:
            compute: makes the value; not called where nothing watches it.
            tensors: what it is made of.
            wait: it may be computed when it is looked at, where that suits all that watch.
            copy: what it is made of may change until then.

        Returns:
            The value, and what hooks made of it; None where they changed nothing and watch no gradient.
        """
        heard = self.heard() if self._handles else []
        if not heard:
            return None
        if wait and all(each.handle.defers for each in heard):
            kept = [each.detach().clone() if copy else each.detach() for each in tensors]
            for each in heard:
                if each.handle.active:
                    each.fn(Deferred(functools.partial(compute, *kept)), self)
            return None
        value = compute(*tensors)
        edited = self(value)
        unchanged = edited is value and not any(each.handle.backward for each in heard)
        return None if unchanged else (value, edited)

    def __getstate__(self) -> dict[str, Any]:
        """Without its hooks: a copy is a place of its own."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("__weakref__", "_handles", "ctx")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {"derived": False, **state, "_handles": (), "ctx": {}}.items():
            if name in self.__slots__:  # files of earlier versions have a step
                setattr(self, name, value)

    def with_notes(self) -> HookPoint:
        """The point as the hooks of one scope see it: with a `ctx` of their own."""
        here = HookPoint.__new__(HookPoint)
        here.__setstate__(self.__getstate__())
        return here

    def fresh(self) -> HookPoint:
        return HookPoint(self.layout, self.description, self.write, derived=self.derived)

    def check_takes(self, handle: Handle) -> None:
        if handle.backward and is_integer(self.layout):
            raise ValueError(f"{self.name} holds integers: it has no gradient, and a backward hook could never fire")

    def _pass(self, value: Any) -> Any:
        mine, scopes = False, heard_now()
        for attached in self._handles:
            handle, fn, here = attached
            if not _belongs(handle.scope, scopes):
                continue
            if handle.backward:
                value = self._watch_gradient(value, attached)
            elif handle.reads:
                if handle.active:  # it is not in a block that is computed again for its gradients
                    fn(value, self)
                mine = False
            else:
                # A hook may edit in place, and the same tensor can be another value's or be held by a cache.
                if not mine and isinstance(value, Tensor):
                    value, mine = laid_out_as(value, value), True
                new = self._edited(value, fn, here)
                value, mine = new, mine and new is value
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
        if handle.reads:
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
