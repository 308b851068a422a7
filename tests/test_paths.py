"""Path patching against two runs of transformers' modules under hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import both
from tests.tiny import NAMED, Folders, Recipe, clean, corrupted, score
from transformer_std import HookedTransformer, UnknownName

PROJECTED = {
    "attention_query_inputs": "attention_queries_before_rotary",
    "attention_key_inputs": "attention_keys_before_rotary",
    "attention_value_inputs": "attention_values",
}
SENDER = ("attention_premix", 0)


def put(value: Tensor, head: int | None = None, axis: int = 2) -> Any:
    def edit(here: Tensor) -> Tensor:
        new = here.clone()
        if head is None:
            new[:] = value
        else:
            new.select(axis, head)[:] = value.select(axis, head)
        return new

    return edit


def what_receivers_read(model: HookedTransformer, reference: Any, head: int, freeze: tuple[str, ...]) -> Any:
    """The run of transformers in which a head of block 0 is clean and what follows it is held."""
    premix = model.names.at(*SENDER).point.name
    with_clean = reference.run(clean()).value(premix)
    plain = reference.run(corrupted())
    held = [each.point for value in freeze for each in model.names.targets(value)]
    parallel = not model.layers[0].has("layer_mid")
    between = [
        each.name for each in held if each.layer or not (each.value.startswith("attention") or parallel)
    ]  # in block 0 what follows the attention alone
    edits = {premix: put(with_clean, head), **{name: put(plain.value(name)) for name in between}}
    return reference.run(corrupted(), edits=edits)


@pytest.mark.unchecked
@torch.no_grad()
@pytest.mark.parametrize("receiver", list(PROJECTED))
def test_paths_to_heads_are_those_of_transformers(receiver: str, base: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(base))
    last = model.num_layers - 1
    _, cache = model.run_with_cache(clean(), names_filter=SENDER)
    found = model.path_patching(corrupted(), cache, SENDER, (receiver, last), score)
    block = f"layers.{last}."
    projected = f"{block}self_attn.{PROJECTED[receiver]}"
    assert float(found.baseline) == pytest.approx(float(score(model(corrupted()))), abs=1e-6)
    for head in (0, 2):
        read = what_receivers_read(model, reference, head, ("attention_output", "mlp_output"))
        heard = read.value(block + "attention_input")
        made = reference.run(corrupted(), edits={block + "attention_input": put(heard)}).value(projected)
        for to in range(found.shape[-1]):
            logits = reference.run(corrupted(), edits={projected: put(made, to, axis=1)}).logits
            # They round as a batch of rows, and as a run each.
            torch.testing.assert_close(found[0, head, to], score(logits), rtol=1e-4, atol=2e-5)
    assert found.axes[-1].labels[0] == f"L{last}H0"
    assert (found.values - found.baseline).abs().max() > 1e-4


@pytest.mark.unchecked
@torch.no_grad()
@pytest.mark.parametrize("freeze", [("attention_output", "mlp_output"), ("attention_output",)], ids=len)
def test_paths_to_the_stream_are_those_of_transformers(
    freeze: tuple[str, ...], base: Recipe, checkpoints: Folders
) -> None:
    model, reference = both(checkpoints(base))
    last = model.num_layers - 1
    _, cache = model.run_with_cache(clean(), names_filter=SENDER)
    for receiver in ("layer_output", "mlp_input"):
        found = model.path_patching(corrupted(), cache, SENDER, (receiver, last), score, freeze=freeze)
        for head in (0, 2):
            name = f"layers.{last}.{receiver}"
            heard = what_receivers_read(model, reference, head, freeze).value(name)
            logits = reference.run(corrupted(), edits={name: put(heard)}).logits
            torch.testing.assert_close(found[0, head, 0], score(logits), rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_cells_batches_and_rows_agree(base: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base))
    last = model.num_layers - 1
    _, cache = model.run_with_cache(clean())
    ask: dict[str, Any] = {"over": ("seq", "num_heads")}
    receiver = ("attention_query_inputs", last)
    whole = model.path_patching(corrupted(), cache, "attention_premix", receiver, score, **ask)
    assert [each.name for each in whole.axes] == ["layer", "seq", "num_heads", "receiver"]
    assert (whole[last] == whole.baseline).all()  # no sender of the last block comes before its own inputs
    some = model.path_patching(
        corrupted(), cache, SENDER, receiver, score, **ask, at={"seq": [5, 2], "head": [1]}, heads=[2], batch_size=1
    )
    torch.testing.assert_close(some[0, :, 0, 0], whole[0, [5, 2], 1, 2].values, rtol=1e-4, atol=1e-5)
    assert some.axes[1].labels == (5, 2)
    rows = model.path_patching(corrupted(), cache, SENDER, receiver, lambda logits: logits[:, -1, 3], heads=[2])
    assert rows.axes[-1].name == "batch"
    seen = []
    with model.hooks(fwd_hooks=[(("mlp_output", last), lambda value, hook: seen.append(len(value)))]):
        slow = model.path_patching(corrupted(), cache, SENDER, receiver, score, heads=[2])
    assert set(seen) == {1}
    torch.testing.assert_close(slow.values, model.path_patching(
        corrupted(), cache, SENDER, receiver, score, heads=[2]).values, rtol=1e-4, atol=1e-5)  # fmt: skip


@torch.no_grad()
def test_all_receivers_at_once_are_the_run_itself(base: Recipe, checkpoints: Folders) -> None:
    """Block 1 hears of block 0 by its inputs and by the stream alone, so with all of these written nothing is held."""
    model = HookedTransformer.from_pretrained(checkpoints(base))
    _, cache = model.run_with_cache(clean())
    found = model.path_patching(
        corrupted(), cache, ("layer_output", 0), ("layer_input", 1), score, over=(), together=True, freeze=()
    )
    expected = model.activation_patching(corrupted(), cache, ("layer_output", 0), score, over=())
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)


def test_what_is_no_path_is_said(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi3-base"]))
    _, cache = model.run_with_cache(clean(), names_filter=SENDER)
    last = model.num_layers - 1

    def follow(sender: Any = SENDER, receiver: Any = ("attention_query_inputs", last), **options: Any) -> Any:
        return model.path_patching(corrupted(), cache, sender, receiver, score, **options)

    with pytest.raises(ValueError, match=r"attention_output is no receiver of a path: name attention_query_inputs"):
        follow(receiver=("attention_output", last))
    with pytest.raises(ValueError, match="head 99 is out of range"):
        follow(heads=[99])
    with pytest.raises(ValueError, match=r"mlp_input is not by head"):
        follow(receiver=("mlp_input", last), heads=[0])
    with pytest.raises(ValueError, match="at names 'seq', which is not swept: over has num_heads"):
        follow(at={"seq": [0]})
    with pytest.raises(ValueError, match=r"at has num_heads 99: there are 0 to"):
        follow(at={"num_heads": [99]})
    with pytest.raises(UnknownName, match="the clean cache does not hold"):
        follow(sender=("attention_premix", 1))
    with pytest.raises(TypeError, match="clean is a Tensor"):
        model.path_patching(corrupted(), clean(), SENDER, ("mlp_input", last), score)
    assert not any(point._handles for point in model.names.points.values())
