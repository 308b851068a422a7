"""Interventions on a value: skipped blocks, steering, experts, attribution patching."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import BASES, MASK, MIXTURES, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName


@torch.no_grad()
def test_skip_layers(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt(), names_filter="layer_input")
    with model.skip_layers(1, model.num_layers - 1):
        skipped = model(prompt())
    assert torch.equal(skipped, model.project_on_vocab(cache["layer_input", 1]))
    with model.skip_layers(0, 1, skip_with=cache["layer_input", 2]):
        _, skipping = model.run_with_cache(prompt(), names_filter="layer_output")
    assert torch.equal(skipping["layer_output", 1], cache["layer_input", 2])
    for first, last in ((2, 1), (0, 99)):
        with pytest.raises((ValueError, UnknownName)), model.skip_layers(first, last):
            pass


@torch.no_grad()
def test_steer(model: HookedTransformer) -> None:
    vector = torch.randn(model.hidden_size)
    _, clean = model.run_with_cache(prompt(), names_filter="layer_output")
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, (slice(None), slice(None))),
        ({"token_positions": -1}, (slice(None), [-1])),
        ({"token_positions": [2, 5], "batch_index": 1}, ([1], slice(None))),
        ({"token_positions": slice(3, 6)}, (slice(None), slice(3, 6))),
        ({"batch_index": [0]}, ([0], slice(None))),
    ]
    for where, (rows, positions) in cases:
        with model.steer(1, vector, factor=2.0, **where):
            _, cache = model.run_with_cache(prompt(), names_filter="layer_output")
        change = torch.zeros_like(clean["layer_output", 1])
        if where.get("token_positions") == [2, 5]:
            change[1, [2, 5]] = 2 * vector
        else:
            change[rows, positions] = 2 * vector
        torch.testing.assert_close(cache["layer_output", 1], clean["layer_output", 1] + change)
        assert torch.equal(cache["layer_output", 0], clean["layer_output", 0])
    with model.steer([0, 1], vector):
        _, both = model.run_with_cache(prompt(), names_filter="layer_output")
    torch.testing.assert_close(both["layer_output", 0], clean["layer_output", 0] + vector)


@pytest.mark.parametrize("base", [base for base in BASES if base not in MIXTURES], ids=lambda base: base.id)
def test_a_dense_mlp_has_no_expert_to_ablate(model: HookedTransformer) -> None:
    with pytest.raises(Unavailable, match="a dense MLP"):
        model.ablate_expert(1, 0)


@pytest.mark.parametrize("base", MIXTURES, ids=lambda base: base.id)
@torch.no_grad()
def test_expert_helpers(model: HookedTransformer, cache: Any) -> None:
    mlp, indices = model.layers[1].mlp, cache["expert_indices", 1]
    counts = cache.expert_counts(1)
    for expert in range(mlp.num_experts):
        assert int(counts[expert]) == int((indices[MASK.bool()] == expert).sum())
    entropy = cache.routing_entropy(1)
    assert entropy.shape == (int(MASK.sum()),)
    scored = model.support(1)["router_scores"] is None
    scores = cache["router_scores", 1] if scored else cache["router_logits", 1].softmax(-1)
    shares = (scores / scores.sum(-1, keepdim=True))[MASK.bool()]
    torch.testing.assert_close(entropy, -(shares * shares.log()).sum(-1))
    _, plain = model.run_with_cache(prompt())
    with model.hooks(fwd_hooks=model.ablate_expert(1, 3)):
        _, ablated = model.run_with_cache(prompt())
    chose = plain["expert_indices", 1] == 3
    assert torch.equal(ablated["expert_weights", 1], plain["expert_weights", 1].masked_fill(chose, 0))
    with model.hooks(fwd_hooks=model.reroute(1, 3, to=0)):
        _, moved = model.run_with_cache(prompt())
    assert torch.equal(moved["expert_indices", 1], plain["expert_indices", 1].masked_fill(chose, 0))
    assert torch.equal(moved["expert_weights", 1], plain["expert_weights", 1])
    with pytest.raises(ValueError, match=rf"expert 99 is out of range: block 1 has experts 0 to {mlp.num_experts - 1}"):
        model.ablate_expert(1, 99)


@pytest.mark.parametrize("base", MIXTURES, ids=lambda base: base.id)
@torch.no_grad()
def test_experts_are_counted_over_real_tokens_or_not_at_all(model: HookedTransformer, cache: Any) -> None:
    indices, count = cache["expert_indices", 1], model.layers[1].mlp.num_experts
    for part, kept in (
        (cache.slice(batch=0), indices[0][MASK[0].bool()]),
        (cache.slice(position=-1), indices[:, -1]),
        (cache.slice(position=slice(2, 6)), indices[:, 2:6][MASK[:, 2:6].bool()]),
        (cache.slice(batch=0, position=1), indices[:0]),
        (cache.slice(batch=0, position=-1), indices[0, -1]),
    ):
        assert part.expert_counts(1).tolist() == [int((kept == expert).sum()) for expert in range(count)]
        assert part.routing_entropy(1).shape == (kept.numel() // indices.shape[-1],)
    scored = model.support(1)["router_scores"] is None
    wanted = ["expert_indices", "router_scores" if scored else "router_logits"]
    _, without = model.run_with_cache(prompt(), names_filter=wanted, attention_mask=MASK)
    for reading in (without.expert_counts, without.routing_entropy):
        with pytest.raises(UnknownName, match="attention_mask, which says which are, is not in this cache: name it in"):
            reading(1)


def test_attribution_patching_through_a_cache(model: HookedTransformer) -> None:
    logits, cache = model.run_with_cache(prompt(), names_filter=["attention_premix", "mlp_output"], keep_graph=True)
    target = logits[:, -1, 5].sum()
    gradients = torch.autograd.grad(target, [cache["attention_premix", 1], cache["mlp_output", 0]], retain_graph=True)
    _, other = model.run_with_cache(prompt(), names_filter=["attention_premix", "mlp_output"], incl_bwd=True)
    assert "attention_premix_grad" not in {name.rpartition(".")[2] for name in other}
    assert gradients[0].shape == cache["attention_premix", 1].shape
    assert not any(value.requires_grad for value in cache.detach().values())


@pytest.mark.parametrize("base", [base for base in BASES if base not in MIXTURES], ids=lambda base: base.id)
def test_a_gradient_is_a_slope(model: HookedTransformer) -> None:
    """Of dense models: a mixture's choice can flip within a step."""
    logits, cache = model.run_with_cache(prompt(), names_filter="mlp_output", keep_graph=True)
    (gradient,) = torch.autograd.grad(logits[:, -1, 5].sum(), cache["mlp_output", 0])
    step = 1e-3 * torch.randn_like(gradient)
    with torch.no_grad():
        moved = model.run_with_hooks(prompt(), fwd_hooks=[(("mlp_output", 0), lambda value, hook: value + step)])
        still = model.run_with_hooks(prompt(), fwd_hooks=[(("mlp_output", 0), lambda value, hook: value - step)])
    slope = (moved[:, -1, 5].sum() - still[:, -1, 5].sum()) / 2
    torch.testing.assert_close(slope, (gradient * step).sum(), atol=2e-4, rtol=0.02)
