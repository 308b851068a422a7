"""Steering of any value in every way, and directions of examples, against transformers' run with the same edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.tiny import make_checkpoint
from tests.oracle import both
from tests.tiny import LENGTH, NAMED, Folders, Recipe, load_reference, prompt, shake
from transformer_std import HookedTransformer
from transformer_std.analysis.steering import Direction

LAYER = 1
WHERE: dict[str, Any] = {"token_positions": [[2, 5], [-1]]}


def there() -> Tensor:
    where = torch.zeros(2, LENGTH, dtype=torch.bool)
    where[0, [2, 5]] = where[1, -1] = True
    return where


def steered(how: str, vector: Tensor, factor: float) -> Any:
    """On [batch seq ...], by the definitions."""

    def edit(value: Tensor) -> Tensor:
        value, flat = value.clone(), vector.flatten()
        for row, place in there().nonzero().tolist():
            old = value[row, place].flatten().clone()
            if how == "add":
                new = old + factor * flat
            elif how == "replace":
                new = factor * flat
            else:
                new = old - factor * (old @ flat) / (flat @ flat) * flat
            value[row, place] = new.view_as(value[row, place])
        return value

    return edit


@pytest.mark.parametrize("how", ["add", "replace", "project_out"])
@pytest.mark.parametrize("value", ["layer_output", "mlp_output", "attention_premix", "mlp_neurons"])
@torch.no_grad()
def test_any_value_is_steered_in_every_way(value: str, how: str, base: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(base))
    point = model.names.at(value, LAYER).point
    shape = reference.run(prompt()).value(point.name).shape[2:]
    vector = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    expected = reference.run(prompt(), edits={point.name: steered(how, vector, 0.7)}).logits
    plain = model(prompt())
    with model.steer(LAYER, vector, 0.7, value=value, how=how, **WHERE):
        found = model(prompt())
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)  # a projection's sum goes in another order
    assert not torch.allclose(found, plain, atol=1e-3)
    assert torch.equal(model(prompt()), plain)


@torch.no_grad()
def test_queries_have_their_positions_elsewhere(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    vector = torch.randn(model.head_dim)
    name = ("attention_queries", LAYER)
    _, plain = model.run_with_cache(prompt(), names_filter=name)
    with model.steer(LAYER, vector, value="attention_queries", token_positions=3):
        _, cache = model.run_with_cache(prompt(), names_filter=name)
    expected = plain[name].clone()
    expected[:, :, 3] += vector
    assert torch.equal(cache[name], expected)


@torch.no_grad()
def test_a_factor_by_step(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    vector = torch.randn(model.hidden_size)
    asked: list[int] = []

    def fading(step: int) -> float:
        asked.append(step)
        return 2.0 / (step + 1)

    def by_hand(stream: Tensor, hook: Any) -> Tensor:
        return stream + 2.0 / (hook.step + 1) * vector

    with model.steer(LAYER, vector, fading):
        found = model.generate(prompt(), max_new_tokens=4, stop_at_eos=False)
    assert asked == [0, 1, 2, 3]
    with model.hooks(fwd_hooks=[(("layer_output", LAYER), by_hand)]):
        assert torch.equal(found, model.generate(prompt(), max_new_tokens=4, stop_at_eos=False))
    assert not torch.equal(found, model.generate(prompt(), max_new_tokens=4, stop_at_eos=False))


@pytest.mark.parametrize("at", ["last", "mean"])
@torch.no_grad()
def test_a_vector_is_the_difference_of_means(at: str, base: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(base))
    positive, negative = prompt(LENGTH, 5), prompt(LENGTH - 2, 3)
    name = model.names.at("layer_output", LAYER).point.name

    def mean(tokens: Tensor) -> Tensor:
        value = reference.run(tokens).value(name)
        return (value[:, -1] if at == "last" else value.mean(1)).mean(0)

    found = model.make_vector(positive, negative, layer=LAYER, at=at, batch_size=2)
    torch.testing.assert_close(found.vector, mean(positive) - mean(negative), atol=1e-5, rtol=1e-4)
    assert (found.value, found.layer) == ("layer_output", LAYER)
    assert model.make_vector(positive, negative).layer == model.num_layers // 2


@torch.no_grad()
def test_texts_of_many_lengths_end_at_their_own_last_token(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    positive, negative = ["the cat sat", "the dog sat on the red mat"], ["the sea"]
    found = model.make_vector(positive, negative, layer=LAYER)
    last = [model.run_with_cache(each)[1]["layer_output", LAYER][0, -1] for each in (*positive, *negative)]
    torch.testing.assert_close(found.vector, (last[0] + last[1]) / 2 - last[2], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_direction_is_kept_and_refused_elsewhere(checkpoints: Folders, tmp_path: Path) -> None:
    recipe, file = NAMED["phimoe-base"], tmp_path / "calm.safetensors"
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    made = model.make_vector(prompt(LENGTH, 3), prompt(7, 2), "attention_premix", LAYER)
    assert repr(made).startswith("Direction(attention_premix 1, [6, 16], norm ")
    made.save(file)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        again = Direction.load(file, HookedTransformer.from_pretrained(checkpoints(recipe), dtype=dtype))
        assert torch.equal(again.vector, made.vector)
    with model.steer(again, how="project_out"):
        found = model(prompt())
    with model.steer(LAYER, made.vector, value="attention_premix", how="project_out"):
        assert torch.equal(found, model(prompt()))
    tuned = load_reference(checkpoints(recipe))
    shake(tuned, 1)
    for other in (HookedTransformer.from_pretrained(tuned),
                  HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))):  # fmt: skip
        with pytest.raises(ValueError, match="is a direction of another model: its weights differ"):
            Direction.load(file, other)
    assert Direction.load(file).layer == LAYER
    (tmp_path / "x").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"x is not a direction that Direction.save wrote"):
        Direction.load(tmp_path / "x")


def test_what_cannot_steer_is_refused(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    vector = torch.randn(model.hidden_size)
    for arguments, said in (
        ({"vector": vector, "how": "multiply"}, "give 'add', 'replace', 'project_out'"),
        ({"vector": vector, "value": "attention_probabilities"}, "which has no positions to steer at"),
        ({"vector": vector[:5]}, r"the vector is \[5\]; the stream has 96 dimensions"),
        ({"vector": vector[None, None]}, r"the vector is \[1, 1, 96\]; layers.1.layer_output is"),
        ({"vector": vector.long()}, "give one of real numbers"),
        ({}, "there is no vector"),
    ):
        with pytest.raises(ValueError, match=said), model.steer(LAYER, **arguments):
            pass
    with model.steer(LAYER, vector[:5], value="attention_premix"), pytest.raises(ValueError, match=r"vector is \[5\]"):
        model(prompt())
    with pytest.raises(ValueError, match="give 'last' or 'mean'"):
        model.make_vector(prompt(), prompt(), at="first")
    for positive, negative in (([], prompt()), (prompt(), [])):
        with pytest.raises(TypeError, match="the input is an empty list"):
            model.make_vector(positive, negative)
