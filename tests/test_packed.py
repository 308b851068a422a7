"""Rows that hold several documents, whose positions begin anew at 0."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.tiny import BASES, NAMED, Folders, Recipe, load_reference, prompt
from transformer_std import HookedTransformer

STARTS = ((0, 7, 13), (0, 3, 13))
POSITIONS = torch.tensor([[*range(7), *range(6)], [*range(3), *range(10)]])
WINDOW = NAMED["phi3-window"]
SEES_PACKED = [recipe for recipe in (*BASES, WINDOW) if recipe.family != "afmoe"]  # transformers' afmoe looks over it


@pytest.mark.parametrize("recipe", [*BASES, WINDOW], ids=lambda recipe: recipe.id)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_a_document_in_a_packed_row_computes_what_it_computes_alone(
    recipe: Recipe, attn: str, checkpoints: Folders
) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe), attn_implementation=attn)
    logits, losses = model(prompt(), position_ids=POSITIONS, return_type="both", loss_per_token=True)
    for row, bounds in enumerate(STARTS):
        for start, end in itertools.pairwise(bounds):
            alone, loss = model(prompt()[row : row + 1, start:end], return_type="both", loss_per_token=True)
            # Of other sizes, products and kernels round otherwise: a few units of float32.
            torch.testing.assert_close(logits[row, start:end], alone[0], rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(losses[row, start : end - 1], loss[0], rtol=1e-4, atol=2e-5)
            assert losses[row, end - 1 : end].isnan().all()
    mean = model(prompt(), position_ids=POSITIONS, return_type="loss")
    torch.testing.assert_close(mean, losses.nanmean())


@pytest.mark.parametrize("recipe", SEES_PACKED, ids=lambda recipe: recipe.id)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_rows_are_transformers_without_its_cache(recipe: Recipe, attn: str, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe), attn_implementation=attn)
    theirs = load_reference(checkpoints(recipe), attn=attn)
    for positions in (POSITIONS, torch.arange(13)[None], torch.arange(13)[None] + 5):
        wanted = theirs(prompt(), position_ids=positions.expand(2, -1), use_cache=False).logits
        assert torch.equal(model(prompt(), position_ids=positions), wanted)


@torch.no_grad()
def test_positions_beside_a_mask_pack_nothing(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    mask = torch.ones_like(prompt())
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(prompt(), attention_mask=mask, position_ids=positions)
    assert torch.equal(found, model(prompt(), attention_mask=mask))
