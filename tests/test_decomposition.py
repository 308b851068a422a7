"""The stream in parts: their sums, what they add to logits, the lenses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import BASES, LENGTH, Folders, load_reference, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName


def embeddings(model: HookedTransformer) -> list[str]:
    """The labels of what the stream begins with."""
    return ["embed"] if model.config.positions is None else ["embed", "pos_embed"]


@torch.no_grad()
def test_parts_sum_to_the_stream(model: HookedTransformer, cache: Any) -> None:
    last = model.num_layers - 1
    for layer in range(model.num_layers):
        stack, labels = cache.decompose_resid(layer, return_labels=True)
        torch.testing.assert_close(stack.sum(0), cache["layer_input", layer])
        first = embeddings(model)
        assert labels[: len(first) + 2] == [*first, "0_attn_out", "0_mlp_out"][: len(labels)]
        assert len(stack) == len(labels) == len(first) + 2 * layer
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
    logits = cache["lm_head_output"].gather(-1, tokens[..., None])[..., 0]  # the logits, but for a cap
    parts = cache.logit_attrs(cache.decompose_resid(), tokens)
    torch.testing.assert_close(parts.sum(0) + model.bias_logits[tokens], logits, atol=1e-4, rtol=1e-4)
    heads = cache.logit_attrs(cache.stack_head_results(incl_remainder=True), 7)
    logits = cache["lm_head_output"][..., 7]
    torch.testing.assert_close(heads.sum(0) + model.bias_logits[7], logits, atol=1e-4, rtol=1e-4)
    by_row = cache.logit_attrs(cache.decompose_resid(), torch.tensor([7, 9]), torch.tensor([3, 3]))
    one = cache.logit_attrs(cache.decompose_resid(), 9) - cache.logit_attrs(cache.decompose_resid(), 3)
    torch.testing.assert_close(by_row[:, 1], one[:, 1], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_norms_of_parts(model: HookedTransformer, cache: Any) -> None:
    norms = [(False, model.layers[1].attention_norm, "attention_norm_output")]
    if model.config.layers[1].kind == "sequential":
        norms.append((True, model.layers[1].mlp_norm, "mlp_norm_output"))
    for mlp_input, norm, normed in norms:
        parts = cache.decompose_resid(1, mlp_input=mlp_input, apply_ln=True)
        whole = parts.sum(0) + (0 if getattr(norm, "bias", None) is None else norm.bias)
        torch.testing.assert_close(whole, cache[normed, 1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_lenses(model: HookedTransformer, cache: Any) -> None:
    afresh, frozen = cache.logit_lens(), cache.logit_lens_frozen()
    assert torch.equal(afresh[-1], cache["logits"])
    torch.testing.assert_close(frozen[-1], cache["lm_head_output"], atol=1e-4, rtol=1e-4)
    assert torch.equal(afresh[1], model.project_on_vocab(cache["layer_input", 1]))
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
        parts, labels_of_parts = cache.decompose_resid(layer, return_labels=True)
        assert labels_of_parts == [
            *embeddings(model),
            *[f"{i}_{part}_out" for i in range(count) for part in ("attn", "mlp")],
        ]
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
        assert cache.logit_attrs(cache.decompose_resid(layer), tokens).shape == (len(labels_of_parts), 2, LENGTH)
    assert cache.accumulated_resid(count - 1, return_labels=True)[1][-1] == f"{count - 1}_pre"
    for layer in (-2, count + 1):
        with pytest.raises(UnknownName, match=rf"layer {layer} is out of range: give 0 to {count - 1}"):
            cache.accumulated_resid(layer)
    with pytest.raises((UnknownName, Unavailable)):
        cache.decompose_resid(mlp_input=True)


@torch.no_grad()
def test_bias_logits(model: HookedTransformer, checkpoints: Folders) -> None:
    theirs = load_reference(checkpoints(next(b for b in BASES if b.family == model.config.origin.family)))
    norms, head = ("norm", "final_layernorm", "ln_f"), theirs.get_output_embeddings()
    (norm,) = [getattr(theirs.base_model, name) for name in norms if hasattr(theirs.base_model, name)]
    expected = torch.zeros(model.vocab_size)
    expected += 0 if getattr(norm, "bias", None) is None else head.weight @ norm.bias
    expected += 0 if head.bias is None else head.bias
    torch.testing.assert_close(model.bias_logits, expected)


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
    with pytest.raises(UnknownName, match=r"(attention_output|token_embeddings) is not in this cache"):
        cache.decompose_resid()
    with pytest.raises(UnknownName, match="out of range"):
        cache.decompose_resid(99)
    del model


@torch.no_grad()
def test_head_results_of_parts_of_a_cache(model: HookedTransformer, cache: Any) -> None:
    whole = cache.stack_head_results()
    assert torch.equal(cache.slice(batch=0).stack_head_results(), whole[:, 0])
    assert torch.equal(cache.slice(position=-1).stack_head_results(), whole[:, :, -1])
    assert torch.equal(cache.slice(batch=1, position=2).decompose_resid(), cache.decompose_resid()[:, 1, 2])


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
