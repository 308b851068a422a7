"""Statements about one family that no other test makes, and the table of them all (FAMILY_FACTS.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import converters
from tests.tiny import BOUNDARY, NAMED, Folders, prompt
from transformer_std import HookedTransformer

TESTS = Path(__file__).parent


def test_the_table_names_tests_that_exist() -> None:
    """Each row below the head names at least one; and the table has rows of every family."""
    written = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", written, re.MULTILINE))
    head, _, *rows = [line for line in (TESTS / "FAMILY_FACTS.md").read_text().splitlines() if line.startswith("|")]
    assert head == "| family | statement | test |"
    families = {family for row in rows for family in row.split("|")[1].strip().split(", ")}
    assert families == {"all", *converters.families()}
    for row in rows:
        named = re.findall(r"`(\w+)`", row.split("|")[3])
        assert named, row
        assert set(named) <= tests, row


def load(name: str, checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(NAMED[name]))


@torch.no_grad()
def test_parallel_sublayers_do_not_meet(checkpoints: Folders) -> None:
    model = load("phi-base", checkpoints)
    closed = ["mlp_input", "attention_output"]
    _, clean = model.run_with_cache(prompt(), names_filter=closed)
    with model.hooks(fwd_hooks=[(("attention_output", 1), lambda value, hook: value * 0)]):
        _, ablated = model.run_with_cache(prompt(), names_filter=closed)
    assert torch.equal(ablated["mlp_input", 1], clean["mlp_input", 1])
    assert not torch.equal(ablated["mlp_input", 2], clean["mlp_input", 2])


@torch.no_grad()
def test_rotary_leaves_the_tail(checkpoints: Folders) -> None:
    for name, turned in (("phi-base", 8), ("phi-share_of_head", 6), ("phi3-longrope_partial", 12)):
        _, cache = load(name, checkpoints).run_with_cache(prompt())
        for each in ("queries", "keys"):
            raw, after = cache[f"attention_{each}_before_rotary", 1], cache[f"attention_{each}", 1]
            assert torch.equal(raw[..., turned:], after[..., turned:])
            assert not torch.equal(raw[:, :, 1:, :turned], after[:, :, 1:, :turned])


@torch.no_grad()
def test_fused_projections_are_slices(checkpoints: Folders) -> None:
    model = load("phi3-base", checkpoints)
    _, cache = model.run_with_cache(prompt())
    qkv = model.layers[1].self_attn.projections.qkv(cache["attention_input", 1])
    q, k, v = qkv.split([6 * 16, 2 * 16, 2 * 16], dim=-1)
    assert torch.equal(q.view(2, -1, 6, 16).transpose(1, 2), cache["attention_queries_before_rotary", 1])
    assert torch.equal(k.view(2, -1, 2, 16).transpose(1, 2), cache["attention_keys_before_rotary", 1])
    assert torch.equal(v.view(2, -1, 2, 16).transpose(1, 2), cache["attention_values", 1])


@torch.no_grad()
def test_fused_gate_and_up_are_halves(checkpoints: Folders) -> None:
    model = load("phi3-base", checkpoints)
    _, cache = model.run_with_cache(prompt())
    gate, up = model.layers[1].mlp.gate_up(cache["mlp_input", 1]).chunk(2, dim=-1)
    assert torch.equal(up * torch.nn.functional.silu(gate), cache["mlp_neurons", 1])


@torch.no_grad()
def test_longrope_scales_and_switches(checkpoints: Folders) -> None:
    """Position 5 turns otherwise in a prompt that crosses the boundary; every turned norm is scaled alike."""
    model = load("phi3-longrope", checkpoints)
    tokens = prompt(BOUNDARY + 1)[:, :6]
    pad = prompt(BOUNDARY + 1)
    _, at = model.run_with_cache(torch.cat((tokens, pad[:, 6:BOUNDARY]), 1))
    _, past = model.run_with_cache(torch.cat((tokens, pad[:, 6:]), 1))
    assert torch.equal(
        at["attention_queries_before_rotary", 0][:, :, 5], past["attention_queries_before_rotary", 0][:, :, 5]
    )
    assert not torch.allclose(at["attention_queries", 0][:, :, 5], past["attention_queries", 0][:, :, 5])
    scale = model.config.layers[0].attention.rotary.scaling.scale
    assert scale > 1
    for cache in (at, past):
        raw, turned = (
            cache["attention_queries_before_rotary", 0].norm(dim=-1),
            cache["attention_queries", 0].norm(dim=-1),
        )
        torch.testing.assert_close(turned, raw * scale)


@torch.no_grad()
def test_windows_are_exact(checkpoints: Folders) -> None:
    for name, window, layer in (("phi3-window", 5, 1), ("phimoe-head_dim_window", 5, 1), ("afmoe-base", 6, 1)):
        _, cache = load(name, checkpoints).run_with_cache(prompt())
        seen = cache["attention_probabilities", layer] != 0
        for query in range(prompt().shape[1]):
            expected = [max(0, query - window + 1) <= key <= query for key in range(prompt().shape[1])]
            assert seen[:, :, query].all(0).all(0).tolist() == expected


@torch.no_grad()
def test_post_norm_outputs_are_the_contributions(checkpoints: Folders) -> None:
    model = load("afmoe-base", checkpoints)
    _, clean = model.run_with_cache(prompt())

    def halve(value: Tensor, hook: Any) -> None:
        value *= 0.5

    with model.hooks(fwd_hooks=[(("mlp_output", 1), halve)]):
        _, halved = model.run_with_cache(prompt())
    change = clean["layer_output", 1] - halved["layer_output", 1]
    torch.testing.assert_close(change, 0.5 * clean["mlp_output", 1])
    with model.hooks(fwd_hooks=[(("mlp_unnormed_output", 1), halve)]):
        _, rescaled = model.run_with_cache(prompt())
    # The norm is scale-invariant up to its eps: what enters it can be halved and nothing follows.
    torch.testing.assert_close(rescaled["layer_output", 1], clean["layer_output", 1], atol=1e-3, rtol=1e-3)
    post = model.layers[1].mlp.post_norm
    assert torch.equal(post(clean["mlp_unnormed_output", 1]), clean["mlp_output", 1])


@torch.no_grad()
def test_the_output_gate(checkpoints: Folders) -> None:
    _, cache = load("afmoe-base", checkpoints).run_with_cache(prompt())
    gated = cache["attention_head_outputs", 1] * cache["attention_gate", 1].sigmoid()
    assert torch.equal(gated, cache["attention_premix", 1])


@torch.no_grad()
def test_full_blocks_do_not_turn(checkpoints: Folders) -> None:
    model = load("afmoe-base", checkpoints)
    _, cache = model.run_with_cache(prompt())
    full = [i for i, layer in enumerate(model.config.layers) if layer.attention.rotary is None]
    assert full == [2]
    for i in range(model.num_layers):
        same = torch.equal(cache["attention_queries", i], cache["attention_queries_before_rotary", i])
        assert same == (i in full)
