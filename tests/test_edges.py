"""Edges against finite differences of transformers' run, and the runs of some edges against its two whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import einsum
from torch import Tensor

from tests.oracle import both
from tests.tiny import FAMILIES, MASK, NAMED, Folders, Recipe, clean, corrupted, prompt, score
from transformer_std import HookedTransformer
from transformer_std.analysis.edges import Edges

STEP = 0.001  # of the way from the corrupted run; phimoe chooses other experts at 0.005 of it
ALL = [*FAMILIES, NAMED["afmoe-biased"], NAMED["qwen2_moe-dense_first"], NAMED["phi-qk_layernorm"]]


@pytest.mark.unchecked
@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.id)
def test_all_edges_are_the_clean_run_and_none_the_corrupted(recipe: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(recipe))
    edges = model.edge_attribution(corrupted(), clean(), score)
    found = edges.faithfulness([0, len(edges) // 3, len(edges)])
    ends = [float(score(reference.run(each()).logits)) for each in (corrupted, clean)]
    # By sums in another order: what is taken out of the stream, and put in.
    assert [float(found[0]), float(found[2])] == pytest.approx(ends, abs=1e-4)
    assert float(found[1]) not in (float(found[0]), float(found[2]))
    assert [float(found.baseline), float(found.clean)] == pytest.approx(ends, abs=1e-5)
    heads, kv_heads = model.num_heads, [layer.self_attn.cfg.num_kv_heads for layer in model.layers]
    receivers = list(edges.scores.axes[1].labels)
    if model.support(0)["attention_query_inputs"] is None:
        queries = [each for each in receivers if each.endswith(".q")]
        assert len(queries) == heads * model.num_layers
        assert sum(each.endswith((".k", ".v")) for each in receivers) == 2 * sum(kv_heads)


def what_is_said(model: HookedTransformer, reference: Any, sender: str) -> Tensor:
    """What a sender of block 0 adds to the stream of transformers' runs, the clean one less the corrupted."""
    runs = [reference.run(each()) for each in (clean, corrupted)]
    if sender == "embed":
        a, b = (run.value("layers.0.layer_input") for run in runs)
    elif sender == "L0 MLP":
        a, b = (run.value("layers.0.mlp.mlp_output") for run in runs)
    elif sender.startswith("L0E"):
        a, b = (expert_said(run, int(sender[3:])) for run in runs)
    else:
        head = int(sender[3:])
        out = reference.model.get_output_embeddings() is not None and model.layers[0].self_attn.W_O[head].detach()
        a, b = (run.value("layers.0.self_attn.attention_premix")[:, :, head] @ out for run in runs)
    return (a - b).detach()


def expert_said(run: Any, expert: int) -> Tensor:
    slots, indices = (run.value(f"layers.0.mlp.{value}") for value in ("expert_outputs", "expert_indices"))
    return (slots * (indices == expert)[..., None]).sum(2)


def heard(model: HookedTransformer, receiver: str, stream: Tensor, more: Tensor) -> dict[str, Any]:
    """The edit of transformers' run by which a receiver of block 1 reads `more` of the stream."""
    block = model.layers[1]
    if receiver == "logits":
        return {f"layers.{model.num_layers - 1}.layer_output": lambda value: value + more}
    kind = "mlp" if receiver == "L1 MLP" else "attention"
    norm = block.readers[kind][0]
    read = (lambda x: x) if norm is None else getattr(block, norm)
    change = (read(stream + more) - read(stream)).detach()
    if kind == "mlp":
        return {"layers.1.mlp_input": lambda value: value + change}
    head, letter = int(receiver[3]), receiver[-1]
    weight = {"q": block.self_attn.W_Q, "k": block.self_attn.W_K, "v": block.self_attn.W_V}[letter][head].detach()
    projected = einsum(change, weight, "batch seq hidden, hidden dim -> batch seq dim")
    value = {"q": "attention_queries_before_rotary", "k": "attention_keys_before_rotary", "v": "attention_values"}

    def write(value: Tensor) -> Tensor:
        value = value.clone()
        value[:, head] += projected
        return value

    return {f"layers.1.self_attn.{value[letter]}": write}


CASES = [
    ("phi-base", "L0H2", ("L1H3.q", "L1H1.k", "L1H5.v", "L1 MLP", "logits")),
    ("phi3-base", "L0H2", ("L1H3.q", "L1H1.k", "L1H0.v", "L1 MLP", "logits")),
    ("gpt2-base", "embed", ("L1H3.q", "L1H1.k", "L1 MLP", "logits")),
    ("gemma2-base", "L0 MLP", ("L1H3.q", "L1H1.v", "L1 MLP", "logits")),
    ("olmo2-base", "L0 MLP", ("L1H0.v", "L1 MLP", "logits")),
    ("afmoe-base", "L0 MLP", ("L1H1.v", "L1 MLP", "logits")),
    ("phimoe-base", "L0E", ("L1H3.q", "L1H0.v", "L1 MLP", "logits")),
    ("qwen2_moe-base", "L0E", ("L1H3.q", "L1 MLP", "logits")),
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("name", "sender", "receivers"), CASES, ids=[name for name, *_ in CASES])
def test_a_score_is_a_slope_of_transformers(
    name: str, sender: str, receivers: tuple[str, ...], checkpoints: Folders
) -> None:
    model, reference = both(checkpoints(NAMED[name]))
    edges = model.edge_attribution(corrupted(), clean(), score)
    plain = reference.run(corrupted())
    if sender == "L0E":
        sender += str(int(plain.value("layers.0.mlp.expert_indices")[0, -1, 0]))
    more = what_is_said(model, reference, sender)
    for receiver in receivers:
        kind = "mlp" if receiver == "L1 MLP" else "attention"
        stream = plain.value(f"layers.1.{model.layers[1].readers[kind][1]}").detach()
        ends = [
            score(reference.run(corrupted(), edits=heard(model, receiver, stream, share * more)).logits)
            for share in (STEP, -STEP)
        ]
        slope = float((ends[0] - ends[1]) / (2 * STEP))
        found = float(edges.scores.at(sender=sender, receiver=receiver))
        assert found == pytest.approx(slope, rel=0.02, abs=1e-3), receiver


@pytest.mark.unchecked
@torch.no_grad()
@pytest.mark.parametrize("name", ["phi-base", "phi3-base", "qwen2_moe-base"])
def test_a_run_without_one_edge_is_transformers(name: str, checkpoints: Folders) -> None:
    """The clean run, in which one receiver reads of one sender what the corrupted run says."""
    model, reference = both(checkpoints(NAMED[name]))
    edges = model.edge_attribution(corrupted(), clean(), score)
    senders, receivers = (axis.labels for axis in edges.scores.axes)
    sender = "L0H2"
    more = what_is_said(model, reference, sender)
    run = reference.run(clean())
    for receiver in ("L1H3.q", "L1H1.k", "L1 MLP", "logits"):
        kept = [
            (a, b)
            for i, a in enumerate(senders)
            for j, b in enumerate(receivers)
            if edges.exists[i, j] and (a, b) != (sender, receiver)
        ]
        kind = "mlp" if receiver == "L1 MLP" else "attention"
        stream = run.value(f"layers.1.{model.layers[1].readers[kind][1]}")
        expected = score(reference.run(clean(), edits=heard(model, receiver, stream, -more)).logits)
        assert float(edges.measure(kept)) == pytest.approx(float(expected), abs=1e-4)
        assert abs(float(expected) - float(edges.clean)) > 1e-3


def test_integrated_along_the_line_the_embeddings_edges_sum_to_the_difference(checkpoints: Folders) -> None:
    """What leaves the embedding goes by its edges alone, so along the line between two embeddings these add up to all
    that the metric moves."""
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    few, many = (
        model.edge_attribution(corrupted(), clean(), score, integrated_gradients=steps).scores.at(sender="embed")
        for steps in (16, 128)
    )
    whole = float(score(model(clean())) - score(model(corrupted())))
    assert float(many.sum()) == pytest.approx(whole, abs=0.02)  # what the middle rule leaves at 128 points
    assert abs(float(many.sum()) - whole) < abs(float(few.sum()) - whole) + 1e-3
    plain = model.edge_attribution(corrupted(), clean(), score).scores.at(sender="embed")
    assert abs(float(plain.sum()) - whole) > 0.1


def test_edges_leave_the_model_alone_and_say_what_they_are(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    before = model(prompt())
    edges = model.edge_attribution(corrupted(), model.run_with_cache(clean())[1], score)
    again = model.edge_attribution(corrupted(), clean(), score)
    assert torch.equal(edges.scores, again.scores)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(prompt()), before)
    assert isinstance(edges, Edges)
    lines = repr(edges).splitlines()
    assert lines[0].startswith(
        f"Edges [{edges.scores.shape[0]} senders, {edges.scores.shape[1]} receivers, {len(edges)}"
    )
    (sender, receiver), first = edges.top(1)[0]
    assert abs(first) == float(edges.scores.abs().max())
    assert float(edges.scores.at(sender=sender, receiver=receiver)) == first
    assert f"{sender} -> {receiver}" in lines[1]
    assert float(edges.measure(edge for edge, _ in edges.top(9))) == float(edges.faithfulness(9))
    late = edges.scores.at(sender="L1 MLP").values
    assert not late[: list(edges.scores.axes[1].labels).index("L2H0.q")].any()


def test_padded_rows_have_edges_of_their_own_text(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    metric = lambda logits: logits[0, -1, 3] - logits[0, -1, 5]  # noqa: E731
    padded = model.edge_attribution(corrupted(), clean(), metric, attention_mask=MASK[:1])
    alone = model.edge_attribution(corrupted()[:, 4:], clean()[:, 4:], metric)
    torch.testing.assert_close(padded.scores.values, alone.scores.values, atol=1e-4, rtol=1e-3)


def test_what_has_no_edges_is_refused(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    with pytest.raises(ValueError, match=r"the clean input is \[1, 12\] and the corrupted one \[1, 13\]"):
        model.edge_attribution(corrupted(), clean()[:, 1:], score)
    with pytest.raises(TypeError, match="edges want one number, so take the mean"):
        model.edge_attribution(corrupted(), clean(), lambda logits: logits[:, -1, 3])
    with pytest.raises(TypeError, match="the metric has no gradient"):
        model.edge_attribution(corrupted(), clean(), lambda logits: float(score(logits)))
    _, cache = model.run_with_cache(clean(), names_filter="layer_input")
    with pytest.raises(KeyError, match="does not hold input_ids"):
        model.edge_attribution(corrupted(), cache, score)
    edges = model.edge_attribution(corrupted(), clean(), score)
    with pytest.raises(ValueError, match=f"there are 0 to {len(edges)} edges"):
        edges.faithfulness(len(edges) + 1)
    with pytest.raises(KeyError, match=r"L2 MLP -> L0H0\.q is no edge"):
        edges.measure([("L2 MLP", "L0H0.q")])
    with pytest.raises(KeyError, match="'L9' is on no place of the axis sender"):
        edges.measure([("L9", "logits")])
