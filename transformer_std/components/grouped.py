"""Rows grouped by expert, and each group's product with its expert's matrix: pure functions."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std.components.tracing import can_look, has_numbers

Rows = Float[Tensor, "rows width"]
FEW = 32  # experts
# Up to 2.10 the grouped kernel wants its factors at multiples of 16 bytes, where a file's tensors need not lie.
LIES_ANYWHERE = torch.__version__ >= "2.11"
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Where each expert's rows end; or, of the experts that have any, how many.
Groups = Int[Tensor, " num_experts"] | dict[int, int]


def group(expert: Int[Tensor, " rows"], num_experts: int) -> Groups:
    """The groups of rows that are sorted by `expert`."""
    if _few(expert, num_experts) and can_look(expert):
        return collections.Counter(expert.tolist())
    return torch.searchsorted(expert, torch.arange(num_experts, device=expert.device), right=True, out_int32=True)


def by_expert(rows: Rows, weights: Float[Tensor, "num_experts out width"], groups: Groups) -> Float[Tensor, "rows out"]:
    """Each expert's rows, which lie together, times its matrix."""
    rows = rows.to(weights.dtype)  # autocast leaves these products as wide as the weights, as transformers' are
    if not isinstance(groups, Tensor):
        return _one_by_one(rows, weights, groups)
    if torch.compiler.is_compiling() or type(rows) is not Tensor or rows.is_meta:
        return torch.ops.transformer_std.by_expert(rows, weights, groups)
    if has_numbers(groups) or _kernel_takes(rows, weights):
        return _by_expert(rows, weights, groups)
    return torch.ops.transformer_std.by_expert(rows, weights, groups)


def _by_expert(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _kernel_takes(rows, weights) and not (_few(rows, len(weights)) and can_look(ends)):
        return F.grouped_mm(rows, rearrange(weights, "expert out width -> expert width out"), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return _one_by_one(rows, weights, {expert: count for expert, count in enumerate(counts) if count})


def _one_by_one(rows: Tensor, weights: Tensor, counts: dict[int, int]) -> Tensor:
    """One product for each expert that was chosen, and nothing for the others."""
    parts = zip(rows.split(list(counts.values())), counts, strict=True)
    with _no_autocast(rows.device.type):
        return torch.cat([F.linear(part, weights.select(0, expert)) for part, expert in parts])


def _no_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _kernel_takes(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch's grouped product knows this dtype, and has every row begin where its kernels want it."""
    aligned = all(size * rows.element_size() % 16 == 0 for size in weights.shape[1:])
    if not (LIES_ANYWHERE or (has_numbers(rows) and weights.data_ptr() % 16 == 0)):
        return False
    return aligned and rows.dtype in KERNEL_DTYPES and hasattr(F, "grouped_mm")


def _few(rows: Tensor, num_experts: int) -> bool:
    """Whether rows are so few that going through all experts, a microsecond each, costs more than it saves."""
    return num_experts > max(len(rows), FEW)


def _outer_by_expert(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the matrices: each expert's rows of `grad` times its rows."""
    parts = zip(*(each.tensor_split(ends[:-1].tolist()) for each in (grad, rows)), strict=True)
    return torch.stack([rearrange(grad, "row out -> out row") @ row for grad, row in parts])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    by_expert, outer = torch.ops.transformer_std.by_expert, torch.ops.transformer_std.outer_by_expert
    return (
        by_expert(grad, rearrange(weights, "expert out width -> expert width out"), ends),
        outer(rows, grad, ends),
        None,
    )


# To a compiler each is one operation: what is inside depends on the router's choice.
_by_expert_op = torch.library.custom_op(
    "transformer_std::by_expert",
    _by_expert,
    mutates_args=(),
    schema="(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
)
_by_expert_op.register_fake(lambda rows, weights, ends: rows.new_empty(rows.shape[0], weights.shape[1]))
_by_expert_op.register_autograd(_backward, setup_context=_keep)
torch.library.custom_op(
    "transformer_std::outer_by_expert",
    _outer_by_expert,
    mutates_args=(),
    schema="(Tensor rows, Tensor grad, Tensor ends) -> Tensor",
).register_fake(lambda rows, grad, ends: rows.new_empty(ends.shape[0], grad.shape[1], rows.shape[1]))


def take(rows: Rows, index: Int[Tensor, " taken"]) -> Float[Tensor, "taken width"]:
    """rows[index]. The faster kernel sums a row's gradients in another order, so it serves where there are none."""
    return rows[index] if torch.is_grad_enabled() else rows.index_select(0, index)


def unsorted(order: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The permutation that takes sorted rows back to slot order."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
