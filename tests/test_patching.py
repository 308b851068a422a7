"""Sweeps of activation patching, each cell against transformers' forward with that one edit."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import both
from tests.tiny import BASES, LENGTH, Folders, Recipe, clean, corrupted, left_padded, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName
from transformer_std.layouts import axes

SWEEPS = [
    ("layer_input", "seq"),
    ("mlp_output", ("seq",)),
    ("attention_head_outputs", "num_heads"),
    ("attention_queries", ("seq", "num_heads")),
    ("attention_probabilities", ("num_heads",)),
]


def score(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - logits[0, -2, 5]


@pytest.mark.unchecked
@pytest.mark.parametrize(("value", "over"), SWEEPS, ids=str)
@pytest.mark.parametrize("base", [BASES[0], BASES[-1]], ids=lambda base: base.id)
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
def test_hooks_that_are_on_the_model(model: HookedTransformer) -> None:
    """They see each cell as a run of its own: one that means a row, one that keeps something from an earlier block, and
    one at the stream where a block's patched run begins."""
    _, cache = model.run_with_cache(clean(), names_filter="layer_output")
    direction = torch.arange(model.hidden_size) / model.hidden_size
    with (
        model.steer(0, direction, 2.0, batch_index=0),
        model.skip_layers(1, 2),
        model.hooks(fwd_hooks=[(("layer_input", 3), lambda stream, hook: stream / 2)]),
    ):
        found = model.activation_patching(corrupted(), cache, "layer_output", score, progress=False)
        for layer, position in itertools.product(range(model.num_layers), range(LENGTH)):

            def patch(stream: Tensor, hook: Any, layer: int = layer, position: int = position) -> None:
                stream[:, position] = cache["layer_output", layer][:, position]

            alone = model.run_with_hooks(corrupted(), fwd_hooks=[(("layer_output", layer), patch)])
            assert torch.equal(found[layer, position], score(alone))


@torch.no_grad()
def test_a_metric_that_is_a_view_holds_no_logits(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(clean(), names_filter="layer_output")
    kept: list[Any] = []

    def view(logits: Tensor) -> Tensor:
        assert len({each().data_ptr() for each in kept if each() is not None}) <= 4
        kept.append(weakref.ref(logits.untyped_storage()))
        return logits[0, -1, 3]

    model.activation_patching(corrupted(), cache, "layer_output", view, batch_size=4, progress=False)
    assert len(kept) == 2 + model.num_layers * LENGTH  # and of the plain run, all positions and the last


@torch.no_grad()
def test_transformerlens_names_and_the_order_asked_for(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(
        clean(), names_filter=["layer_input", "attention_premix", "attention_probabilities"]
    )
    sweep = functools.partial(model.activation_patching, corrupted(), cache, metric=score, progress=False)
    by_layer = sweep("layer_input")
    assert torch.equal(sweep("resid_pre", over="pos"), by_layer)
    assert torch.equal(sweep([("layer_input", 2), ("layer_input", 0)]), by_layer[[2, 0]])
    assert torch.equal(sweep("z", over=("pos", "head")), sweep("attention_premix", over=("seq", "num_heads")))
    assert torch.equal(sweep("pattern", over=("head_index", "dest_pos")), sweep("pattern", over=("num_heads", "query")))


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
        ("token_embeddings", "seq", LENGTH, ValueError, "token_embeddings is of the model"),
        ("mlp_output", "num_heads", LENGTH, ValueError, r"over='num_heads' .*Residual \[batch seq hidden_size\]"),
        ("mlp_output", "batch", LENGTH, ValueError, "over='batch' is no axis"),
        ("mlp_output", "seq", LENGTH - 1, ValueError, r"\[1, 12, \d+\] in the clean run and \[1, 13"),
        ("mlp_outptu", "seq", LENGTH, UnknownName, "did you mean .*mlp_output"),
        ("layer_mid", "seq", LENGTH, UnknownName, "the clean cache does not hold layers.0.layer_mid"),
        (("router_logits", 0), "seq", LENGTH, Unavailable, "a dense MLP"),
        (["expert_weights", "mlp_output"], "top_k", LENGTH, ValueError, "over='top_k' is no axis"),
        ([], "seq", LENGTH, UnknownName, "means no value of this model"),
        ("token_embeddings", (), LENGTH, ValueError, "token_embeddings is of the model"),
        ("mlp_output", ("seq", "pos"), LENGTH, ValueError, "names an axis twice"),
        ("mlp_output", "head", LENGTH, ValueError, r"over='head' is no axis .* Residual \[batch seq hidden_size\]"),
    ],
)
def test_bad_sweeps(value: Any, over: Any, length: int, error: Any, message: str, model: HookedTransformer) -> None:
    kept = ["mlp_output", "token_embeddings", "expert_weights"]
    _, cache = model.run_with_cache(prompt(length)[:1], names_filter=kept)
    with pytest.raises(error, match=message):
        model.activation_patching(corrupted(), cache, value, score, over=over, progress=False)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda logits: None, "the metric returned NoneType"),
        (
            lambda logits: logits[:, -1],
            r"the metric returned a tensor \[1, 131\]: of logits \[1, 13, 131\], give a number",
        ),
        (lambda logits: [1, 2], "the metric returned list"),
        (torch.ones(1), "the metric is a Tensor: give a function"),
    ],
)
def test_bad_metrics(metric: Any, message: str, model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(clean(), names_filter="mlp_output")
    with pytest.raises(TypeError, match=message):
        model.activation_patching(corrupted(), cache, "mlp_output", metric, progress=False)


def test_bad_caches(model: HookedTransformer) -> None:
    both_of_them = model.run_with_cache(clean(), names_filter="mlp_output", remove_batch_dim=True)
    with pytest.raises(TypeError, match="clean is a tuple: give the cache that run_with_cache made"):
        model.activation_patching(corrupted(), both_of_them, "mlp_output", score)
    with pytest.raises(ValueError, match=r"is \[13, \d+\] in the clean cache, not Residual"):
        model.activation_patching(corrupted(), both_of_them[1], "mlp_output", score)


def test_a_bar_is_shown_and_gone(model: HookedTransformer, capfd: pytest.CaptureFixture[str]) -> None:
    _, cache = model.run_with_cache(clean(), names_filter="layer_output")
    model.activation_patching(corrupted(), cache, ("layer_output", 0), score)
    assert capfd.readouterr().out == ""
