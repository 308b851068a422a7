"""What may be kept for later, and what may be looked at.

A forward is not always run on the spot: a compiler or a tracer writes it down, a fake tensor mode runs it without
numbers, a function transform with many at once, a GPU some time later. A tensor that was made meanwhile is of no use
afterwards, and a look at its numbers fails, or stops everything until they are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

MODES = torch._C._TorchDispatchModeKey
LOCAL = "cpu"  # the device whose memory is read without waiting
Made = TypeVar("Made")


def can_look(x: Tensor) -> bool:
    """Whether the numbers of `x` are at hand: it has some, and they are in this machine's memory."""
    return x.device.type == LOCAL and has_numbers(x)


def has_numbers(x: Tensor) -> bool:
    """Whether `x` has numbers to look at, if only by waiting for them."""
    return not (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_meta
        or torch.jit.is_tracing()
        or torch._C._get_dispatch_mode(MODES.FAKE) is not None
        or torch._C._get_dispatch_mode(MODES.PROXY) is not None
        or _one_of_many(x)
    )


def _one_of_many(x: Tensor) -> bool:
    """Whether vmap has `x` stand for each tensor of a batch."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def transformed() -> bool:
    """Whether a function transform (vmap, grad, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def can_keep() -> bool:
    """Whether a tensor made now is plain, and as good for any later run: whatever stands between us and the kernels,
    nothing is kept."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or transformed()
    )


def kept(maxsize: int | None) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """`functools.lru_cache` for what is made of tensors: it takes and keeps only where `can_keep()`."""

    def decorate(make: Callable[..., Made]) -> Callable[..., Made]:
        @functools.lru_cache(maxsize)
        def once(*args: object) -> Made:
            with torch.inference_mode(False):  # what is kept must serve autograd too
                return make(*args)

        @functools.wraps(make)
        def call(*args: object) -> Made:
            return once(*args) if can_keep() else make(*args)

        return call

    return decorate
