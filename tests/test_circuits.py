"""Heads' circuits by their weights, against the values of transformers' run and products in float64."""

from __future__ import annotations

import pytest
import torch
from einops import einsum

from tests.oracle import both
from tests.tiny import BASES, MIXTURES, NAMED, Folders, Recipe, prompt
from transformer_std import HookedTransformer
from transformer_std.analysis.circuits import Factored
from transformer_std.weights import UnreadableWeight

WITHOUT_QK_NORM = [recipe for recipe in BASES if recipe.family != "afmoe"]
LAYER = 1


def divided(model: HookedTransformer, stream: torch.Tensor) -> torch.Tensor:
    """A stream as the attention's norm divides it, in float64 by the textbook, and a one behind it."""
    stream = stream.double()
    norm = model.layers[LAYER].attention_norm
    centred = stream - stream.mean(-1, keepdim=True) if type(norm).__name__ == "LayerNorm" else stream
    x = centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


def test_what_a_head_writes_is_the_value_through_its_output(base: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(base))
    block = f"layers.{LAYER}"
    run = reference.run(prompt())
    x = divided(model, run.value(f"{block}.layer_input"))
    values, attention = run.value(f"{block}.self_attn.attention_values"), model.layers[LAYER].self_attn
    group = model.num_heads // attention.cfg.num_kv_heads
    for head in (0, 1, model.num_heads - 1):
        ov = model.OV(LAYER, head, folded=True, biases=True)
        assert ov.rank == attention.cfg.head_dim
        out = attention.W_O[head].double()
        if attention.post_norm is not None:  # an RMS norm everywhere here
            out = out * attention.post_norm.gain(attention.post_norm.weight).double()
        written = values.double()[:, head // group] @ out
        torch.testing.assert_close(x @ ov.dense().double(), written, rtol=1e-4, atol=1e-5)  # float32 values


@pytest.mark.parametrize("recipe", WITHOUT_QK_NORM, ids=lambda recipe: recipe.id)
def test_scores_are_those_of_queries_and_keys(recipe: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe))
    block = f"layers.{LAYER}"
    run = reference.run(prompt())
    x = divided(model, run.value(f"{block}.layer_input"))
    attention = model.layers[LAYER].self_attn
    group = model.num_heads // attention.cfg.num_kv_heads
    _, cache = model.run_with_cache(prompt())
    for head in (0, 1, model.num_heads - 1):
        qk = model.QK(LAYER, head, folded=True, biases=True).dense().double()
        queries = cache["attention_queries_before_rotary", LAYER][:, head].double()
        keys = cache["attention_keys_before_rotary", LAYER][:, head // group].double()
        expected = einsum(queries, keys, "batch query dim, batch key dim -> batch query key")
        torch.testing.assert_close(x @ qk @ x.mT, expected, rtol=1e-4, atol=1e-4)  # float32 values


def test_unfolded_circuits_are_products_of_the_weights(base: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base))
    attention = model.layers[LAYER].self_attn
    of_query_heads = model.stacked("W_V", query_heads=True)
    assert torch.equal(of_query_heads[LAYER], attention.by_query_head(attention.W_V))
    assert torch.equal(model.W_V[LAYER], attention.W_V)
    for head in range(model.num_heads):
        expected = of_query_heads[LAYER, head] @ model.W_O[LAYER, head]
        assert torch.equal(model.OV(LAYER, head).dense(), expected)
        key = model.stacked("W_K", query_heads=True)[LAYER, head]
        assert torch.equal(model.QK(LAYER, head).dense(), model.W_Q[LAYER, head] @ key.mT)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_composition_is_that_of_whole_matrices(kind: str, base: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base))
    scores = model.composition_scores(kind, folded=True)
    last = model.num_layers - 1
    assert scores.shape == (model.num_layers, model.num_heads) * 2
    assert not scores.values[last].any()
    assert not scores.values[1, :, 1].any()
    for head, other in ((0, 1), (model.num_heads - 1, 0)):
        first = model.OV(0, head, folded=True).dense().double()
        second = (model.OV if kind == "V" else model.QK)(last, other, folded=True).dense().double()
        second = second.mT if kind == "K" else second
        expected = (first @ second).norm() / (first.norm() * second.norm())
        found = float(scores.at(layer=0, num_heads=head, to_layer=last, to_head=other))
        assert found == pytest.approx(float(expected), rel=1e-5)  # float32 by another order of sums


def test_singular_tokens_are_read_and_written(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    ov = model.OV(LAYER, 2, folded=True).dense().double()
    u, s, vh = torch.linalg.svd(ov)
    gain = model.norm.weight.double()
    for i, pair in enumerate(model.singular_tokens(LAYER, 2, count=2, k=3)):
        assert pair.value == pytest.approx(float(s[i]), rel=1e-5)
        logits = (vh[i] * gain) @ model.W_U.double()
        sign = logits[logits.abs().argmax()].sign()
        assert list(pair.writes.values()) == pytest.approx((logits * sign).topk(3).values.tolist(), rel=1e-4)
        read = model.W_E.double() @ (u[:, i] * sign)
        assert list(pair.reads.values()) == pytest.approx(read.topk(3).values.tolist(), rel=1e-4)


def test_a_factored_matrix_is_its_product() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = Factored(draw(2, 9, 4), draw(2, 4, 7)), Factored(draw(7, 3), draw(3, 9))
    vector, dense = draw(9), a.dense()
    assert a.shape == dense.shape
    assert (a @ b).rank == 3
    assert repr(a) == "Factored([2, 9, 7], rank 4)"
    for found, expected in (
        ((a @ b).dense(), dense @ b.dense()),
        ((b @ a).dense(), b.dense() @ dense),
        (a.T.dense(), dense.mT),
        (vector @ a, vector @ dense),
        (b @ vector, b.dense() @ vector),
        ((draw(5, 9)[:0] @ a).dense(), dense[:, :0]),
        ((2 * a).dense(), 2 * dense),
        (a.norm(), torch.linalg.matrix_norm(dense)),
        (a.svd()[1], torch.linalg.svdvals(dense)[..., :4]),
    ):
        torch.testing.assert_close(found, expected)
    u, s, vh = a.svd()
    torch.testing.assert_close(u @ torch.diag_embed(s) @ vh, dense)
    largest = torch.linalg.eigvals((b @ a).dense()).abs().sort(descending=True).values[..., :3]
    torch.testing.assert_close((b @ a).eigenvalues().abs().sort(descending=True).values, largest)
    with pytest.raises(ValueError, match="not square"):
        a.eigenvalues()


def test_stacks_that_cannot_be_made_are_refused(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["qwen2_moe-dense_first"]))
    with pytest.raises(
        ValueError, match=r"W_in is .* in block 0 and .* in block 1, .* read model.layers\[i\].mlp.W_in"
    ):
        _ = model.W_in
    with pytest.raises(ValueError, match="W_Q is not of key/value heads"):
        model.stacked("W_Q", query_heads=True)
    with pytest.raises(ValueError, match=f"head {model.num_heads} is out of range"):
        model.OV(0, model.num_heads)
    with pytest.raises(ValueError, match="layer 9 is out of range"):
        model.QK(9, 0)
    with pytest.raises(ValueError, match="give 'Q', 'K' or 'V'"):
        model.composition_scores("O")
    with pytest.raises(AttributeError):
        model.stacked("W_Z")
    latent = HookedTransformer.from_pretrained(checkpoints(NAMED["deepseek_v3-base"]))
    with pytest.raises(UnreadableWeight, match="latent"):
        latent.OV(0, 0)


@pytest.mark.parametrize("recipe", [each for each in MIXTURES if each.family in ("phimoe", "gpt_oss")], ids=str)
def test_experts_stack_too(recipe: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    mixture = model.layers[LAYER].mlp
    assert torch.equal(model.W_out[LAYER], mixture.W_out)
    assert torch.equal(model.b_in[LAYER], mixture.b_in)
