"""The standard vocabulary as a contract: printouts, TransformerLens' names, decompositions, readouts, interventions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import converters
from converters.tiny import make_checkpoint
from tests.tiny import BASES, LENGTH, RECIPES, Recipe, load_reference, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName
from transformer_std.hooks.transformer_lens import NAMES, POSITIONS_FIRST
from transformer_std.printing import printout

pytestmark = pytest.mark.quick

Folders = Callable[[Recipe], Path]
NAMED = {recipe.id: recipe for recipe in RECIPES}
MASK = torch.tensor([[0] * 4 + [1] * (LENGTH - 4), [1] * LENGTH])


@pytest.fixture(params=BASES, ids=lambda base: base.id)
def model(request: pytest.FixtureRequest, checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(request.param))


@pytest.fixture(params=["phi", "afmoe"])
def speaking(request: pytest.FixtureRequest, tmp_path: Path) -> HookedTransformer:
    """A model with a tokenizer."""
    make_checkpoint(request.param, tmp_path)
    return HookedTransformer.from_pretrained(tmp_path)


# -- print -------------------------------------------------------------------------------------------------------


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


# -- names -------------------------------------------------------------------------------------------------------


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


def lens_names(model: HookedTransformer) -> dict[str, str]:
    pairs = {name.format(i=1): ours.format(i=1) for name, ours in NAMES.items()}
    return {name: ours for name, ours in pairs.items() if ours in model.names.points}


@torch.no_grad()
def test_lens_names_are_the_values_in_lens_order(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt())
    for name, ours in lens_names(model).items():
        value = cache[ours]
        swapped = ours.rpartition(".")[2] in POSITIONS_FIRST
        expected = value.transpose(1, 2) if swapped else value
        _, alone = model.run_with_cache(prompt(), names_filter=name)
        assert list(alone) == [ours]
        assert torch.equal(cache[name], expected), name
        seen: list[Tensor] = []
        model.run_with_hooks(prompt(), fwd_hooks=[(name, lambda value, hook: seen.append(value))])  # noqa: B023
        assert seen[0].shape == expected.shape
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


# -- decompositions ----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(model: HookedTransformer) -> Any:
    with torch.no_grad():
        return model.run_with_cache(prompt(), attention_mask=MASK)[1]


@torch.no_grad()
def test_parts_sum_to_the_stream(model: HookedTransformer, cache: Any) -> None:
    last = model.num_layers - 1
    for layer in range(model.num_layers):
        stack, labels = cache.decompose_resid(layer, return_labels=True)
        torch.testing.assert_close(stack.sum(0), cache["layer_input", layer])
        assert labels[:3] == ["embed", "0_attn_out", "0_mlp_out"][: len(labels)]
        assert len(stack) == len(labels) == 1 + 2 * layer
    whole = cache["layer_output", last]
    torch.testing.assert_close(cache.decompose_resid().sum(0), whole)
    if model.config.layers[0].kind == "sequential":
        stack, labels = cache.decompose_resid(1, mlp_input=True, return_labels=True)
        torch.testing.assert_close(stack.sum(0), cache["layer_mid", 1])
        assert labels[-1] == "1_attn_out"
        assert len(cache.accumulated_resid(incl_mid=True)) == 2 * model.num_layers + 1
    stack, labels = cache.accumulated_resid(return_labels=True)
    assert torch.equal(stack[-1], whole)
    assert torch.equal(stack[1], cache["layer_input", 1])
    assert labels == [*[f"{i}_pre" for i in range(model.num_layers)], "final_post"]


@torch.no_grad()
def test_heads_sum_to_the_attention(model: HookedTransformer, cache: Any) -> None:
    stack, labels = cache.stack_head_results(2, return_labels=True)
    assert len(stack) == len(labels) == 2 * model.num_heads
    assert labels[model.num_heads] == "L1H0"
    attention = model.layers[1].self_attn
    heads = stack[model.num_heads :].sum(0)
    bias = attention.b_O.expand_as(heads)[None]
    if attention.post_norm is not None:
        from transformer_std.analysis.decomposition import frozen

        bias = frozen(attention, "post_norm", bias, cache["attention_unnormed_output", 1])
        raw = cache.stack_head_results(2, post_norm=False)[model.num_heads :].sum(0) + attention.b_O
        torch.testing.assert_close(raw, cache["attention_unnormed_output", 1])
    torch.testing.assert_close(heads + bias[0], cache["attention_output", 1])
    with_rest, labels = cache.stack_head_results(2, incl_remainder=True, return_labels=True)
    torch.testing.assert_close(with_rest.sum(0), cache["layer_input", 2])
    assert labels[-1] == "remainder"


@torch.no_grad()
def test_attributions_sum_to_the_logit(model: HookedTransformer, cache: Any) -> None:
    tokens = (prompt() + 1) % model.vocab_size
    logits = cache["logits"].gather(-1, tokens[..., None])[..., 0]
    parts = cache.logit_attrs(cache.decompose_resid(), tokens)
    torch.testing.assert_close(parts.sum(0) + model.bias_logits[tokens], logits, atol=1e-4, rtol=1e-4)
    heads = cache.logit_attrs(cache.stack_head_results(incl_remainder=True), 7)
    torch.testing.assert_close(heads.sum(0) + model.bias_logits[7], cache["logits"][..., 7], atol=1e-4, rtol=1e-4)
    by_row = cache.logit_attrs(cache.decompose_resid(), torch.tensor([7, 9]), torch.tensor([3, 3]))
    one = cache.logit_attrs(cache.decompose_resid(), 9) - cache.logit_attrs(cache.decompose_resid(), 3)
    torch.testing.assert_close(by_row[:, 1], one[:, 1], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_norms_of_parts(model: HookedTransformer, cache: Any) -> None:
    for layer, mlp_input, normed in ((1, False, "attention_norm_output"), (1, True, "mlp_norm_output")):
        if mlp_input and model.config.layers[0].kind == "parallel":
            continue
        norm = model.layers[1].mlp_norm if mlp_input else model.layers[1].attention_norm
        parts = cache.decompose_resid(layer, mlp_input=mlp_input, apply_ln=True)
        whole = parts.sum(0) + (0 if getattr(norm, "bias", None) is None else norm.bias)
        torch.testing.assert_close(whole, cache[normed, 1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_lenses(model: HookedTransformer, cache: Any) -> None:
    afresh, frozen = cache.logit_lens(), cache.logit_lens_frozen()
    assert torch.equal(afresh[-1], cache["logits"])
    torch.testing.assert_close(frozen[-1], cache["logits"], atol=1e-4, rtol=1e-4)
    assert torch.equal(afresh[1], model.lm_head(model.norm(cache["layer_input", 1])))
    assert not torch.allclose(afresh[0], frozen[0])
    block = frozen[2] - frozen[1]
    parts = cache.apply_ln_to_stack(torch.stack([cache["attention_output", 1], cache["mlp_output", 1]])).sum(0)
    torch.testing.assert_close(block, parts @ model.W_U, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_all_blocks_have_three_names(model: HookedTransformer, cache: Any) -> None:
    """As in TransformerLens, None, -1 and the number of blocks are the stream that leaves the last."""
    count = model.num_layers
    whole, tokens = cache["layer_output", -1], torch.tensor([3, 7])
    for layer in (None, -1, count):
        parts, labels = cache.decompose_resid(layer, return_labels=True)
        assert labels == ["embed", *[f"{i}_{part}_out" for i in range(count) for part in ("attn", "mlp")]]
        torch.testing.assert_close(parts.sum(0), whole)
        streams, labels = cache.accumulated_resid(layer, return_labels=True)
        assert labels == [*[f"{i}_pre" for i in range(count)], "final_post"]
        assert torch.equal(streams[-1], whole)
        heads, labels = cache.stack_head_results(layer, incl_remainder=True, return_labels=True)
        assert labels[-2:] == [f"L{count - 1}H{model.num_heads - 1}", "remainder"]
        torch.testing.assert_close(heads.sum(0), whole)
        assert torch.equal(cache.logit_lens(layer)[-1], cache["logits"])
        assert len(cache.logit_lens_frozen(layer)) == count + 1
        normed = cache.apply_ln_to_stack(whole[None], layer)[0]
        bias = getattr(model.norm, "bias", None)
        expected = cache["final_norm_output"] - (0 if bias is None else bias)
        torch.testing.assert_close(normed, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(cache.decompose_resid(layer, apply_ln=True), cache.apply_ln_to_stack(parts, layer))
        assert cache.logit_attrs(cache.decompose_resid(layer), tokens).shape == (1 + 2 * count, 2, LENGTH)
    assert cache.accumulated_resid(count - 1, return_labels=True)[1][-1] == f"{count - 1}_pre"
    for layer in (-2, count + 1):
        with pytest.raises(UnknownName, match=rf"layer {layer} is out of range: give 0 to {count - 1}"):
            cache.accumulated_resid(layer)
    with pytest.raises((UnknownName, Unavailable)):
        cache.decompose_resid(mlp_input=True)


def test_analysis_brings_no_graph_of_its_own(model: HookedTransformer) -> None:
    """With gradients on, as in a notebook: the parameters are in no graph of a cache that was detached."""
    logits, cache = model.run_with_cache(prompt())
    assert logits.requires_grad

    def results(of: Any) -> list[Tensor]:
        parts = of.decompose_resid()
        return [
            of.logit_lens(),
            of.logit_lens_frozen(),
            of.logit_attrs(parts, 3, 5),
            parts,
            of.decompose_resid(1, apply_ln=True),
            of.accumulated_resid(apply_ln=True),
            of.stack_head_results(apply_ln=True),
            of.apply_ln_to_stack(parts),
        ]

    for each in [*results(cache), model.bias_logits]:
        each.numpy()
    assert not any(each.requires_grad for each in results(cache))
    assert model.project_on_vocab(cache["layer_output", 1]).requires_grad
    assert not any(each.requires_grad for each in results(cache.slice(batch=0)))
    _, kept = model.run_with_cache(prompt(), keep_graph=True)
    assert all(each.requires_grad for each in results(kept))
    for each, plain in zip(results(kept), results(cache), strict=True):
        torch.testing.assert_close(each, plain)
    lens = kept.logit_lens()[0, 0, -1, 3]
    gradient, head = torch.autograd.grad(lens, [kept["layer_input", 0], model.lm_head.weight])
    assert float(gradient[0, -1].abs().sum()) > 0
    assert float(head[3].abs().sum()) > 0
    stack = cache.decompose_resid().requires_grad_()  # a stack of one's own
    assert cache.logit_attrs(stack, 3).requires_grad
    with torch.inference_mode():
        _, inferred = model.run_with_cache(prompt())
    assert torch.equal(inferred.logit_lens(), cache.logit_lens())


def test_decompositions_say_what_they_lack(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt(), names_filter="layer_input")
    with pytest.raises(UnknownName, match="attention_output is not in this cache: names_filter left it out"):
        cache.decompose_resid()
    with pytest.raises(UnknownName, match="out of range"):
        cache.decompose_resid(99)
    del model


# -- readouts ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_bias_logits(model: HookedTransformer, checkpoints: Folders) -> None:
    theirs = load_reference(checkpoints(next(b for b in BASES if b.family == model.config.origin.family)))
    norm = getattr(theirs.model, "norm", None) or theirs.model.final_layernorm
    expected = torch.zeros(model.vocab_size)
    expected += 0 if getattr(norm, "bias", None) is None else theirs.lm_head.weight @ norm.bias
    expected += 0 if theirs.lm_head.bias is None else theirs.lm_head.bias
    torch.testing.assert_close(model.bias_logits, expected)


@torch.no_grad()
def test_readouts(speaking: HookedTransformer) -> None:
    logits, cache = speaking.run_with_cache("the cat sat on the red mat")
    probabilities = logits[0, -1].softmax(-1)
    top = speaking.get_topk_closest_tokens(cache["layer_output", -1][0, -1], k=3)
    assert [text for text, _ in top] == [speaking.tokenizer.decode([int(i)]) for i in probabilities.topk(3).indices]
    assert [p for _, p in top] == pytest.approx(probabilities.topk(3).values.tolist(), rel=1e-4)
    assert speaking.probs_to_dict(cache["next_token_probs"][0], k=3) == pytest.approx(dict(top), rel=1e-4)
    nested = speaking.get_topk_closest_tokens(cache["layer_output", -1], k=3)
    assert len(nested[0]) == 7
    assert dict(nested[0][-1]) == pytest.approx(dict(top), rel=1e-4)


def test_tokens_and_text(speaking: HookedTransformer) -> None:
    text = "the cat sat on the red mat"
    tokens = speaking.to_tokens(text)
    assert speaking.to_string(tokens[0]) == text
    assert speaking.to_string(tokens) == [text]
    assert speaking.to_str_tokens(text) == ["the", " cat", " sat", " on", " the", " red", " mat"]
    assert speaking.to_str_tokens(tokens) == speaking.to_str_tokens(text)
    assert speaking.to_single_token("cat") == int(tokens[0, 1])
    with pytest.raises(ValueError, match=r"'the cat' is 2 tokens, \['the', 'cat'\], not one"):
        speaking.to_single_token("the cat")


# -- interventions -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_experts_are_counted_over_real_tokens_or_not_at_all(model: HookedTransformer, cache: Any) -> None:
    if model.support(-1)["router_logits"] is not None:
        return
    indices, count = cache["expert_indices", 1], model.layers[1].mlp.num_experts
    for part, kept in (
        (cache.slice(batch=0), indices[0][MASK[0].bool()]),
        (cache.slice(position=-1), indices[:, -1]),
        (cache.slice(position=slice(2, 6)), indices[:, 2:6][MASK[:, 2:6].bool()]),
        (cache.slice(batch=0, position=1), indices[:0]),
        (cache.slice(batch=0, position=-1), indices[0, -1]),
    ):
        assert part.expert_counts(1).tolist() == [int((kept == expert).sum()) for expert in range(count)]
        assert part.routing_entropy(1).shape == (kept.numel() // indices.shape[-1],)
    wanted = ["expert_indices", "router_scores" if model.layers[1].mlp.scoring != "sparsemixer" else "router_logits"]
    _, without = model.run_with_cache(prompt(), names_filter=wanted, attention_mask=MASK)
    for reading in (without.expert_counts, without.routing_entropy):
        with pytest.raises(UnknownName, match="attention_mask, which says which are, is not in this cache: name it in"):
            reading(1)


@torch.no_grad()
def test_skip_layers(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt(), names_filter="layer_input")
    with model.skip_layers(1, model.num_layers - 1):
        skipped = model(prompt())
    assert torch.equal(skipped, model.project_on_vocab(cache["layer_input", 1]))
    with model.skip_layers(0, 1, skip_with=cache["layer_input", 2]):
        _, skipping = model.run_with_cache(prompt(), names_filter="layer_output")
    assert torch.equal(skipping["layer_output", 1], cache["layer_input", 2])
    for first, last in ((2, 1), (0, 99)):
        with pytest.raises((ValueError, UnknownName)), model.skip_layers(first, last):
            pass


@torch.no_grad()
def test_steer(model: HookedTransformer) -> None:
    vector = torch.randn(model.hidden_size)
    _, clean = model.run_with_cache(prompt(), names_filter="layer_output")
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, (slice(None), slice(None))),
        ({"token_positions": -1}, (slice(None), [-1])),
        ({"token_positions": [2, 5], "batch_index": 1}, ([1], slice(None))),
        ({"token_positions": slice(3, 6)}, (slice(None), slice(3, 6))),
        ({"batch_index": [0]}, ([0], slice(None))),
    ]
    for where, (rows, positions) in cases:
        with model.steer(1, vector, factor=2.0, **where):
            _, cache = model.run_with_cache(prompt(), names_filter="layer_output")
        change = torch.zeros_like(clean["layer_output", 1])
        if where.get("token_positions") == [2, 5]:
            change[1, [2, 5]] = 2 * vector
        else:
            change[rows, positions] = 2 * vector
        torch.testing.assert_close(cache["layer_output", 1], clean["layer_output", 1] + change)
        assert torch.equal(cache["layer_output", 0], clean["layer_output", 0])
    with model.steer([0, 1], vector):
        _, both = model.run_with_cache(prompt(), names_filter="layer_output")
    torch.testing.assert_close(both["layer_output", 0], clean["layer_output", 0] + vector)


@torch.no_grad()
def test_expert_helpers(model: HookedTransformer, cache: Any) -> None:
    if model.support(-1)["router_logits"] is not None:
        with pytest.raises(Unavailable, match="a dense MLP"):
            model.ablate_expert(1, 0)
        return
    mlp, indices = model.layers[1].mlp, cache["expert_indices", 1]
    counts = cache.expert_counts(1)
    for expert in range(mlp.num_experts):
        assert int(counts[expert]) == int((indices[MASK.bool()] == expert).sum())
    entropy = cache.routing_entropy(1)
    assert entropy.shape == (int(MASK.sum()),)
    scores = cache["router_logits", 1].softmax(-1) if mlp.scoring == "sparsemixer" else cache["router_scores", 1]
    shares = (scores / scores.sum(-1, keepdim=True))[MASK.bool()]
    torch.testing.assert_close(entropy, -(shares * shares.log()).sum(-1))
    clean, plain = model.run_with_cache(prompt())
    with model.hooks(fwd_hooks=model.ablate_expert(1, 3)):
        _, ablated = model.run_with_cache(prompt())
    chose = plain["expert_indices", 1] == 3
    assert torch.equal(ablated["expert_weights", 1], plain["expert_weights", 1].masked_fill(chose, 0))
    with model.hooks(fwd_hooks=model.reroute(1, 3, to=0)):
        _, moved = model.run_with_cache(prompt())
    assert torch.equal(moved["expert_indices", 1], plain["expert_indices", 1].masked_fill(chose, 0))
    assert torch.equal(moved["expert_weights", 1], plain["expert_weights", 1])
    with pytest.raises(ValueError, match=rf"expert 99 is out of range: block 1 has experts 0 to {mlp.num_experts - 1}"):
        model.ablate_expert(1, 99)
    del clean


# -- caches ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_head_results_of_parts_of_a_cache(model: HookedTransformer, cache: Any) -> None:
    whole = cache.stack_head_results()
    assert torch.equal(cache.slice(batch=0).stack_head_results(), whole[:, 0])
    assert torch.equal(cache.slice(position=-1).stack_head_results(), whole[:, :, -1])
    assert torch.equal(cache.slice(batch=1, position=2).decompose_resid(), cache.decompose_resid()[:, 1, 2])


@torch.no_grad()
def test_a_cache_can_be_saved(cache: Any, tmp_path: Path) -> None:
    torch.save(cache, tmp_path / "cache.pt")
    again = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert list(again) == list(cache)
    assert torch.equal(again["layer_output", 1], cache["layer_output", 1])
    with pytest.raises(RuntimeError, match="this cache has no model"):
        again.logit_lens()
    again.model = cache.model
    assert torch.equal(again.logit_lens(), cache.logit_lens())


@torch.no_grad()
def test_slices(model: HookedTransformer, cache: Any) -> None:
    rows, last = cache.slice(batch=[1]), cache.slice(position=-1)
    for name, value in cache.items():
        if not isinstance(value, Tensor):
            continue
        assert torch.equal(rows[name], value[[1]])
        layout = model.names.points[name].layout.dim_str.split()
        axis = next((layout.index(each) for each in ("seq", "query") if each in layout), None)
        assert torch.equal(last[name], value if axis is None else value.select(axis, -1))
    assert cache.slice(batch=0, position=slice(2, 5))["attention_probabilities", 1].shape == (
        model.num_heads,
        3,
        LENGTH,
    )
    with pytest.raises(ValueError, match="no batch axis any more"):
        model.run_with_cache(prompt()[:1], remove_batch_dim=True)[1].slice(batch=0)


def test_gradients_stack_as_values_do(model: HookedTransformer) -> None:
    names = ["attention_premix", "attention_queries", "layer_output"]
    _, cache = model.run_with_cache(prompt(), names_filter=names, incl_bwd=True, return_type="loss")
    for name in names:
        stacked = cache.stack(f"{name}_grad")
        assert torch.equal(stacked, torch.stack([cache[f"{name}_grad", i] for i in range(model.num_layers)]))
        assert stacked.shape == cache.stack(name).shape
    assert torch.equal(cache.stack("resid_post_grad"), cache.stack("layer_output_grad"))
    queries = cache.stack("rot_q_grad")
    assert torch.equal(queries, cache.stack("attention_queries_grad").transpose(2, 3))
    with pytest.raises(UnknownName, match="run with incl_bwd=True"):
        model.run_with_cache(prompt(), names_filter=names)[1].stack("attention_premix_grad")


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


def test_attribution_patching_through_a_cache(model: HookedTransformer) -> None:
    logits, cache = model.run_with_cache(prompt(), names_filter=["attention_premix", "mlp_output"], keep_graph=True)
    target = logits[:, -1, 5].sum()
    gradients = torch.autograd.grad(target, [cache["attention_premix", 1], cache["mlp_output", 0]], retain_graph=True)
    _, other = model.run_with_cache(prompt(), names_filter=["attention_premix", "mlp_output"], incl_bwd=True)
    assert "attention_premix_grad" not in {name.rpartition(".")[2] for name in other}
    assert gradients[0].shape == cache["attention_premix", 1].shape
    assert not any(value.requires_grad for value in cache.detach().values())
    step = 1e-3 * torch.randn_like(gradients[1])
    with torch.no_grad():
        moved = model.run_with_hooks(prompt(), fwd_hooks=[(("mlp_output", 0), lambda value, hook: value + step)])
        still = model.run_with_hooks(prompt(), fwd_hooks=[(("mlp_output", 0), lambda value, hook: value - step)])
    slope = (moved[:, -1, 5].sum() - still[:, -1, 5].sum()) / 2
    if model.support(-1)["router_logits"] is not None:  # a mixture's choice can flip within a step
        torch.testing.assert_close(slope, (gradients[1] * step).sum(), atol=2e-4, rtol=0.02)


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


def test_a_cache_keeps_no_model_alive(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    _, cache = model.run_with_cache(prompt())
    del model
    assert cache["logits"].shape[0] == 2
    with pytest.raises(RuntimeError, match="this cache has no model"):
        cache.logit_lens()


def test_support_of_a_huge_config_is_read_in_a_moment() -> None:
    """A config of hundreds of billions of parameters: nothing of its weights is made."""
    values = {"num_hidden_layers": 60, "hidden_size": 8192, "num_experts": 256, "moe_intermediate_size": 4096}
    config = converters.read_config({"model_type": "afmoe", **values})
    with torch.device("meta"):
        model = HookedTransformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 4e11
    assert model.support()["router_logits"] == {0: "a dense MLP: it has no router and no experts"}


@torch.no_grad()
def test_tools_on_caches_without_an_axis(model: HookedTransformer) -> None:
    _, whole = model.run_with_cache(prompt(7))
    _, bare = model.run_with_cache(prompt(7)[:1], remove_batch_dim=True)
    row = whole.slice(batch=0)
    tokens = (prompt(7) + 1) % model.vocab_size
    expected = whole.logit_attrs(whole.decompose_resid(), tokens)
    torch.testing.assert_close(row.logit_attrs(row.decompose_resid(), tokens[0]), expected[:, 0])
    torch.testing.assert_close(
        bare.logit_attrs(bare.decompose_resid(), tokens[0]), expected[:, 0], atol=1e-4, rtol=1e-4
    )
    last = whole.slice(position=-1)
    torch.testing.assert_close(last.logit_attrs(last.decompose_resid(), tokens[:, -1]), expected[:, :, -1])
    for name in ("blocks.1.attn.hook_q", "blocks.1.attn.hook_v"):
        assert torch.equal(last[name], whole[name][:, -1])
        assert torch.equal(row[name], whole[name][0])
        assert torch.equal(whole.slice(batch=0, position=-1)[name], whole[name][0, -1])
    half = whole.to(torch.bfloat16)
    assert half["input_ids"].dtype == torch.int64
    assert half["logits"].dtype == torch.bfloat16
    if model.config.layers[0].kind == "parallel":
        with pytest.raises(Unavailable, match="parallel"):
            whole.decompose_resid(1, mlp_input=True)
