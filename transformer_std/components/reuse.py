"""Arithmetic in memory that is no longer needed.

Over a few hundred tokens, memory fresh from the system costs more than the arithmetic; on a few tokens, an operation in
place begins sooner. So `times(x, y)` is x * y, in `x`'s own memory where that is the same:

* autograd records nothing, and nobody will want the old `x` back;
* `y` has x's dtype. Under autocast the two can differ, and x * y is then of the wider one;
* no function transform is under way, where `y` may stand for many.

It is for the caller to see to it that nobody else holds `x`, and that `y` is no larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

transform = torch._C._functorch.peek_interpreter_stack  # None: there is no function transform under way


def free(x: Tensor, y: Tensor) -> bool:
    """Whether `x`'s memory may take the result."""
    recorded = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    return not recorded and x.dtype == y.dtype and transform() is None


def times(x: Tensor, y: Tensor | float) -> Tensor:
    return x.mul_(y) if free(x, y if isinstance(y, Tensor) else x) else x * y


def plus(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y) if free(x, y) else x + y


def filled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """`value` where `mask` is True."""
    return x.masked_fill_(mask, value) if free(x, x) else x.masked_fill(mask, value)
