"""What heads attend to, by what is known of the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from transformer_std.analysis.labels import Label, Sweep
from transformer_std.hooking import Hooked
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.inputs import Input
from transformer_std.layouts import Pattern, Tokens

Pairs = Bool[Tensor, "batch query key"]


@torch.no_grad()
def head_scores(model: Hooked, input: Input, *, attention_mask: Tensor | None = None) -> Sweep:
    """The share of its attention that each head gives, on average over the real positions that have such keys, to:

    - "previous": the token before;
    - "duplicate": earlier occurrences of the same token;
    - "induction": the tokens that followed them (https://arxiv.org/abs/2209.11895);
    - "first": the row's first token.

        scores = model.head_scores(model.to_tokens("..."))
        scores.at(kind="induction").top(3)

    On random tokens that are repeated once, an induction head has a score near 1 and any other near 0; on a text with
    few repetitions the scores say little.

    Returns:
        [kind layer num_heads]; NaN where no position has such a key.
    """
    tokens, mask = model.read(input, attention_mask)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    kinds = pairs(tokens, real)
    points = [target.point for target in model.names.targets("attention_probabilities")]
    found: dict[str, Tensor] = {}

    def measure(pattern: Pattern, hook: HookPoint) -> None:
        found[hook.name] = torch.stack([_share(pattern.float(), each) for each in kinds.values()])

    model.run_with_hooks(tokens, fwd_hooks=[(points, measure)], attention_mask=mask, return_type=None)
    scores = torch.stack([found[point.name] for point in points], dim=1)
    labels: list[tuple[str, Sequence[Label]]] = [
        ("kind", list(kinds)),
        ("layer", [point.layer for point in points]),
        ("num_heads", range(scores.shape[-1])),
    ]
    return Sweep.of(scores, labels, "attention")


def pairs(tokens: Tokens, real: Bool[Tensor, "batch seq"]) -> dict[str, Pairs]:
    """Which keys are of each kind, for each query."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    query, key = places[:, None], places[None, :]
    seen = real[:, :, None] & real[:, None, :] & (key <= query)
    same = (tokens[:, :, None] == tokens[:, None, :]) & seen & (key < query)
    first = real.int().argmax(-1)[:, None, None] == key
    return {
        "previous": seen & (key == query - 1),
        "duplicate": same,
        "induction": same.roll(1, -1) & seen & (key > 0),
        "first": seen & first & (key < query),
    }


def _share(pattern: Float[Tensor, "batch head query key"], kind: Pairs) -> Float[Tensor, " head"]:
    given = einsum(pattern, kind.to(pattern), "batch head query key, batch query key -> head")
    return given / kind.any(-1).sum()
