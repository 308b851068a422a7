"""Whose hooks a run hears: its own, and those of the `with` blocks that are open around it.

What is set for one run or in one context is seen nowhere else: another thread, a model that runs inside a hook and a
nested `run_with_cache` each have their own. A compiler cannot read context variables; a compiled run hears every hook
that is attached when it is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch


class Attachable(Protocol):
    """What a scope holds: a handle, which can be off the model and on it again."""

    attached: bool

    def attach_again(self) -> None: ...
    def detach(self) -> None: ...
    def remove(self) -> None: ...


class Scope:
    """Hooks that belong together: those of a `with model.hooks(...)`, or of one run; each knows it by its `token`."""

    def __init__(self) -> None:
        self.handles: list[Attachable] = []
        self.token = object()


@dataclass(frozen=True)
class Run:
    """What the runs of a context hear.

    Attributes:
        around: the `with` blocks that are open.
        own: what belongs to one run alone: the next that begins, or the one that has begun.
        step: of a generation, likewise.
    """

    around: frozenset[Scope] = frozenset()
    own: frozenset[Scope] = frozenset()
    step: int = 0
    begun: bool = False
    heard: frozenset[object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heard", frozenset(scope.token for scope in self.around | self.own))

    def begin(self) -> Run:
        """The run that starts now; one that starts inside another takes nothing of what belongs to that one."""
        return Run(self.around, begun=True) if self.begun else replace(self, begun=True)

    def next(self, **changes: Any) -> Run:
        """Before a run: what it will have for itself, beside what was said of it so far."""
        return replace(Run(self.around) if self.begun else self, **changes)


IDLE = Run()
RUN: ContextVar[Run] = ContextVar("transformer_std_run", default=IDLE)


class Clock:
    """The step that was set last, by anybody: all that a compiler can read."""

    step = 0


CLOCK = Clock()


def step_now() -> int:
    return CLOCK.step if torch.compiler.is_compiling() else RUN.get().step


def heard_now() -> frozenset[object] | None:
    """The tokens of the scopes whose hooks are heard; None where a compiler traces, and all are."""
    return None if torch.compiler.is_compiling() else RUN.get().heard


@contextlib.contextmanager
def _being(run: Run) -> Iterator[None]:
    token = RUN.set(run)
    try:
        yield
    finally:
        RUN.reset(token)


def for_one_run(scope: Scope) -> contextlib.AbstractContextManager[None]:
    """The next run in this context hears `scope`, and no other does."""
    run = RUN.get().next()
    return _being(replace(run, own=run.own | {scope}))


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """The next run in this context is this step of a generation."""
    before, CLOCK.step = CLOCK.step, step
    try:
        with _being(RUN.get().next(step=step)):
            yield
    finally:
        CLOCK.step = before


def open_around(scope: Scope) -> None:
    """Every run of this context hears `scope`, until it is closed."""
    run = RUN.get()
    RUN.set(replace(run, around=run.around | {scope}))


def close(scope: Scope) -> None:
    run = RUN.get()
    left = replace(run, around=run.around - {scope})
    RUN.set(IDLE if left == IDLE else left)


def begins_run(call: Callable[..., Any]) -> Callable[..., Any]:
    """A model's call, as a run of its own."""

    @functools.wraps(call)
    def begun(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (run := RUN.get()) is IDLE:
            return call(self, *args, **kwargs)
        with _being(run.begin()):
            return call(self, *args, **kwargs)

    return begun


def of_its_run(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward, which under activation checkpointing runs once more in the backward: with the hooks of the run
    that it was part of, which is its last argument then, also where they are gone from the model since."""

    @functools.wraps(forward)
    def again(self: Any, x: Any, *given: Any) -> Any:
        run = given[-1] if given and isinstance(given[-1], Run) else None
        if run is None:
            return forward(self, x, *given)
        if torch.compiler.is_compiling() or RUN.get() is run:
            return forward(self, x, *given[:-1])
        gone = [handle for scope in run.around | run.own for handle in scope.handles if not handle.attached]
        for handle in gone:
            handle.attach_again()
        try:
            with _being(run):
                return forward(self, x, *given[:-1])
        finally:
            for handle in gone:
                handle.detach()

    return again
