"""What a forward takes, checked: every refusal, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_std.layouts import Residual

if TYPE_CHECKING:
    Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor
    # Text, texts, token ids [batch seq], chat messages, what a tokenizer returns, or with `start_at_layer` the stream.
    Input = str | Sequence[str] | Ids | Mapping[str, Any] | Sequence[Mapping[str, Any]]
else:
    Input = Any  # what is none of them is told by an error of ours


def check_call(
    return_type: str | None,
    *,
    starts_inside: bool,
    stops_inside: bool,
    whole: bool,
    goes_on: bool,
    last_logits_only: bool,
    loss_per_token: bool,
) -> None:
    """Raises `ValueError` where a call's arguments contradict one another.

    Args:
        return_type: as `forward` takes it.
        starts_inside: there is a start_at_layer.
        stops_inside: there is a stop_at_layer.
        whole: all blocks run.
        goes_on: there is a kv_cache.
        last_logits_only: as `forward` takes it.
        loss_per_token: as `forward` takes it.
    """
    loss = return_type in ("loss", "both")
    if return_type not in ("logits", "loss", "both", None):
        raise ValueError(f"return_type is {return_type!r}; give 'logits', 'loss', 'both' or None")
    if last_logits_only and loss:
        raise ValueError("the loss needs the logits of every position: leave out last_logits_only")
    if loss_per_token and not loss:
        raise ValueError(f"loss_per_token goes with return_type 'loss' or 'both', not {return_type!r}")
    if starts_inside and not stops_inside and loss:
        raise ValueError("the loss needs the tokens, and with start_at_layer there are none: take the logits")
    if goes_on and not whole:
        raise ValueError("a kv_cache needs all layers: leave out start_at_layer and stop_at_layer")


def layer_span(start: int | None, stop: int | None, num_layers: int) -> tuple[int, int]:
    """The first block to run and the first not to. Raises `ValueError` or `TypeError` where there is none."""

    def bound(name: str, layer: int | None, default: int) -> int:
        if layer is not None and not isinstance(layer, int):
            raise TypeError(f"{name} is {layer!r}: give a layer's number")
        at = default if layer is None else layer + num_layers if layer < 0 else layer
        if not 0 <= at <= num_layers:
            raise ValueError(f"{name} is {layer}; the model has {num_layers} layers")
        return at

    first, last = bound("start_at_layer", start, 0), bound("stop_at_layer", stop, num_layers)
    if first > last:
        raise ValueError(f"start_at_layer {start} is past stop_at_layer {stop}")
    return first, last


def checked_stream(input: Any, hidden_size: int, dtype: torch.dtype) -> Residual:
    """The stream that enters a block, in one piece. Raises `ValueError` where `input` is none."""
    if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] != hidden_size:
        got = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(f"with start_at_layer the input is the stream [batch seq {hidden_size}], not {got}")
    if input.numel() == 0 or input.dtype != dtype:
        raise ValueError(
            f"the stream is {list(input.shape)} {input.dtype}; the model reads at least one position of {dtype}"
        )
    return input.contiguous()


def checked_positions(positions: Tensor, stream: Residual) -> Int[Tensor, "batch seq"]:
    """A position for each of the stream's. Raises `TypeError` or `ValueError` on others."""
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        raise TypeError("position_ids are whole numbers in a tensor [batch seq]")
    if positions.ndim != 2 or positions.shape[0] not in (1, len(stream)) or positions.shape[1] != stream.shape[1]:
        raise ValueError(f"position_ids are {list(positions.shape)}; the input is {list(stream.shape[:2])} [batch seq]")
    return positions.to(stream.device).expand(stream.shape[:2])


def fitting_mask(mask: Tensor | None, size: Sequence[int], device: torch.device) -> Tensor | None:
    """The mask of an input of this `size`, in one piece and on its device. Raises `ValueError` on one of another."""
    if mask is not None and tuple(checked_mask(mask).shape) != tuple(size):
        raise ValueError(f"the attention_mask is {list(mask.shape)}; the input is {list(size)} [batch seq]")
    return None if mask is None else mask.to(device).contiguous()


def checked_mask(mask: Any) -> Tensor:
    """Raises where a mask is no tensor, or of other numbers than 0 and 1. Only floating-point masks are looked at: what
    is added to scores, 0 for real tokens and -inf for padding, would be read the other way round."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"the attention_mask is {type(mask).__name__}: give a tensor [batch seq]")
    if mask.is_floating_point() and not torch.compiler.is_compiling() and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "the attention_mask has other numbers than 0 and 1: give 1 for real tokens and 0 for padding, not what is "
            "added to the scores"
        )
    return mask
