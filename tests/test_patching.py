"""Sweeps of activation patching, each cell against transformers' forward with that one edit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_families import both, left_padded
from tests.tiny import BASES, LENGTH, Recipe, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName
from transformer_std.layouts import axes

Folders = Callable[[Recipe], Path]
SWEEPS = [
    ("layer_input", "seq"),
    ("mlp_output", ("seq",)),
    ("attention_head_outputs", "num_heads"),
    ("attention_queries", ("seq", "num_heads")),
    ("attention_probabilities", ("num_heads",)),
]


def clean() -> Tensor:
    return prompt()[:1]


def corrupted() -> Tensor:
    return prompt()[1:2]


def score(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - logits[0, -2, 5]


@pytest.mark.parametrize(("value", "over"), SWEEPS, ids=str)
@pytest.mark.parametrize("base", BASES, ids=lambda recipe: recipe.id)
@torch.no_grad()
def test_a_cell_is_transformers_with_one_edit(base: Recipe, value: str, over: Any, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(base))
    _, cache = model.run_with_cache(clean(), names_filter=value)
    found = model.activation_patching(corrupted(), cache, value, score, over=over, batch_size=5, progress=False)
    clean_run = reference.run(clean())
    expected = torch.zeros_like(found)
    for layer, *cell in itertools.product(*map(range, found.shape)):
        point = model.names.at(value, layer).point
        chosen = dict(zip((over,) if isinstance(over, str) else over, cell, strict=True))
        at = tuple(chosen.get(axis, slice(None)) for axis in axes(point.layout))

        def edit(seen: Tensor, at: Any = at, name: str = point.name) -> None:
            seen[at] = clean_run.value(name)[at]

        expected[(layer, *cell)] = score(reference.run(corrupted(), edits={point.name: edit}).logits)
    # Rows of a batch of five round otherwise than a row alone.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(set(found.flatten().tolist())) > found.numel() // 2


@pytest.fixture
def model(checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(next(base for base in BASES if base.family == "afmoe")))


@torch.no_grad()
def test_a_metric_of_rows_and_a_mask(model: HookedTransformer) -> None:
    tokens, mask, _ = left_padded()
    _, cache = model.run_with_cache(tokens.flip(0), names_filter="layer_output", attention_mask=mask)

    def rows(logits: Tensor) -> Tensor:
        return logits[:, -1, 3]

    found = model.activation_patching(
        tokens, cache, ("layer_output", 1), rows, attention_mask=mask, batch_size=6, progress=False
    )
    assert found.shape == (1, LENGTH, 2)
    for position in range(LENGTH):

        def patch(stream: Tensor, hook: Any, position: int = position) -> None:
            stream[:, position] = cache["layer_output", 1][:, position]

        alone = model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(("layer_output", 1), patch)])
        torch.testing.assert_close(found[0, position], rows(alone), rtol=1e-4, atol=1e-4)  # rounding, as above


@torch.no_grad()
def test_values_of_some_layers_alone(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(clean(), names_filter="expert_weights")
    layers = [point.layer for point in model.names.resolve("expert_weights")]
    assert len(layers) < model.num_layers
    found = model.activation_patching(corrupted(), cache, "expert_weights", score, over="top_k", progress=False)
    assert found.shape == (len(layers), cache["expert_weights", -1].shape[-1])


@pytest.mark.parametrize(
    ("value", "over", "length", "error", "message"),
    [
        ("token_embeddings", "seq", LENGTH, ValueError, "token_embeddings is a value of the model"),
        ("mlp_output", "num_heads", LENGTH, ValueError, r"over='num_heads' .*Residual \[batch seq hidden_size\]"),
        ("mlp_output", "batch", LENGTH, ValueError, "over='batch' is no axis"),
        ("mlp_output", "seq", LENGTH - 1, ValueError, r"\[1, 12, \d+\] in the clean run and \[1, 13"),
        ("mlp_outptu", "seq", LENGTH, UnknownName, "did you mean .*mlp_output"),
        ("layer_mid", "seq", LENGTH, UnknownName, "not in this cache: names_filter left it out"),
        (("router_logits", 0), "seq", LENGTH, Unavailable, "a dense MLP"),
        (["expert_weights", "mlp_output"], "top_k", LENGTH, ValueError, "over='top_k' is no axis"),
    ],
)
def test_bad_sweeps(value: Any, over: str, length: int, error: Any, message: str, model: HookedTransformer) -> None:
    kept = ["mlp_output", "token_embeddings", "expert_weights"]
    _, cache = model.run_with_cache(prompt(length)[:1], names_filter=kept)
    with pytest.raises(error, match=message):
        model.activation_patching(corrupted(), cache, value, score, over=over, progress=False)


def test_a_bar_is_shown_and_gone(model: HookedTransformer, capfd: pytest.CaptureFixture[str]) -> None:
    _, cache = model.run_with_cache(clean(), names_filter="layer_output")
    model.activation_patching(corrupted(), cache, ("layer_output", 0), score)
    assert capfd.readouterr().out == ""
