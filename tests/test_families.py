"""Each promise of the model once, against transformers' own forward on the same weights: what is a matter of numbers on
every recipe, the rest on one recipe of each structure."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import converters
from converters.verification.reference import attention_there_is
from tests.oracle import both, check_parameter_gradients
from tests.tiny import (
    BASES,
    DTYPES,
    FAMILIES,
    LENGTH,
    NAMED,
    STRUCTURES,
    VOCAB,
    Folders,
    Recipe,
    hf_config,
    left_padded,
    load_reference,
    prompt,
    shake,
)
from transformer_std import HookedTransformer
from transformer_std.components.latent import LatentAttention
from transformer_std.layouts import axes, is_integer

# What transformers computes nowhere: derived, or the call's own input. Their own tests are below.
OURS_ALONE = {"input_ids", "attention_mask", "input_size", "next_token_probs"}
OPEN = ("attention_scores", "attention_probabilities")


# -- logits ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.unchecked
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_logits_are_transformers(recipe: Recipe, dtype: torch.dtype, checkpoints: Folders) -> None:
    theirs = load_reference(checkpoints(recipe), dtype)
    for attn in ("sdpa", "eager"):
        model = HookedTransformer.from_pretrained(checkpoints(recipe), dtype=dtype, attn_implementation=attn)
        theirs.set_attn_implementation(attention_there_is(model.config, attn))
        for length in recipe.lengths:
            for tokens in (prompt(length), prompt(length)[:1]):
                ours, expected = model(tokens), theirs(tokens).logits
                assert ours.dtype == dtype
                assert torch.equal(ours, expected), (attn, length, (ours - expected).abs().max())


@pytest.mark.unchecked
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_padded_logits_are_transformers(recipe: Recipe, attn: str, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe), attn)
    tokens, mask, positions = left_padded(max(recipe.lengths))
    theirs = reference.model(tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(model(tokens, attention_mask=mask), theirs)


@torch.no_grad()
def test_loss_is_transformers(structure: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(structure), "sdpa")
    theirs = reference.model(prompt(), labels=prompt()).loss
    _logits, loss = model(prompt(), return_type="both")
    assert torch.equal(model(prompt(), return_type="loss"), loss)
    torch.testing.assert_close(loss, theirs)  # transformers sums the same terms in another order
    tokens, mask, _positions = left_padded()
    padded = model(tokens, attention_mask=mask, return_type="loss")
    real = [
        model(tokens[:1, 4:], return_type="loss") * (LENGTH - 5),
        model(tokens[1:], return_type="loss") * (LENGTH - 1),
    ]
    torch.testing.assert_close(padded, sum(real) / (2 * LENGTH - 6))


# -- values ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.unchecked
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_every_value_is_transformers(recipe: Recipe, attn: str, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe), attn)
    skipped = OURS_ALONE | set(OPEN if reference.model.config._attn_implementation == "sdpa" else ())
    for inputs in (
        {},
        dict(zip(("attention_mask", "position_ids"), left_padded(max(recipe.lengths))[1:], strict=True)),
    ):
        tokens = prompt(max(recipe.lengths))
        run = reference.run(tokens, **inputs)
        wanted = [
            name
            for name, point in model.names.points.items()
            if not (point.derived or point.value.split(".")[-1] in skipped)
        ]
        _, cache = model.run_with_cache(tokens, names_filter=wanted, **inputs)
        assert set(cache) == set(run.bases)
        for name in cache:
            assert torch.equal(cache[name], run.value(name)), name


def edit(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.flip(1)  # of one prompt's routing, another's
    return value * 0.5 + 0.25 * value.roll(1, dims=-1)


def edit_in_place(value: Tensor) -> None:
    value.copy_(edit(value))


def one_of_each(model: HookedTransformer) -> list[str]:
    """The values of the model, and of the last of its blocks of each kind."""
    kinds = {str(layer): i for i, layer in enumerate(model.config.layers)}
    return [name for name, point in model.names.points.items() if point.layer in (None, *kinds.values())]


# In place under autograd on each family and each structure; assigned without it on each structure; in place
# without it on the bases.
WAYS = [
    pytest.param(recipe, write, grad, id=f"{recipe.id}-{write.__name__}-{grad}")
    for write, grad, recipes in [
        (edit_in_place, True, dict.fromkeys([*FAMILIES, *STRUCTURES])),
        (edit, False, STRUCTURES),
        (edit_in_place, False, BASES),
    ]
    for recipe in recipes
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("recipe", "write", "grad"), WAYS)
def test_writes_land_as_in_transformers(recipe: Recipe, write: Any, grad: bool, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe))
    with torch.set_grad_enabled(grad):
        clean = model(prompt())
        everywhere = recipe in BASES and (write, grad) == (edit, False)
        names = list(model.names.points) if everywhere else one_of_each(model)
        points = [model.names.points[name] for name in names]
        names = [each.name for each in points if not (each.derived or each.value.split(".")[-1] in OURS_ALONE)]
        assert len(names) > 20
        for name in names:
            ours = model.run_with_hooks(prompt(), fwd_hooks=[(name, lambda value, hook: write(value))])
            theirs = reference.run(prompt(), edits={name: write}).logits
            assert torch.equal(ours, theirs), name
            assert not torch.equal(ours, clean), f"{name} does not reach the logits"
        assert torch.equal(model(prompt()), clean)


@pytest.mark.unchecked
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_gradients_are_transformers(recipe: Recipe, attn: str, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe), attn)
    run = reference.run(prompt())
    F.cross_entropy(run.logits.flatten(0, 1), prompt().flatten()).backward()
    # One tensor of theirs can be several values; the gradient of each value alone is ours alone.
    seen = {name: run.views[name](base) for name, base in run.bases.items()}
    owners = [(id(run.bases[name]), view.data_ptr()) for name, view in seen.items()]
    wanted = [
        name
        for name, base in run.bases.items()
        if owners.count((id(base), seen[name].data_ptr())) == 1 and not is_integer(model.names.points[name].layout)
    ]
    assert len(wanted) > 15 * model.num_layers / 2
    logits, cache = model.run_with_cache(prompt(), names_filter=wanted, incl_bwd=True)
    F.cross_entropy(logits.flatten(0, 1), prompt().flatten()).backward()
    for name in wanted:
        assert torch.equal(cache[name + "_grad"], run.grad(name)), name
    check_parameter_gradients(model, reference.model)


@torch.no_grad()
def test_next_token_probs_and_input_size(structure: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(structure))
    _, cache = model.run_with_cache(prompt(), names_filter=["next_token_probs", "input_size", "input_ids"])
    assert torch.equal(cache["next_token_probs"], reference.model(prompt()).logits[:, -1].softmax(-1))
    assert cache["input_size"] == (2, LENGTH)
    assert torch.equal(cache["input_ids"], prompt())
    for name in ("next_token_probs", "input_size"):
        with pytest.raises(ValueError, match=r"read-only: write (logits|input_ids) instead"):
            model.run_with_hooks(prompt(), fwd_hooks=[(name, lambda value, hook: value)])

    def zero(value: Tensor) -> None:
        value.zero_()

    with pytest.raises(ValueError, match="read-only"):
        model.run_with_hooks(prompt(), fwd_hooks=[("next_token_probs", lambda value, hook: zero(value))])


@torch.no_grad()
def test_writes_of_the_input(structure: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure))
    other = (prompt() + 1) % VOCAB
    given = prompt().clone()

    def write(ids: Tensor) -> None:
        ids.copy_(other)

    assert torch.equal(model.run_with_hooks(given, fwd_hooks=[("input_ids", lambda ids, hook: other)]), model(other))
    assert torch.equal(
        model.run_with_hooks(given, fwd_hooks=[("input_ids", lambda ids, hook: write(ids))]), model(other)
    )
    assert torch.equal(given, prompt()), "the caller's tokens were edited"
    tokens, mask, _ = left_padded()
    hidden = model.run_with_hooks(tokens, fwd_hooks=[("attention_mask", lambda value, hook: mask)])
    assert torch.equal(hidden, model(tokens, attention_mask=mask))


@pytest.mark.quick
@torch.no_grad()
def test_layouts(recipe: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    _, cache = model.run_with_cache(prompt())
    for name, value in cache.items():
        point = model.names.points[name]
        if name == "input_size":
            continue
        host = model.get_submodule(name.rpartition(".")[0])
        sizes = {"batch": 2, "seq": LENGTH, "query": LENGTH, "key": LENGTH, "1": 1}
        for at in (model, host):
            sizes |= {axis: size for axis in axes(point.layout) if (size := getattr(at, axis, None)) is not None}
        assert list(value.shape) == [sizes[axis] for axis in axes(point.layout)], name
        assert isinstance(value, point.layout), name


@torch.no_grad()
def test_every_hook_point_fires_once(structure: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure))
    fired: list[str] = []
    model.run_with_hooks(prompt(), fwd_hooks=[(lambda name: True, lambda value, hook: fired.append(hook.name))])
    assert sorted(fired) == sorted(model.names.points)


@pytest.mark.quick
@torch.no_grad()
def test_identities(recipe: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    logits, cache = model.run_with_cache(prompt())
    for i, block in enumerate(model.layers):
        parts = [cache[name, i] for name in ("layer_input", "attention_output", "mlp_output", "layer_output")]
        torch.testing.assert_close(parts[0] + parts[1] + parts[2], parts[3])
        if model.config.layers[i].kind == "parallel":  # sums its sublayers first, and then to the bit
            assert torch.equal(parts[1] + parts[2] + parts[0], parts[3])
        pattern = cache["attention_probabilities", i]
        scores = cache["attention_scores", i]
        assert scores.isfinite().all()
        if block.self_attn.cfg.sinks:  # a sink's share is in no pattern
            scores = torch.cat((scores, cache["attention_sinks", i]), -1)
            pattern = torch.cat((pattern, 1 - pattern.sum(-1, keepdim=True)), -1)
            torch.testing.assert_close(scores.softmax(-1), pattern)
        else:
            assert torch.equal(scores.softmax(-1), pattern)
        torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
        projected = cache["attention_result", i].sum(2) + block.self_attn.b_O
        torch.testing.assert_close(projected, block.self_attn.o(cache["attention_premix", i].flatten(2)))
    assert torch.equal(model.project_on_vocab(cache["layer_output", model.num_layers - 1]), logits)


def test_attention_result_is_written_and_carries_gradients(structure: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure))
    plain = model(prompt())
    assert torch.equal(
        model.run_with_hooks(prompt(), fwd_hooks=[("attention_result", lambda value, hook: None)]), plain
    )

    def ablate_result(value: Tensor, hook: Any) -> None:
        value[:, :, 1] = 0

    by_result = model.run_with_hooks(prompt(), fwd_hooks=[(("attention_result", 1), ablate_result)])
    by_premix = model.run_with_hooks(prompt(), fwd_hooks=[(("attention_premix", 1), ablate_result)])
    torch.testing.assert_close(by_result, by_premix)
    assert not torch.allclose(by_result, plain)

    def gradients(names: list[str]) -> tuple[Any, dict[str, Tensor]]:
        model.zero_grad()
        _, cache = model.run_with_cache(prompt(), names_filter=names, incl_bwd=True, return_type="loss")
        return cache, {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    cache, with_result = gradients(["attention_result", "attention_output"])
    _, without = gradients(["attention_output"])
    for name, gradient in without.items():
        torch.testing.assert_close(with_result[name], gradient)
    if model.config.layers[0].post_norm is None:
        expected = cache["attention_output_grad", 1][:, :, None].expand_as(cache["attention_result", 1])
        torch.testing.assert_close(cache["attention_result_grad", 1], expected)


# -- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_a_padded_row_computes_what_it_computes_alone(structure: Recipe, attn: str, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure), attn_implementation=attn)
    tokens, mask, _ = left_padded()
    padded = model(tokens, attention_mask=mask)
    # Rows computed together and alone are matrix products of other sizes, which round differently.
    torch.testing.assert_close(padded[0, 4:], model(tokens[:1, 4:])[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded[1], model(tokens[1:])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.unchecked
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_nan(structure: Recipe, attn: str, dtype: torch.dtype, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure), dtype=dtype, attn_implementation=attn)
    tokens, mask, _ = left_padded()
    everything = [name for name, point in model.names.points.items() if attn == "eager" or point.value not in OPEN]
    _, cache = model.run_with_cache(
        tokens, names_filter=everything, attention_mask=mask, incl_bwd=True, return_type="loss"
    )
    for name, value in cache.items():
        assert not isinstance(value, Tensor) or value.isfinite().all(), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


# -- reading changes nothing -------------------------------------------------------------------------------------


@torch.no_grad()
def test_reading_changes_nothing(structure: Recipe, checkpoints: Folders) -> None:
    folder = checkpoints(structure)
    fast, eager = (HookedTransformer.from_pretrained(folder, attn_implementation=attn) for attn in ("sdpa", "eager"))
    closed = [name for name, point in fast.names.points.items() if point.value not in OPEN]
    for model, names in ((fast, closed), (eager, None)):
        plain = model(prompt())
        cached, cache = model.run_with_cache(prompt(), names_filter=names)
        assert torch.equal(cached, plain)
        again, twice = model.run_with_cache(prompt(), names_filter=list(reversed(names or list(cache))))
        assert torch.equal(again, plain)
        for name in cache:
            assert cache[name] is twice[name] or isinstance(cache[name], tuple) or torch.equal(cache[name], twice[name])
        hooks = [(names or (lambda name: True), lambda value, hook: None)]
        assert torch.equal(model.run_with_hooks(prompt(), fwd_hooks=hooks), plain)
        with torch.inference_mode():
            assert torch.equal(model(prompt()), plain)
            assert torch.equal(model.run_with_cache(prompt(), names_filter=names)[0], plain)
    # One open block of a fast model rounds as eager attention does, and no more than rounds.
    torch.testing.assert_close(fast.run_with_cache(prompt())[0], fast(prompt()), atol=1e-4, rtol=1e-4)


# -- parts of the stack ------------------------------------------------------------------------------------------


@torch.no_grad()
def test_start_and_stop(structure: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure))
    logits, cache = model.run_with_cache(prompt(), names_filter="layer_input")
    for k in range(model.num_layers):
        stopped, seen = model.run_with_cache(prompt(), names_filter="*put*", stop_at_layer=k)
        assert torch.equal(stopped, cache["layer_input", k])
        assert not [name for name in seen if name.startswith(f"layers.{k}.") or name[6:] == "norm_output"]
        assert torch.equal(model(stopped, start_at_layer=k), logits)
    assert torch.equal(model(prompt(), stop_at_layer=-1), cache["layer_input", model.num_layers - 1])
    middle = model(model(prompt(), stop_at_layer=1), start_at_layer=1, stop_at_layer=2)
    assert torch.equal(middle, cache["layer_input", 2])


def scale_queries(model: HookedTransformer, factor: float) -> None:
    """By their norm where there is one, else by their projection."""
    for block in model.layers:
        attention, rows = block.self_attn, model.num_heads * model.qk_head_dim
        if isinstance(attention, LatentAttention):
            attention.q.up.weight *= factor
            continue
        scales = attention.q_norm or next(each for each in attention.projections.children())
        for parameter in scales.parameters():
            queries = parameter if attention.q_norm else parameter[:rows]
            if attention.cfg.fused == "by_head":
                queries = parameter.unflatten(0, (model.num_heads, 3, model.head_dim))[:, 0]
            queries *= factor


def passes_65504(recipe: Recipe) -> bool:
    """Whether float16 scores of the family can and come back: none that are capped or wide, nor products of scaled
    queries, nor scores beside a sink's, which are not finer relative to their largest."""
    config = converters.read_config(hf_config(recipe).to_dict())
    attention = config.attention
    return not (
        attention.softcap
        or attention.wide_scores
        or attention.scaled_queries
        or attention.sinks
        or config.norm.around_one
    )


# -- float16 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", filter(passes_65504, STRUCTURES), ids=lambda recipe: recipe.id)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_eager_float16_is_finite_where_the_product_passes_65504(
    recipe: Recipe, grad: bool, checkpoints: Folders, tmp_path: Path
) -> None:
    """phi-2's trouble: transformers' eager attention overflows to NaN; ours is finite, and says what float32 says."""
    folder = checkpoints(recipe)
    _, cache = HookedTransformer.from_pretrained(folder).run_with_cache(prompt(), names_filter="attention_queries")
    factor = 20_000 / max(float(value.abs().max()) for value in cache.values())
    model = copy.deepcopy(HookedTransformer.from_pretrained(folder))
    with torch.no_grad():
        scale_queries(model, factor)
    folder = tmp_path / "scaled"
    converters.export(model, folder)
    half, single = (
        HookedTransformer.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float16, torch.float32)
    )
    with torch.set_grad_enabled(grad):
        _, cache = half.run_with_cache(prompt(), return_type="loss", incl_bwd=grad)
        _, wide = single.run_with_cache(prompt())
    assert load_reference(folder, torch.float16)(prompt()).logits.isnan().any(), "transformers does not overflow here"
    for name, value in cache.items():
        assert not isinstance(value, Tensor) or value.isfinite().all(), name
    sure = wide["attention_probabilities", 0].amax(-1) > 0.9999
    agree = cache["attention_probabilities", 0].argmax(-1) == wide["attention_probabilities", 0].argmax(-1)
    assert sure.any()
    assert agree[sure].float().mean() > 0.97  # the queries themselves are rounded to float16


@torch.no_grad()
def test_float16_eager_on_weights_where_strides_decide(tmp_path: Path) -> None:
    """Two draws on which a plain call of transformers (with its cache) and one without it differ in a last bit."""
    import transformers

    recipe = NAMED["phimoe-tied"]
    for seed, size in ((0, (2, 13)), (2, (3, 17))):
        torch.manual_seed(seed)
        theirs = transformers.AutoModelForCausalLM.from_config(hf_config(recipe))
        shake(theirs, seed)
        theirs.save_pretrained(tmp_path / str(seed))
        model, reference = both(tmp_path / str(seed), "eager", torch.float16)
        tokens = torch.randint(0, VOCAB, size, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(model(tokens), reference.model(tokens).logits)
