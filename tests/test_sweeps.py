"""The labelled answer of a sweep, ablations, and attribution patching against finite differences and plain hooks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor

from tests.oracle import both
from tests.tiny import BASES, LENGTH, MASK, NAMED, Folders, Recipe, clean, corrupted, prompt, score
from transformer_std import HookedTransformer, UnknownName
from transformer_std.analysis.labels import Sweep
from transformer_std.layouts import axes as layout_axes

# -- labels ------------------------------------------------------------------------------------------------------


def sweep() -> Sweep:
    words = [(0, "The"), (1, " cat"), (2, " sat"), (3, " cat")]
    values = torch.arange(12.0).reshape(3, 4)
    return Sweep.of(
        values, [("layer", [0, 1, 2]), ("seq", words)], "layer_input", torch.tensor(10.0), torch.tensor(3.0)
    )


@pytest.mark.quick
def test_a_sweep_is_a_tensor() -> None:
    found, plain = sweep(), torch.arange(12.0).reshape(3, 4)
    assert isinstance(found, Tensor)
    assert torch.equal(found, plain)
    assert found.shape == (3, 4)
    assert float(found.max()) == 11
    assert type(found.values) is type(found.softmax(-1)) is type(torch.stack([found, found])) is Tensor
    assert found.tolist() == plain.tolist()
    assert (found.numpy() == plain.numpy()).all()
    assert found.argmax().item() == 11
    assert torch.equal(torch.cat([found, plain]), torch.cat([plain, plain]))
    assert bool((found == plain).all())


@pytest.mark.quick
def test_arithmetic_and_indexing_keep_labels() -> None:
    found = sweep()
    for each in (found - 1, 2 / (found + 1), (found - found.baseline) / (found.clean - found.baseline), -found.abs()):
        assert isinstance(each, Sweep)
        assert each.axes == found.axes
    assert torch.equal((found - 1).values, found.values - 1)
    assert found[1].axes == found.axes[1:]
    assert found[:, 1].axes == found.axes[:1]
    assert found[..., 1:3].axes[1].labels == ((1, " cat"), (2, " sat"))
    assert found[[2, 0]].axes[0].labels == (2, 0)
    assert found[torch.tensor([True, False, True])].axes[0].labels == (0, 2)
    assert torch.equal(found[[2, 0]].values, found.values[[2, 0]])
    for plain in (found[None], found[found > 3], found[[0, 1], [1, 2]], found.T, found.sum(0), found.sort().values):
        assert type(plain) is Tensor
    assert found[1].baseline == 10


@pytest.mark.quick
def test_labels_are_looked_up() -> None:
    found = sweep()
    assert float(found[1, " sat"]) == float(found.at(layer=1, seq=" sat")) == float(found.at(layer=1, pos=2)) == 6
    assert found.at(seq=(3, " cat")).tolist() == [3, 7, 11]
    with pytest.raises(KeyError, match=r"' cat' is on 2 places of the axis seq"):
        found.at(seq=" cat")
    with pytest.raises(KeyError, match=r"' dog' is on no place of the axis seq: it has \(0, 'The'\)"):
        found[0, " dog"]
    with pytest.raises(KeyError, match="there is no axis 'head': the axes are layer, seq"):
        found.at(head=1)
    with pytest.raises(ValueError, match=r"labels for \[3\] places, values \[4\]"):
        Sweep.of(torch.ones(4), [("layer", range(3))])


@pytest.mark.quick
def test_a_printout_shows_what_is_far_from_the_baseline() -> None:
    assert repr(sweep()).splitlines()[:3] == [
        "Sweep [layer 3, seq 4], layer_input, baseline 10, clean 3",
        "           0  layer 0, seq 0 'The'",
        "           1  layer 0, seq 1 ' cat'",
    ]
    assert repr(sweep()).splitlines()[-1] == "  ... and 4 more"
    assert repr(sweep()[1, 2]) == "Sweep [], layer_input, baseline 10, clean 3\n           6  "
    assert f"{sweep()[1, 2]:.1f}" == "6.0"


@pytest.mark.quick
def test_a_sweep_survives() -> None:
    for again in (copy.deepcopy(sweep()), pickle.loads(pickle.dumps(sweep()))):
        assert torch.equal(again, sweep())
        assert (again.axes, again.what, again.baseline) == (sweep().axes, "layer_input", 10)


def test_pandas() -> None:
    frame = sweep().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["1", "2 ' sat'"] == 6
    assert (frame.index.name, frame.columns.name) == ("layer", "seq")
    assert sweep()[1].to_pandas().loc["0 'The'"] == 4
    cube = Sweep.of(torch.arange(8.0).reshape(2, 2, 2), [(name, range(2)) for name in "abc"])
    assert cube.to_pandas().loc[("1", "0"), "1"] == 5


# -- patching ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mixture(checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(NAMED["afmoe-base"]))


@torch.no_grad()
def test_the_answer_is_labelled(mixture: HookedTransformer) -> None:
    _, cache = mixture.run_with_cache(clean(), names_filter=["attention_premix", "logits"])
    found = mixture.activation_patching(corrupted(), cache, "z", score, over=("pos", "head"))
    assert [axis.name for axis in found.axes] == ["layer", "seq", "num_heads"]
    assert found.axes[0].labels == tuple(range(mixture.num_layers))
    assert torch.equal(found.baseline, score(mixture(corrupted())))
    assert torch.equal(found.clean, score(mixture(clean())))
    assert float(found.at(layer=1, head=2, pos=12)) == float(found[1, 12, 2])
    mixed = [("mlp_output", 0), ("attention_output", 1)]
    _, cache = mixture.run_with_cache(clean(), names_filter=mixed)
    found = mixture.activation_patching(corrupted(), cache, mixed, score)
    assert found.axes[0].labels == ("mlp_output 0", "attention_output 1")


@torch.no_grad()
def test_values_of_a_layer_together(mixture: HookedTransformer) -> None:
    values = ["attention_keys", "attention_values"]
    _, cache = mixture.run_with_cache(clean(), names_filter=values)
    found = mixture.activation_patching(corrupted(), cache, values, score, over="seq", together=True)
    assert found.shape == (mixture.num_layers, LENGTH)

    def patch(value: Tensor, hook: Any) -> None:
        value[:, :, 4] = cache[hook.name][:, :, 4]

    alone = mixture.run_with_hooks(corrupted(), fwd_hooks=[([(value, 2) for value in values], patch)])
    torch.testing.assert_close(found[2, 4].values, score(alone), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_only_the_logits_that_are_read_are_made(mixture: HookedTransformer) -> None:
    _, cache = mixture.run_with_cache(clean(), names_filter="layer_output")
    seen: list[int] = []

    def watching(metric: Any) -> Any:
        def of(logits: Tensor) -> Any:
            seen.append(logits.shape[1])
            return metric(logits)

        return of

    last = mixture.activation_patching(corrupted(), cache, "layer_output", watching(score))
    assert set(seen[2:]) == {1}
    everything = mixture.activation_patching(corrupted(), cache, "layer_output", watching(score), positions="all")
    torch.testing.assert_close(last.values, everything.values, rtol=1e-4, atol=1e-4)

    def wants_all(logits: Tensor) -> Tensor:
        assert logits.shape[1] == LENGTH
        return logits[0, -1, 3]

    for metric in (wants_all, lambda logits: logits[0, 3, 5], lambda logits: logits[0, :, 5].sum()):
        seen.clear()
        mixture.activation_patching(corrupted(), cache, "layer_output", watching(metric))
        assert set(seen[2:]) == {LENGTH}  # behind the plain run's, all and the last
    with pytest.raises(ValueError, match="positions is 'first'; give 'all', 'last'"):
        mixture.activation_patching(corrupted(), cache, "layer_output", score, positions="first")
    padded = mixture.activation_patching(
        prompt(), mixture.run_with_cache(prompt(), attention_mask=MASK.flip(1))[1], ("layer_output", 1),
        watching(lambda logits: logits[:, -1, 3]), attention_mask=MASK.flip(1),
    )  # fmt: skip
    assert padded.shape == (1, LENGTH, 2)
    assert seen[-1] == LENGTH  # the last column is no row's last word


# -- ablation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [BASES[0], NAMED["gemma2-base"]], ids=lambda base: base.id)
@torch.no_grad()
def test_ablations_are_transformers_with_one_edit(base: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(base))
    _, other = model.run_with_cache(clean(), names_filter="attention_premix")
    run = reference.run(corrupted())
    for kind in ("zero", "mean", "mean by position", other):
        found = model.ablate(corrupted(), "attention_premix", score, kind, over="num_heads")
        for layer, head in ((0, 1), (2, 5)):
            name = f"layers.{layer}.self_attn.attention_premix"
            own = run.value(name)
            if isinstance(kind, str):
                put = {"zero": own * 0, "mean": own.mean((0, 1), keepdim=True), "mean by position": own.mean(0)}[kind]
            else:
                put = kind[name]
            put = put.expand_as(own).clone()

            def edit(seen: Tensor, put: Tensor = put, head: int = head) -> None:
                seen[:, :, head] = put[:, :, head]

            expected = score(reference.run(corrupted(), edits={name: edit}).logits)
            torch.testing.assert_close(found[layer, head].values, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.baseline, score(model(corrupted())))


@torch.no_grad()
def test_what_an_ablation_puts(mixture: HookedTransformer) -> None:
    """Means are over real tokens; a corpus's means are repeated; whole layers go with no axis; noise is drawn."""
    held: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> None:
        held.append(value.clone())

    with mixture.hooks(fwd_hooks=[(("mlp_output", 1), keep)]):
        plain = mixture(prompt(), attention_mask=MASK)
        found = mixture.ablate(
            prompt(), ("mlp_output", 1), lambda logits: logits[:, -1, 3], "mean", over=(), attention_mask=MASK
        )
    mean = held[0][MASK.bool()].mean(0)

    def put(value: Tensor, hook: Any) -> Tensor:
        return mean.expand_as(value)

    expected = mixture.run_with_hooks(prompt(), attention_mask=MASK, fwd_hooks=[(("mlp_output", 1), put)])
    torch.testing.assert_close(found[0].values, expected[:, -1, 3], rtol=1e-4, atol=1e-4)
    assert torch.equal(found.baseline, plain[:, -1, 3])
    statistics = {"layers.1.mlp.mlp_output": mean}
    by_hand = mixture.ablate(
        prompt(), ("mlp_output", 1), lambda logits: logits[:, -1, 3], statistics, over=(), attention_mask=MASK
    )
    torch.testing.assert_close(by_hand.values, found.values, rtol=1e-4, atol=1e-4)
    drawn = [
        mixture.ablate(corrupted(), "mlp_output", score, "noise", generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    experts = mixture.ablate(corrupted(), "expert_weights", score, over="top_k")
    assert experts.shape == (3, mixture.layers[1].mlp.top_k)
    with pytest.raises(ValueError, match="kind is 'none'; give 'zero', 'mean'"):
        mixture.ablate(corrupted(), "mlp_output", score, "none")
    with pytest.raises(UnknownName, match=r"does not hold layers.0.mlp.mlp_output"):
        mixture.ablate(corrupted(), "mlp_output", score, {})
    with pytest.raises(ValueError, match="expert_indices holds numbers of things, which have no mean"):
        mixture.ablate(corrupted(), "expert_indices", score, "mean", over="seq")


# -- attribution -------------------------------------------------------------------------------------------------

ATTRIBUTED = [
    ("layer_input", "seq"),
    ("attention_premix", ("num_heads", "seq")),
    ("attention_queries", "num_heads"),
    ("attention_probabilities", "num_heads"),
    ("mlp_neurons", ()),
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("value", "over"), ATTRIBUTED, ids=str)
def test_attribution_is_transformers_gradient(value: str, over: Any, structure: Recipe, checkpoints: Folders) -> None:
    """Times the difference of transformers' own values in its two runs."""
    model, reference = both(checkpoints(structure))
    _, cache = model.run_with_cache(clean(), names_filter=value)
    found = model.attribution_patching(corrupted(), cache, value, score, over=over)
    assert all(parameter.grad is None for parameter in model.parameters())
    run = reference.run(corrupted())
    score(run.logits).backward()
    with torch.no_grad():
        other = reference.run(clean())
    order = [over] if isinstance(over, str) else list(over)
    for at, name in zip(found.values, cache, strict=True):
        product = run.grad(name) * (other.value(name) - run.value(name))
        axes = layout_axes(model.names.points[name].layout)
        kept = [axes.index(each) for each in order]
        others = [i for i in range(product.ndim) if i not in kept]
        expected = product.permute(*kept, *others).flatten(len(kept)).sum(-1)
        torch.testing.assert_close(at, expected, rtol=1e-4, atol=1e-5)  # sums in another order


def test_a_heads_result_is_attributed_as_its_premix(structure: Recipe, checkpoints: Folders) -> None:
    """One is a linear map of the other."""
    model = HookedTransformer.from_pretrained(checkpoints(structure))
    _, cache = model.run_with_cache(clean(), names_filter=["attention_premix", "attention_result"])
    premix, result = (
        model.attribution_patching(corrupted(), cache, f"attention_{name}", score, over=("seq", "num_heads"))
        for name in ("premix", "result")
    )
    torch.testing.assert_close(result.values, premix.values, rtol=1e-3, atol=1e-4)


def test_it_is_what_patching_adds_where_that_is_linear(base: Recipe, checkpoints: Folders) -> None:
    """What the last MLP adds, under a metric that reads the stream before the final norm."""
    model = HookedTransformer.from_pretrained(checkpoints(base))
    last = ("mlp_output", model.num_layers - 1)
    _, cache = model.run_with_cache(clean(), names_filter=last)
    direction = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0))
    held: dict[str, Tensor] = {}

    def keep(stream: Tensor, hook: Any) -> None:
        held["stream"] = stream

    def linear(logits: Tensor) -> Tensor:
        """Of a run alone, since the stream is of all runs of a batch."""
        return (held["stream"] @ direction).sum()

    with model.hooks(fwd_hooks=[(("layer_output", model.num_layers - 1), keep)]):
        patched = model.activation_patching(corrupted(), cache, last, linear)
        for steps in (0, 3):
            found = model.attribution_patching(corrupted(), cache, last, linear, integrated_gradients=steps)
            torch.testing.assert_close(found.values, (patched - patched.baseline).values, rtol=1e-3, atol=1e-4)


def test_a_line_sums_to_what_patching_the_layer_adds(checkpoints: Folders) -> None:
    """Integrated gradients are complete, up to their step; one gradient is not."""
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"])).double()
    _, cache = model.run_with_cache(clean(), names_filter="layer_input")
    for layer in (1, 2):
        whole = model.activation_patching(corrupted(), cache, ("layer_input", layer), score, over=())
        added = float(whole - whole.baseline)
        plain = model.attribution_patching(corrupted(), cache, ("layer_input", layer), score)
        line = model.attribution_patching(corrupted(), cache, ("layer_input", layer), score, integrated_gradients=64)
        assert float(line.values.sum()) == pytest.approx(added, rel=0.01)
        assert abs(float(plain.values.sum()) - added) > abs(float(line.values.sum()) - added)


def test_a_model_without_gradients_is_attributed_too(mixture: HookedTransformer) -> None:
    _, cache = mixture.run_with_cache(clean(), names_filter=["expert_outputs", "expert_indices"])
    expected = mixture.attribution_patching(corrupted(), cache, "expert_outputs", score, over=("seq", "top_k"))
    assert expected.shape == (3, LENGTH, mixture.layers[1].mlp.top_k)
    mixture.requires_grad_(False)
    with torch.no_grad():
        found = mixture.attribution_patching(corrupted(), cache, "expert_outputs", score, over=("seq", "top_k"))
    assert torch.equal(found, expected)
    with pytest.raises(TypeError, match="the metric has no gradient"):
        mixture.attribution_patching(corrupted(), cache, "expert_outputs", lambda logits: 1.0)
    with pytest.raises(ValueError, match="expert_indices holds whole numbers"):
        mixture.attribution_patching(corrupted(), cache, "expert_indices", score)
    with pytest.raises(ValueError, match=r"in the clean run and \[1, 12, "):
        mixture.attribution_patching(corrupted()[:, :12], cache, "expert_outputs", score)


# -- heads -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_head_scores_are_shares_of_transformers_patterns(base: Recipe, checkpoints: Folders) -> None:
    """Key by key, on repeated tokens with a padded row."""
    model, reference = both(checkpoints(base))
    half = prompt(6)
    tokens, mask = torch.cat((half, half), 1), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model.head_scores(tokens, attention_mask=mask)
    run = reference.run(tokens, attention_mask=mask, position_ids=positions)
    assert [axis.name for axis in found.axes] == ["kind", "layer", "num_heads"]
    pattern = run.value("layers.1.self_attn.attention_probabilities")
    for kind in ("previous", "duplicate", "induction", "first"):
        total, count = torch.zeros(model.num_heads), 0
        for row in range(2):
            real = [i for i in range(12) if mask[row, i]]
            for query in real:
                earlier = [key for key in real if key < query]
                repeats = [key for key in earlier if tokens[row, key] == tokens[row, query]]
                keys = {
                    "previous": [key for key in earlier if key == query - 1],
                    "duplicate": repeats,
                    "induction": [key + 1 for key in repeats],
                    "first": [key for key in earlier if key == real[0]],
                }[kind]
                total += pattern[row, :, query, keys].sum(-1) if keys else 0
                count += bool(keys)
        torch.testing.assert_close(found.at(kind=kind, layer=1).values, total / count, rtol=1e-4, atol=1e-6)
