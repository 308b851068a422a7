"""Our own format over versions: what was written once is read for good."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import converters
from tests.tiny import BASES, Recipe, hf_config
from transformer_std import HookedTransformer, TransformerConfig
from transformer_std.config import Layer, Mixture

DATA = Path(__file__).parent / "data"
# Written by the first version, and what its logits of three tokens summed to there.
WRITTEN = {"format_1_dense": -0.0790344444103539, "format_1_mixture": 0.35823285207152367}


@pytest.mark.quick
@pytest.mark.parametrize("name", WRITTEN)
def test_what_an_older_version_wrote_is_read(name: str, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(DATA / name)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]]))
    assert logits.double().sum().item() == pytest.approx(WRITTEN[name], abs=1e-5)  # another machine's last bits
    model.save_pretrained(tmp_path)
    again = HookedTransformer.from_pretrained(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(*each) for each in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.quick
def test_a_field_that_came_later_takes_its_default() -> None:
    config = converters.read_config(hf_config(BASES[3]).to_dict())
    values = config.to_dict()
    for layer in values["layers"]:
        for name in ("shared_first", "shared_gate"):
            del layer["mlp"][name]
    first = TransformerConfig.from_dict(values).layers[0]
    assert isinstance(first, Layer)
    assert isinstance(first.mlp, Mixture)
    assert (first.mlp.shared_first, first.mlp.shared_gate) == (False, False)


@pytest.mark.quick
def test_a_config_survives(family: Recipe) -> None:
    config = converters.read_config(hf_config(family).to_dict())
    assert TransformerConfig.from_dict(config.to_dict()) == config


@pytest.mark.quick
@pytest.mark.parametrize("base", BASES[:5], ids=lambda recipe: recipe.id)
def test_a_config_survives_without_tags(base: Recipe) -> None:
    """As format 1 had those of the families that there were."""
    config = converters.read_config(hf_config(base).to_dict())
    assert TransformerConfig.from_dict(dataclasses.asdict(config)) == config


@pytest.mark.quick
def test_an_unknown_field_names_the_version() -> None:
    values = converters.read_config(hf_config(BASES[0]).to_dict()).to_dict()
    with pytest.raises(TypeError, match=r"TransformerConfig has no field 'sinks'; it is of format 4, .* reads 3"):
        TransformerConfig.from_dict({**values, "format": 4, "sinks": 1})
    values["layers"][0]["is"] = "Recurrence"
    with pytest.raises(TypeError, match="there is no 'Recurrence' here"):
        TransformerConfig.from_dict(values)
