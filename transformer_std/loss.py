"""The loss of a pass: how well each token was expected."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from transformer_std.components.tracing import can_look
from transformer_std.layouts import Logits, Tokens


def real_transitions(mask: Tensor | None, packed: Tensor | None) -> Bool[Tensor, "batch transitions"] | None:
    """False where one of two neighbours is padding, or of another document; None where there is neither."""
    real = None if mask is None else mask[:, :-1].bool() & mask[:, 1:].bool()
    return real if packed is None else packed[:, :-1] == packed[:, 1:]


def next_token_loss(
    logits: Logits, tokens: Tokens, real: Bool[Tensor, "batch transitions"] | None, per_token: bool = False
) -> Float[Tensor, ""] | Float[Tensor, "batch transitions"]:
    """Cross-entropy, in nats and float32, of each real token given the real tokens before it: the mean, or
    `per_token`, with NaN where there is none."""
    seen = real is not None and can_look(real)
    if tokens.shape[1] == 1 or (real is not None and seen and not real.any()):
        raise ValueError("the loss needs two real tokens in a row, and no row of the input has them")
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none")
    if per_token:
        return losses if real is None else losses.masked_fill(~real, torch.nan)
    if real is None:
        return losses.mean()
    # Where nobody looks, no tensor's size can hang on the mask; without a real transition the mean is then NaN.
    return losses[real].mean() if seen else losses.where(real, 0).sum() / real.sum()
