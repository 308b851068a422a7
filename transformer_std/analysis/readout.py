"""Streams and distributions as tokens. Functions of a model."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_std.transformer import Transformer


def get_topk_closest_tokens(model: Transformer, hidden: Float[Tensor, "*axes hidden_size"], k: int = 5) -> list[Any]:
    """The `k` likeliest next tokens of a stream, read out by the final norm and the head: pairs of name (as
    `token_name` says it) and probability; nested lists where `hidden` has more axes than the last."""
    probabilities = model.project_on_vocab(hidden).detach().softmax(-1, dtype=torch.float32)
    return named_tokens(model, *probabilities.topk(k, dim=-1))


def probs_to_dict(model: Transformer, probabilities: Float[Tensor, " vocab_size"], k: int = 5) -> dict[str, float]:
    """The `k` likeliest tokens of a distribution, `cache["next_token_probs"][0]` say, the likeliest first: name, as
    `token_name` says it, -> probability. No two tokens share an entry."""
    return dict(named_tokens(model, *probabilities.topk(k)))


def named_tokens(model: Transformer, values: Tensor, ids: Tensor) -> list[Any]:
    """Pairs of a token's name and its value; of tokens of one name the later have their ids behind it."""
    if ids.ndim > 1:
        return [named_tokens(model, *each) for each in zip(values, ids, strict=True)]
    unique: dict[str, float] = {}
    for token, value in zip(ids.tolist(), values.tolist(), strict=True):
        name = model.token_name(token)
        while name in unique:
            name = f"{name}#{token}"
        unique[name] = value
    return list(unique.items())
