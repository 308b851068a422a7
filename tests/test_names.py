"""Names: printouts, TransformerLens' names, and what is said of a name that means nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import converters
from tests.tiny import BASES, LENGTH, NAMED, Folders, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName
from transformer_std.hooks.transformer_lens import NAMES, POSITIONS_FIRST
from transformer_std.printing import printout

PAIRS = {name.format(i=1): ours.format(i=1) for name, ours in NAMES.items()}


def test_each_transformerlens_name_is_of_a_value_that_some_family_has(checkpoints: Folders) -> None:
    models = [HookedTransformer.from_pretrained(checkpoints(each)) for each in BASES]
    for name, ours in PAIRS.items():
        assert any(ours in each.names.points for each in models), name


def test_printout(model: HookedTransformer) -> None:
    lines = [line.strip() for line in printout(model).splitlines()]
    assert repr(model) == printout(model)
    for point in model.names.points.values():
        name = point.name.rpartition(".")[2]
        assert any(line.startswith(f"({name}) -> ") and line.endswith(point.description) for line in lines), point.name
    assert "(embed_tokens): Embedding(131, 96)" in lines
    assert not any("Missing" in line for line in lines)


def test_equal_blocks_are_folded(checkpoints: Folders) -> None:
    text = printout(HookedTransformer.from_pretrained(checkpoints(NAMED["afmoe-base"])))
    folded = re.findall(r"\(([\d-]+)\): (?:(\d+) x )?SequentialBlock", text)
    assert folded == [("0", ""), ("1-3", "3")]
    text = printout(HookedTransformer.from_pretrained(checkpoints(NAMED["phi-base"])))
    assert re.findall(r"\(([\d-]+)\): (?:(\d+) x )?ParallelBlock", text) == [("0-2", "3")]


def test_get_name(model: HookedTransformer) -> None:
    assert model.get_name("mlp_output", -1) == f"layers.{model.num_layers - 1}.mlp.mlp_output"
    assert model.get_name("logits") == "logits"
    assert model.get_name("blocks.1.attn.hook_pattern") == "layers.1.self_attn.attention_probabilities"
    with pytest.raises(UnknownName, match="did you mean mlp_output"):
        model.get_name("mlp_outpu", 0)
    with pytest.raises(UnknownName, match="out of range"):
        model.get_name("mlp_output", 99)
    if model.config.layers[0].kind == "parallel":
        with pytest.raises(Unavailable, match="parallel"):
            model.get_name("layer_mid", 0)


@torch.no_grad()
def test_lens_names_are_the_values_in_lens_order(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt())
    here = {name: ours for name, ours in PAIRS.items() if ours in cache}
    for name in PAIRS.keys() - here:
        with pytest.raises(Unavailable):
            model.get_name(name)
    seen: dict[str, Tensor] = {}
    hooks = [(name, lambda value, hook: seen.update({hook.name: value})) for name in here]
    model.run_with_hooks(prompt(), fwd_hooks=hooks)
    assert seen.keys() == here.keys()
    for name, ours in here.items():
        value = cache[ours]
        swapped = ours.rpartition(".")[2] in POSITIONS_FIRST
        expected = value.transpose(1, 2) if swapped else value
        assert model.get_name(name) == ours
        assert torch.equal(cache[name], expected), name
        assert seen[name].shape == expected.shape
    for short, value in (
        ("resid_pre", "layer_input"),
        ("q", "attention_queries_before_rotary"),
        ("z", "attention_premix"),
    ):
        assert cache[short, 1].shape[:2] == (2, LENGTH)
        assert model.get_name(short, 1).endswith(value)
    outputs = [f"layers.{i}.layer_output" for i in range(model.num_layers)]
    filters = ("blocks.*.hook_resid_post", "resid_post", "hook_resid_post", lambda name: name.endswith("resid_post"))
    for names_filter in filters:
        assert list(model.run_with_cache(prompt(), names_filter=names_filter)[1]) == outputs
    assert torch.equal(cache.stack("resid_post"), cache.stack("layer_output"))
    assert torch.equal(cache.stack("q"), cache.stack("attention_queries_before_rotary").transpose(2, 3))


@torch.no_grad()
def test_a_ported_patching_script(model: HookedTransformer) -> None:
    """`clean_cache[hook.name]` under a TransformerLens name is in the order that the hook got its value in."""
    _, clean = model.run_with_cache(prompt())
    other = (prompt() + 1) % model.vocab_size
    seen = []

    def patch(value: Tensor, hook: Any) -> Tensor:
        seen.append((hook.name, hook.layer()))
        value[:, :, 1] = clean[hook.name][:, :, 1]
        return value

    def patch_ours(value: Tensor, hook: Any) -> None:
        value[:, 1] = clean[hook.name][:, 1]

    ported = model.run_with_hooks(other, fwd_hooks=[("blocks.1.attn.hook_q", patch)])
    ours = model.run_with_hooks(other, fwd_hooks=[(("attention_queries_before_rotary", 1), patch_ours)])
    assert torch.equal(ported, ours)
    assert seen == [("blocks.1.attn.hook_q", 1)]


@torch.no_grad()
def test_lens_names_write_in_lens_order(model: HookedTransformer) -> None:
    heads = torch.randn(2, LENGTH, 1, model.head_dim)

    def write_lens(value: Tensor, hook: Any) -> Tensor:
        assert value.shape[1] == LENGTH
        return value + heads

    def write_ours(value: Tensor, hook: Any) -> Tensor:
        return value + heads.transpose(1, 2)

    def in_place(value: Tensor, hook: Any) -> None:
        value += heads

    for name in ("blocks.1.attn.hook_q", "blocks.1.attn.hook_rot_k", "blocks.1.attn.hook_v"):
        ours = model.run_with_hooks(prompt(), fwd_hooks=[(model.get_name(name), write_ours)])
        assert torch.equal(model.run_with_hooks(prompt(), fwd_hooks=[(name, write_lens)]), ours)
        assert torch.equal(model.run_with_hooks(prompt(), fwd_hooks=[(name, in_place)]), ours)
        with pytest.raises(ValueError, match=r"the value is \[2, [236], 13"):
            model.run_with_hooks(prompt(), fwd_hooks=[(name, lambda value, hook: value[:, :, :, :4])])


def test_lens_names_of_absent_values(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi-base"]))
    with pytest.raises(Unavailable, match="parallel"):
        model.add_hook("blocks.1.hook_resid_mid", print)
    with pytest.raises(UnknownName, match=r"no value 'blocks\.1\.attn\.hook_nonsense'"):
        model.add_hook("blocks.1.attn.hook_nonsense", print)


def test_a_miss_names_the_closest_once(model: HookedTransformer) -> None:
    for wrong, close in (
        ("resid_pots", "did you mean resid_post, "),
        ("attention_maks", "did you mean attention_mask, "),
        ("blocks.1.attn.hook_patern", "did you mean blocks.1.attn.hook_pattern, "),
        ("ln_final.hook_normalised", "did you mean ln_final.hook_normalized"),
        ("layers.1.mlp.mlp_outptu", "did you mean layers.1.mlp.mlp_output, "),
    ):
        with pytest.raises(UnknownName, match=close) as caught:
            model.run_with_cache(prompt(), names_filter=wrong)
        named = str(caught.value).partition("did you mean ")[2].rstrip("?").split(", ")
        assert len(named) == len(set(named))


def test_in_a_notebook(model: HookedTransformer, cache: Any) -> None:
    keys = cache._ipython_key_completions_()
    assert "layers.1.layer_input" in keys
    assert ("layer_input", 1) in keys
    assert all(cache[key] is not None for key in keys)
    attention = dir(model.layers[0].self_attn)
    assert "attention_queries" in attention
    assert ("attention_gate" in attention) == (model.config.layers[0].attention.output_gate)
    text = repr(cache)
    assert f"ActivationCache({len(cache)} values, {cache.num_bytes / 1e6:.1f} MB" in text
    assert f"layer_input: [2, {LENGTH}, 96] float32 x {model.num_layers} layers" in text


def test_support_of_a_huge_config_is_read_in_a_moment() -> None:
    """A config of hundreds of billions of parameters: nothing of its weights is made."""
    values = {"num_hidden_layers": 60, "hidden_size": 8192, "num_experts": 256, "moe_intermediate_size": 4096}
    config = converters.read_config({"model_type": "afmoe", **values})
    with torch.device("meta"):
        model = HookedTransformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 4e11
    assert model.support()["router_logits"] == {0: "a dense MLP: it has no router and no experts"}
