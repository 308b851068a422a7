"""The mixture workbench against transformers' run with the same edits, and sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import both
from tests.tiny import MASK, MIXTURES, NAMED, Folders, Recipe, clean, load_reference, prompt, score, shake
from transformer_std import HookedTransformer, Unavailable

LAYER = 1  # a mixture on each of them
EXPERT = 2

mixtures = pytest.mark.parametrize("recipe", MIXTURES, ids=lambda recipe: recipe.id)


def full(model: HookedTransformer, value: str) -> str:
    return model.names.at(value, LAYER).point.name


def closed(expert: int) -> Any:
    def close(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., expert] = -torch.inf
        return value

    return close


@pytest.mark.unchecked
@mixtures
@pytest.mark.parametrize("how", ["silenced", "renormalised", "banned"])
@torch.no_grad()
def test_an_expert_taken_out_is_out_of_transformers_too(how: str, recipe: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe))
    found = model.expert_sweep(clean(), score, how)
    run = reference.run(clean())
    indices, weights = run.value(full(model, "expert_indices")), run.value(full(model, "expert_weights"))
    chosen = set(indices.unique().tolist())
    taken = int(indices[0, -1, 0])
    left = weights.masked_fill(indices == taken, 0)
    if how == "renormalised":
        rest = left.sum(-1, keepdim=True)
        left = torch.where(rest == 0, left, left * weights.sum(-1, keepdim=True) / rest)
    edits: dict[str, Any] = {full(model, "expert_weights"): lambda _: left}
    if how == "banned":
        edits = {full(model, "router_logits"): closed(taken)}
        if model.layers[LAYER].mlp.expert_bias is not None:
            edits[full(model, "router_scores")] = closed(taken)
    expected = score(reference.run(clean(), edits=edits).logits)
    baseline = float(score(run.logits))
    assert float(found.baseline) == pytest.approx(baseline, abs=1e-5)
    assert float(found.at(layer=LAYER, expert=taken)) == pytest.approx(float(expected), abs=2e-5)  # rows of a batch
    assert abs(float(expected) - baseline) > 1e-3
    for expert in set(range(model.layers[LAYER].mlp.num_experts)) - chosen:
        assert float(found.at(layer=LAYER, expert=expert)) == float(found.baseline)


@mixtures
def test_attributions_are_shares_of_the_mlp(recipe: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe))
    by_slot = model.expert_attribution(clean(), score)
    run = reference.run(clean())
    score(run.logits).backward()
    gradient = run.grad(full(model, "mlp_output"))
    mixture = model.layers[LAYER].mlp
    scale: Any = 1.0
    if mixture.post_norm is not None:  # an RMS norm
        unnormed = run.value(full(model, "mlp_unnormed_output"))
        rms = (unnormed.pow(2).mean(-1, keepdim=True) + mixture.post_norm.eps).sqrt()
        scale = mixture.post_norm.weight.detach() / rms
    slots = run.value(full(model, "expert_outputs"))
    indices = run.value(full(model, "expert_indices"))
    for slot in range(slots.shape[2]):
        expected = (gradient * slots[:, :, slot] * scale).sum(-1)[0].detach()
        torch.testing.assert_close(by_slot.at(layer=LAYER, slot=slot).values, expected, atol=1e-5, rtol=1e-4)
    whole = (gradient * run.value(full(model, "mlp_output"))).sum(-1)[0].detach()
    torch.testing.assert_close(by_slot.at(layer=LAYER).values.sum(-1), whole, atol=1e-5, rtol=1e-4)
    assert ("shared" in by_slot.axes[2].labels) == (mixture.cfg.shared is not None)

    by_expert = model.expert_attribution(clean(), score, by="expert")
    for expert in range(mixture.num_experts):
        expected = by_slot.at(layer=LAYER).values[:, : slots.shape[2]] * (indices[0] == expert)
        torch.testing.assert_close(by_expert.at(layer=LAYER, expert=expert).values, expected.sum(-1))


@mixtures
@torch.no_grad()
def test_direct_attributions_go_straight_to_the_logits(recipe: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe))
    found = model.expert_attribution(prompt(), lambda logits: logits[:, -1, 3] - logits[:, -1, 5], direct=True)
    assert [axis.name for axis in found.axes] == ["layer", "seq", "slot", "batch"]
    assert not found[:, :-1].any()  # no way straight from there
    run = reference.run(prompt())
    last = run.value(f"layers.{model.num_layers - 1}.layer_output")
    norm = model.norm
    centred = last - last.mean(-1, keepdim=True) if type(norm).__name__ == "LayerNorm" else last
    scale = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    towards = norm.weight * (model.W_U[:, 3] - model.W_U[:, 5])
    out = run.value(full(model, "mlp_output"))
    out = out - out.mean(-1, keepdim=True) if type(norm).__name__ == "LayerNorm" else out
    expected = (out / scale * towards).sum(-1)[:, -1]
    torch.testing.assert_close(found.at(layer=LAYER, seq=found.axes[1].labels[-1]).values.sum(0), expected,
                               atol=1e-5, rtol=1e-4)  # fmt: skip


@mixtures
@torch.no_grad()
def test_bans_and_forced_routes(recipe: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    mixture = model.layers[LAYER].mlp
    names = ["expert_indices", "router_logits", "expert_weights"]
    _, plain = model.run_with_cache(prompt(), names_filter=names)
    banned = [0, EXPERT]
    with model.hooks(fwd_hooks=model.ban(LAYER, banned)):
        logits, cache = model.run_with_cache(prompt(), names_filter=names)
    assert not torch.isin(cache["expert_indices", LAYER], torch.tensor(banned)).any()
    assert logits.isfinite().all()
    assert cache["expert_weights", LAYER].isfinite().all()
    free = ~torch.isin(plain["expert_indices", LAYER], torch.tensor(banned)).any(-1)
    same = cache["expert_indices", LAYER].sort(-1).values == plain["expert_indices", LAYER].sort(-1).values
    if mixture.scoring != "sigmoid" or recipe.family != "deepseek_v3":  # a ban can close a group
        assert same[free].all()

    where = {"token_positions": [[2, 5], [4]]}
    forced = torch.zeros(prompt().shape, dtype=torch.bool)
    forced[0, [2, 5]] = forced[1, 4] = True
    if recipe.family == "deepseek_v3":
        with pytest.raises(ValueError, match="selection bias or its groups keep it out"):
            model.run_with_hooks(prompt(), fwd_hooks=model.force(LAYER, EXPERT, **where))
        return
    with model.hooks(fwd_hooks=model.force(LAYER, EXPERT, **where)):
        _, cache = model.run_with_cache(prompt(), names_filter=names)
    assert (cache["expert_indices", LAYER][forced] == EXPERT).any(-1).all()
    assert torch.equal(cache["router_logits", LAYER][~forced], plain["router_logits", LAYER][~forced])
    here, before = cache["router_logits", LAYER][forced], plain["router_logits", LAYER][forced]
    assert torch.equal(here.sort(-1).values, before.sort(-1).values)
    assert torch.equal(here[:, EXPERT], before.max(-1).values)


def test_a_selection_bias_does_not_lift_a_banned_expert(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["afmoe-base"]))
    layer = next(i for i in range(model.num_layers) if model.support(i)["expert_indices"] is None)
    model.layers[layer].mlp.expert_bias.data[EXPERT] = 50.0
    for hooks, chosen in ((model.ban(layer, EXPERT), False), ([], True)):
        with model.hooks(fwd_hooks=hooks):
            _, cache = model.run_with_cache(prompt(), names_filter="expert_indices")
        assert bool((cache["expert_indices", layer] == EXPERT).any()) == chosen
    model.layers[layer].mlp.expert_bias.data[EXPERT] = -50.0
    with pytest.raises(ValueError, match=r"expert 2 of layers.\d.mlp is not chosen even with the largest logit"):
        model.run_with_hooks(prompt(), fwd_hooks=model.force(layer, EXPERT))


def test_what_cannot_be_taken_out_is_refused(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["qwen2_moe-base"]))
    mixture = model.layers[LAYER].mlp
    count, top_k = mixture.num_experts, mixture.top_k
    with pytest.raises(ValueError, match=f"{count - top_k + 1} experts banned: block 1 has {count}"):
        model.ban(LAYER, range(count - top_k + 1))
    for wrong in (model.ban, model.force, model.ablate_expert):
        with pytest.raises(ValueError, match=f"expert {count} is out of range"):
            wrong(LAYER, count)
    with pytest.raises(ValueError, match="give 'silenced', 'renormalised', 'banned'"):
        model.expert_sweep(prompt(), score, "gone")
    with pytest.raises(ValueError, match="give 'slot' or 'expert'"):
        model.expert_attribution(prompt(), score, by="head")
    dense = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    for each in (lambda: dense.routing(prompt()), lambda: dense.expert_sweep(prompt(), score)):
        with pytest.raises(Unavailable, match="a dense MLP"):
            each()


def test_a_table_of_routes(checkpoints: Folders) -> None:
    recipe = NAMED["afmoe-base"]  # whose first blocks are dense
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    found = model.routing(prompt(), attention_mask=MASK)
    _, cache = model.run_with_cache(prompt(), attention_mask=MASK)
    layers = found.experts.axes[0].labels
    assert 0 < len(layers) < model.num_layers
    real = MASK.bool()
    for layer in layers:
        assert torch.equal(found.experts.at(layer=layer).values[real], cache["expert_indices", layer][real])
        torch.testing.assert_close(found.weights.at(layer=layer).values[real], cache["expert_weights", layer][real])
        assert torch.equal(found.counts().at(layer=layer).values, cache.expert_counts(layer))
    frame = found.to_pandas()
    assert frame.shape == (2 * prompt().shape[1], len(layers))
    assert frame.loc["0: 0", layers[0]] == ""  # padding
    best = int(found.weights.at(layer=layers[0]).values[1, 3].argmax())
    assert frame.loc["1: 3", layers[0]].startswith(f"{int(found.experts.at(layer=layers[0]).values[1, 3, best])} (")
    assert repr(found).splitlines()[2].split()[:2] == ["0", "padding"]


@torch.no_grad()
def test_two_checkpoints_compared(checkpoints: Folders) -> None:
    recipe = NAMED["qwen2_moe-dense_first"]
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    same = model.compare(model, prompt())
    assert not same.values.any()
    assert same.logits == 0
    assert (same.routes == 1).all()
    reference = load_reference(checkpoints(recipe))
    shake(reference, 1)
    other = HookedTransformer.from_pretrained(reference)
    found = model.compare(other, prompt(), attention_mask=MASK)
    _, first = model.run_with_cache(prompt(), attention_mask=MASK)
    _, second = other.run_with_cache(prompt(), attention_mask=MASK)
    a, b = first["mlp_output", 1][MASK.bool()], second["mlp_output", 1][MASK.bool()]
    expected = float((a - b).norm() / a.norm())
    assert float(found.values.at(value="mlp_output", layer=1)) == pytest.approx(expected, rel=1e-3)
    assert expected > 0.01
    kept = []
    for row, place in MASK.nonzero().tolist():
        ours, theirs = (set(cache["expert_indices", 1][row, place].tolist()) for cache in (first, second))
        kept.append(len(ours & theirs) / len(ours))
    assert float(found.routes.at(layer=1)) == pytest.approx(sum(kept) / len(kept))
    assert 0 < sum(kept) < len(kept)
    with pytest.raises(ValueError, match="compare two checkpoints of one shape"):
        model.compare(HookedTransformer.from_pretrained(checkpoints(NAMED["afmoe-base"])), prompt())
