"""Fresh models start as transformers' `from_config` does, and configs of older files still load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import converters
from tests.tiny import FAMILIES, NAMED, VOCAB, Folders, Recipe, hf_config, spelled
from transformer_std import HookedTransformer
from transformer_std.config import TransformerConfig


@pytest.fixture(
    params=[(base, tied) for base in FAMILIES for tied in (False, True)], ids=lambda each: f"{each[0].id}-{each[1]}"
)
def released(request: pytest.FixtureRequest) -> Any:
    """transformers' config of a family, its head tied or not, with a spread that no default has."""
    base, tied = request.param
    settings = {**base.settings, "tie_word_embeddings": tied, spelled(base, "initializer_range"): 0.05}
    return hf_config(Recipe(base.family, base.name, settings))


def test_fresh_weights_are_drawn_as_in_transformers(released: Any) -> None:
    torch.manual_seed(0)
    theirs = HookedTransformer.from_pretrained(transformers.AutoModelForCausalLM.from_config(released))
    model = HookedTransformer(converters.read_config(released.to_dict()), seed=0)
    expected = dict(theirs.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected)
    measured = 0
    for name, drawn in model.named_parameters():
        other = expected[name]
        assert drawn.requires_grad == other.requires_grad
        # Biases, routers, the padding token's row; and norms. By rows: noise, too, is exactly 0 now and then.
        assert torch.equal((drawn == 0).all(-1), (other == 0).all(-1)), name
        assert torch.equal((drawn == 1).all(-1), (other == 1).all(-1)), name
        noise, other = drawn[drawn != 0].detach(), other[other != 0].detach()
        if len(noise) == 0 or (noise == 1).all():
            continue
        measured += 1
        five = 5 / math.sqrt(2 * len(noise))  # standard errors of a standard deviation, relative to it
        narrow = model.config.narrow_writers and name.endswith((".o.weight", ".down.weight"))
        std = 0.05 / math.sqrt(2 * model.num_layers) if narrow else 0.05
        assert float(noise.std()) == pytest.approx(std, rel=five), name
        assert float(other.std()) == pytest.approx(std, rel=five), name
        assert abs(float(noise.mean())) < 5 * std / math.sqrt(len(noise)), name
        if len(noise) > 1000:  # normal, not uniform of the same spread, which ends at 1.73
            assert float(noise.abs().max()) > 2.5 * std, name
    assert measured > 4 * model.num_layers


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_first_loss_is_that_of_a_guess(base: Recipe, tied: bool) -> None:
    config = hf_config(Recipe(base.family, base.name, {**base.settings, "tie_word_embeddings": tied}))
    model = HookedTransformer(converters.read_config(config.to_dict()), seed=0)
    tokens = torch.randint(0, VOCAB, (8, 64), generator=torch.Generator().manual_seed(1))
    assert float(model(tokens, return_type="loss")) == pytest.approx(math.log(VOCAB), rel=0.02)


def test_a_seed_says_all_and_touches_nothing() -> None:
    config = converters.read_config(hf_config(NAMED["qwen2_moe-base"]).to_dict())
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, again, other = (HookedTransformer(config, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    bare = HookedTransformer(config).state_dict()
    assert not torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    repeated = HookedTransformer(config).state_dict()
    assert all(torch.equal(bare[name], repeated[name]) for name in bare)


def test_weights_without_memory_are_not_drawn() -> None:
    config = converters.read_config(hf_config(NAMED["afmoe-base"]).to_dict())
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        model = HookedTransformer(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="not in memory"):
        model.init_weights()
    model.to_empty(device="cpu").init_weights(seed=3)
    expected = HookedTransformer(config, seed=3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_weights_that_are_not_the_models_own_are_not_drawn() -> None:
    model = HookedTransformer(converters.read_config(hf_config(NAMED["phi-base"]).to_dict()), seed=0)
    model.layers[2].self_attn.o = nn.Linear(96, 96)
    before = model.embed_tokens.weight.clone()
    with pytest.raises(RuntimeError, match=r"layers.2.self_attn.o.weight is not the model's own"):
        model.init_weights()
    assert torch.equal(model.embed_tokens.weight, before)


@pytest.mark.parametrize(("value", "spread"), [(0.3, 0.3), (None, 0.02), (0.0, 0.02), (1, 1.0)])
def test_the_releases_initializer_range(value: Any, spread: float) -> None:
    config = converters.read_config({**hf_config(NAMED["phi3-base"]).to_dict(), "initializer_range": value})
    assert config.initializer_range == spread
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", ["qwen2_moe-dense_first", "afmoe-base", "phimoe-base", "phi3-longrope"])
def test_files_from_before_a_field_was_there(name: str, checkpoints: Folders, tmp_path: Path) -> None:
    """A field that a file lacks takes its default; a dense MLP stays one, and a mixture with its router another."""
    model = HookedTransformer.from_pretrained(checkpoints(NAMED[name]))
    model.save_pretrained(tmp_path)
    path = tmp_path / "transformer_std.json"
    values = json.loads(path.read_text())
    del values["initializer_range"], values["head_bias"]
    for layer in values["layers"]:
        for field in ("shared_first", "shared_gate", "bias"):
            layer["mlp"].pop(field, None)
        layer["attention"].pop("window")
    config = TransformerConfig.from_dict(values)
    assert config.initializer_range == 0.02
    for old, new in zip(config.layers, model.config.layers, strict=True):
        assert type(old.mlp) is type(new.mlp)
        assert type(getattr(old.mlp, "router", None)) is type(getattr(new.mlp, "router", None))
        assert not getattr(old.mlp, "shared_first", False)
    whole = json.loads(path.read_text())
    del whole["initializer_range"]
    path.write_text(json.dumps(whole))
    again = HookedTransformer.from_pretrained(tmp_path)
    assert again.config == model.config
    whole["layers"][0]["mlp"]["unheard_of"] = 1
    with pytest.raises(TypeError, match="unheard_of"):
        TransformerConfig.from_dict(whole)
