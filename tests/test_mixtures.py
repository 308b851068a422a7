"""Mixtures: routers against transformers' own functions, and what writes to the routing do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer as their_sparsemixer

from tests.oracle import both, check_parameter_gradients
from tests.tiny import BASES, DTYPES, MIXTURES, NAMED, Folders, Recipe, build, edit_config, load_reference, prompt
from transformer_std import HookedTransformer, Unavailable
from transformer_std.components.grouped import by_expert, unsorted
from transformer_std.components.routers import sigmoid_top_k, softmax_top_k, sparsemixer

LAYER = 1  # a mixture on each of them


@pytest.fixture(params=MIXTURES, ids=lambda base: base.id)
def model(request: pytest.FixtureRequest, checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(request.param))


def logits_with_ties(rows: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Random logits, a third of them rounded to tenths so that many tie or nearly do."""
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(rows))
    logits[: rows // 3] = (logits[: rows // 3] * 10).round() / 10
    logits[0] = 0.25
    logits[1] = -1.0
    return logits.to(dtype)


# -- routers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_sparsemixer_is_transformers(jitter: float, dtype: torch.dtype, training: bool) -> None:
    ours, theirs = (logits_with_ties(400, 16, dtype).requires_grad_() for _ in range(2))
    torch.manual_seed(7)
    weights, indices = sparsemixer(ours[None], jitter, training)
    torch.manual_seed(7)
    their_weights, their_indices = their_sparsemixer(theirs, jitter, training)
    assert torch.equal(weights[0], their_weights)
    assert torch.equal(indices[0], their_indices)
    towards = torch.randn(400, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    (weights[0] * towards).sum().backward()
    (their_weights * towards).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    if jitter == 0.3 and not training:
        assert (weights < 1).any(), "no weight is shared, so a wrong one would pass"


def test_sparsemixer_draws_as_often_as_transformers() -> None:
    logits = logits_with_ties(50, 16, torch.float32)
    torch.manual_seed(7)
    sparsemixer(logits[None], 0.3, True)
    ours = torch.rand(1)
    torch.manual_seed(7)
    their_sparsemixer(logits, 0.3, True)
    assert torch.equal(ours, torch.rand(1))


def test_near_ties_of_sparsemixer(checkpoints: Folders) -> None:
    """A near-tie takes half of a weight, which nobody gets."""
    recipe = NAMED["phimoe-unbiased"]
    model = HookedTransformer.from_pretrained(checkpoints(recipe))

    def write(logits: Tensor, hook: Any) -> Tensor:
        logits = logits.clamp(max=0.5)
        logits[:, -1, 2], logits[:, -1, 4] = 1.0, 0.99
        return logits

    with model.hooks(fwd_hooks=[(("router_logits", LAYER), write)]):
        _, cache = model.run_with_cache(prompt(), names_filter=["expert_weights", "expert_indices"])
    assert cache["expert_indices", LAYER][:, -1].tolist() == [[2, 4]] * 2
    torch.testing.assert_close(
        cache["expert_weights", LAYER][:, -1], torch.tensor([[0.5025, 1.0]] * 2), atol=1e-4, rtol=0
    )


def test_softmax_and_sigmoid_against_a_loop() -> None:
    logits = logits_with_ties(60, 9, torch.float32)[None]
    bias = torch.randn(9)
    plain, normalized = softmax_top_k(logits.softmax(-1), 3, False), softmax_top_k(logits.softmax(-1), 3, True)
    weights, indices = sigmoid_top_k(logits.sigmoid(), bias, 3, 2.5)
    for token in range(2, 60):
        probabilities = [float(p) for p in logits[0, token].softmax(-1)]
        best = sorted(range(9), key=lambda expert: -probabilities[expert])[:3]
        chosen = [probabilities[expert] for expert in best]
        torch.testing.assert_close(plain[0][0, token], torch.tensor(chosen))
        torch.testing.assert_close(normalized[0][0, token], torch.tensor(chosen) / sum(chosen))
        scores = [float(s) for s in logits[0, token].sigmoid()]
        best = sorted(range(9), key=lambda expert: -(scores[expert] + float(bias[expert])))[:3]
        assert indices[0, token].tolist() == best
        chosen = [scores[expert] for expert in best]
        torch.testing.assert_close(weights[0, token], torch.tensor(chosen) / sum(chosen) * 2.5)


@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("rows", [1, 6, 50])
@pytest.mark.parametrize("width", [16, 28])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_by_expert(count: int, rows: int, width: int, dtype: torch.dtype) -> None:
    """Whether few rows or many, or sizes that grouped kernels refuse: each row by its own expert's matrix."""
    weights, x = torch.randn(count, 24, width).to(dtype), torch.randn(rows, width).to(dtype)
    experts = torch.sort(torch.randint(0, count, (rows,)))[0]
    ends = torch.tensor([int((experts <= expert).sum()) for expert in range(count)], dtype=torch.int32)
    out = by_expert(x, weights, ends)
    expected = torch.stack([weights[expert].float() @ row.float() for expert, row in zip(experts, x, strict=True)])
    torch.testing.assert_close(out.float(), expected, atol=0.05 if dtype == torch.bfloat16 else 0.01, rtol=0.01)


def test_unsorted_undoes_a_sort() -> None:
    x = torch.randperm(30)
    ordered, order = torch.sort(x)
    assert torch.equal(ordered[unsorted(order)], x)


# -- routing written ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_ablating_an_expert_touches_only_its_tokens(model: HookedTransformer) -> None:
    _, clean = model.run_with_cache(prompt())
    indices = clean["expert_indices", LAYER]
    for expert in range(model.layers[LAYER].mlp.num_experts):
        hook = (("expert_weights", LAYER), lambda weights, hook: weights.masked_fill(indices == expert, 0))  # noqa: B023
        with model.hooks(fwd_hooks=[hook]):
            _, ablated = model.run_with_cache(prompt())
        routed = (indices == expert).any(-1)
        assert torch.equal((clean["routed_output", LAYER] != ablated["routed_output", LAYER]).any(-1), routed)
        assert torch.equal((clean["mlp_output", LAYER] != ablated["mlp_output", LAYER]).any(-1), routed)
        kept = clean["expert_outputs", LAYER].masked_fill((indices == expert)[..., None], 0)
        assert torch.equal(ablated["expert_outputs", LAYER], kept)
        assert torch.equal(ablated["routed_output", LAYER], kept.sum(2))


@torch.no_grad()
def test_indices_written_reroute(model: HookedTransformer) -> None:
    _, clean = model.run_with_cache(prompt())
    mlp, x = model.layers[LAYER].mlp, clean["mlp_norm_output", LAYER]

    def to_next(indices: Tensor, hook: Any) -> Tensor:
        return (indices + 1) % mlp.num_experts

    with model.hooks(fwd_hooks=[(("expert_indices", LAYER), to_next)]):
        _, cache = model.run_with_cache(prompt())
    assert torch.equal(cache["expert_weights", LAYER], clean["expert_weights", LAYER])
    for batch, seq, slot in ((0, 0, 0), (1, 7, mlp.top_k - 1)):
        expert = (int(clean["expert_indices", LAYER][batch, seq, slot]) + 1) % mlp.num_experts
        gate = x[batch, seq] @ mlp.W_gate[expert] + mlp.b_gate[expert]
        torch.testing.assert_close(cache["mlp_preactivation", LAYER][batch, seq, slot], gate)
        out = cache["mlp_neurons", LAYER][batch, seq, slot] @ mlp.W_out[expert] + mlp.b_out[expert]
        expected = out * clean["expert_weights", LAYER][batch, seq, slot]
        torch.testing.assert_close(cache["expert_outputs", LAYER][batch, seq, slot], expected)
    with pytest.raises(ValueError, match=r"layers.1.mlp.expert_indices was written with experts outside 0 to"):
        model.run_with_hooks(prompt(), fwd_hooks=[(("expert_indices", LAYER), lambda value, hook: value + 99)])


@torch.no_grad()
def test_logits_written_move_choice_and_weights(model: HookedTransformer) -> None:
    _, clean = model.run_with_cache(prompt())

    def prefer(logits: Tensor, hook: Any) -> None:
        logits[..., 3] = 50.0

    with model.hooks(fwd_hooks=[(("router_logits", LAYER), prefer)]):
        _, cache = model.run_with_cache(prompt())
    before, after = ((each["expert_indices", LAYER] == 3).any(-1) for each in (clean, cache))
    assert after.all() or model.layers[LAYER].mlp.cfg.router.scoring == "sigmoid"  # whose groups may be closed
    assert after.sum() > before.sum()
    assert not torch.equal(cache["expert_weights", LAYER], clean["expert_weights", LAYER])


@torch.no_grad()
def test_identities_of_a_mixture(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt())
    mlp = model.layers[LAYER].mlp
    assert torch.equal(cache["expert_outputs", LAYER].sum(2), cache["routed_output", LAYER])
    total = "mlp_unnormed_output" if mlp.post_norm else "mlp_output"
    if mlp.cfg.shared is None:
        assert torch.equal(cache["routed_output", LAYER], cache[total, LAYER])
        with pytest.raises(Unavailable, match="no shared expert"):
            cache["shared_experts.mlp_neurons", LAYER]
    else:
        torch.testing.assert_close(
            cache["routed_output", LAYER] + cache["shared_expert_output", LAYER], cache[total, LAYER]
        )
        ungated = cache["shared_experts.mlp_ungated_output", LAYER]
        gate = cache["shared_expert_gate", LAYER].sigmoid() if mlp.shared_gate else 1
        torch.testing.assert_close(gate * ungated, cache["shared_expert_output", LAYER])
        with pytest.raises(Unavailable, match="the mixture adds the sum"):
            cache["shared_experts.mlp_output", LAYER]


@torch.no_grad()
def test_the_written_bias_moves_only_the_choice(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["afmoe-base"]))
    mlp = model.layers[LAYER].mlp
    _, clean = model.run_with_cache(prompt())
    mlp.expert_bias[4] += 100
    _, cache = model.run_with_cache(prompt())
    assert torch.equal(cache["router_scores", LAYER], clean["router_scores", LAYER])
    assert (cache["expert_indices", LAYER] == 4).any(-1).all()
    chosen = cache["router_logits", LAYER].sigmoid().gather(-1, cache["expert_indices", LAYER])
    weights = chosen / chosen.sum(-1, keepdim=True) * mlp.cfg.router.scale
    torch.testing.assert_close(cache["expert_weights", LAYER], weights)
    torch.testing.assert_close(weights.sum(-1), torch.full(weights.shape[:2], 2.826))


def test_dtypes_of_trinity(checkpoints: Folders) -> None:
    recipe = NAMED["afmoe-base"]
    for dtype in DTYPES:
        ours = HookedTransformer.from_pretrained(checkpoints(recipe), dtype=dtype)
        mlp = ours.layers[LAYER].mlp
        assert mlp.expert_bias.dtype == torch.float32
        assert ours.to(torch.bfloat16).layers[LAYER].mlp.expert_bias.dtype == torch.float32
        assert not mlp.expert_bias.requires_grad
    half = HookedTransformer.from_pretrained(checkpoints(recipe), dtype=torch.float16)
    assert half.layers[0].mlp_norm.weight.dtype == half.norm.weight.dtype == torch.float32


def test_the_routers_float32_stays(checkpoints: Folders) -> None:
    folder = checkpoints(NAMED["deepseek_v3-base"])
    for dtype in DTYPES:
        model, reference = both(folder, "sdpa", dtype)
        for way in (lambda model: model, lambda model: model.bfloat16(), lambda model: model.to(torch.float16)):
            mlp = way(model).layers[LAYER].mlp
            assert mlp.router.weight.dtype == mlp.expert_bias.dtype == torch.float32
            assert torch.equal(mlp.router.weight, reference.model.model.layers[LAYER].mlp.gate.weight)
        assert model(prompt()).dtype == torch.float16


def test_experts_no_token_chose_get_no_gradient(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt(3), names_filter="expert_indices", return_type="loss", incl_bwd=True)
    chosen = set(cache["expert_indices", LAYER][:, :-1].unique().tolist())  # the last token's next is not there
    gradient = model.layers[LAYER].mlp.experts.down.grad
    assert {expert for expert, each in enumerate(gradient) if each.any()} == chosen
    assert len(chosen) < len(gradient)


def test_training_routes_as_transformers(own_copy: Folders) -> None:
    folder = own_copy(MIXTURES[0])
    edit_config(folder, input_jitter_noise=0.1)
    ours, reference = both(folder, "sdpa")
    theirs = reference.model
    ours.train()
    theirs.train()
    torch.manual_seed(3)
    logits, _cache = ours.run_with_cache(prompt(), names_filter=["expert_weights", "expert_indices"])
    torch.manual_seed(3)
    expected = theirs(prompt()).logits
    assert torch.equal(logits, expected)
    logits.square().mean().backward()
    expected.square().mean().backward()
    check_parameter_gradients(ours, theirs)
    assert not torch.equal(logits, load_reference(folder, attn="sdpa")(prompt()).logits)


def test_sizes_of_mixtures(model: HookedTransformer, checkpoints: Folders) -> None:
    mlp = model.layers[LAYER].mlp
    assert mlp.scoring in ("sparsemixer", "softmax", "sigmoid", "chosen")
    assert mlp.experts.gate_up.shape == (mlp.num_experts, 2 * mlp.intermediate_size, model.hidden_size)
    assert mlp.experts.down.shape == (mlp.num_experts, model.hidden_size, mlp.intermediate_size)


def test_any_other_top_k_of_sparsemixer_is_refused(own_copy: Folders) -> None:
    import converters

    folder = own_copy(MIXTURES[0])
    edit_config(folder, num_experts_per_tok=3)
    with pytest.raises(converters.ConfigError, match="num_experts_per_tok is 3; phimoe implements 2"):
        converters.read_config(folder)


def test_both_names_of_the_architecture(own_copy: Folders) -> None:
    folder = own_copy(MIXTURES[0])
    expected = HookedTransformer.from_pretrained(folder)(prompt())
    edit_config(folder, architectures=["PhiMoEForCausalLM"])
    assert torch.equal(HookedTransformer.from_pretrained(folder)(prompt()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision(dtype: torch.dtype, checkpoints: Folders) -> None:
    for base in BASES:
        ours, reference = both(checkpoints(base), "sdpa", dtype)
        tokens = prompt(64)  # holds the padding id, whose embedding gets no gradient
        assert (tokens == 0).any()
        ours(tokens).float().square().mean().backward()
        reference.model(tokens).logits.float().square().mean().backward()
        check_parameter_gradients(ours, reference.model)


@torch.no_grad()
def test_one_expert_and_no_shared_one(tmp_path: Path) -> None:
    odd = {
        "one": Recipe("afmoe", "one", {"num_experts": 1, "num_experts_per_tok": 1}),
        "none": Recipe("afmoe", "none", {"num_shared_experts": 0}),
    }
    for name, recipe in odd.items():
        ours, reference = both(build(recipe, tmp_path / name), "sdpa")
        for tokens in (prompt(), prompt(1, 1)):
            assert torch.equal(ours(tokens), reference.model(tokens).logits), name
