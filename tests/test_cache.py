"""What a cache holds, counts and writes, and what a run does not compute."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import BASES, LENGTH, NAMED, Folders, Recipe, load_reference, prompt
from transformer_std import ActivationCache, HookedTransformer, HookPoint, KVCache, UnknownName

PHI, PHI3, QWEN = (BASES[0], *(next(each for each in BASES if each.family == name) for name in ("phi3", "qwen2_moe")))
WINDOW = NAMED["phi3-window"]
GROUPED = NAMED["phi-grouped"]


def load(recipe: Recipe, checkpoints: Folders, **options: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(recipe), **options)


def storages(cache: ActivationCache) -> int:
    """Bytes that the values keep alive, each piece of memory once."""
    tensors = [value for value in cache.values() if isinstance(value, Tensor)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.unchecked
@pytest.mark.parametrize("recipe", [*BASES, GROUPED], ids=lambda recipe: recipe.id)
@pytest.mark.parametrize("grad", [False, True])
def test_a_filtered_cache_holds_no_more_than_its_values(recipe: Recipe, grad: bool, checkpoints: Folders) -> None:
    model = load(recipe, checkpoints)
    names = [name for name, point in model.names.points.items() if point.layer in (None, 1)]
    assert len(names) > 20
    for name in names:
        with torch.set_grad_enabled(grad):
            _, cache = model.run_with_cache(prompt(), names_filter=name)
        value = cache[name]
        if isinstance(value, Tensor):
            assert value.untyped_storage().nbytes() == value.nbytes == cache.num_bytes, name


@torch.no_grad()
def test_a_slice_holds_what_it_shows_and_so_does_its_file(checkpoints: Folders, tmp_path: Path) -> None:
    _, cache = load(PHI3, checkpoints).run_with_cache(prompt())
    for sliced in (cache.slice(batch=0, position=-1), cache.slice(batch=[1]), cache.slice(position=slice(2, 5))):
        shown = sum(value.nbytes for value in sliced.values() if isinstance(value, Tensor))
        assert storages(sliced) == sliced.num_bytes <= shown < cache.num_bytes
        sliced.save(tmp_path / "slice.safetensors")
        pickled = io.BytesIO()
        torch.save(sliced, pickled)
        for size in ((tmp_path / "slice.safetensors").stat().st_size, pickled.tell()):
            assert size < shown + 1000 * len(sliced)  # beside the bytes, a header of names


@torch.no_grad()
def test_memory_that_values_share_counts_once(checkpoints: Folders) -> None:
    _, cache = load(PHI3, checkpoints).run_with_cache(prompt())
    for name in cache:
        cache[name]  # what waits is computed
    assert cache.num_bytes == storages(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_cache_reads_back_without_the_model_and_without_code(
    base: Recipe, dtype: torch.dtype, checkpoints: Folders, tmp_path: Path
) -> None:
    model, file = load(base, checkpoints, dtype=dtype), tmp_path / "run.safetensors"
    _, cache = model.run_with_cache(prompt(), return_type="loss", incl_bwd=True)
    cache.save(file)
    read = ActivationCache.load(file)
    assert list(read) == list(cache)
    for name, value in cache.items():
        assert read[name] == value if name == "input_size" else torch.equal(read[name], value)
    assert torch.equal(read["attention_queries", 1], cache["attention_queries", 1])
    assert torch.equal(read["q", -1], cache["q", -1])
    assert torch.equal(read["mlp_output_grad", 0], cache["mlp_output_grad", 0])
    assert torch.equal(read.stack("mlp_output"), cache.stack("mlp_output"))
    assert read.slice(batch=0, position=-1)["layer_output", 0].shape == (model.hidden_size,)
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == {name for name in cache if name != "input_size"}
        assert "Residual" in opened.metadata()["points"]
    with pytest.raises(RuntimeError, match="no model"):
        read.logit_lens()
    read.model = model
    assert torch.equal(read.logit_lens(), cache.logit_lens())
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_cache_takes_no_other_model(checkpoints: Folders, tmp_path: Path) -> None:
    model, other, file = load(PHI3, checkpoints), load(PHI, checkpoints), tmp_path / "run.safetensors"
    _, cache = model.run_with_cache(prompt(), names_filter="layer_output")
    cache.save(file)
    with pytest.raises(ValueError, match="another model"):
        ActivationCache.load(file, other)
    read = ActivationCache.load(file, load(PHI3, checkpoints, dtype=torch.bfloat16))
    with pytest.raises(UnknownName, match=r"not in this cache|no value"):
        read["layer_mid", 0]
    save_file({"a": torch.ones(1)}, file)
    with pytest.raises(ValueError, match="not a cache"):
        ActivationCache.load(file)
    file.write_bytes(b"{}")
    with pytest.raises(ValueError, match="not a cache"):
        ActivationCache.load(file)


def test_gradients_of_a_frozen_model_are_one_clear_error(checkpoints: Folders) -> None:
    model = load(PHI3, checkpoints).requires_grad_(False)
    with pytest.raises(RuntimeError, match="incl_bwd needs gradients"):
        model.run_with_cache(prompt(), incl_bwd=True, return_type="loss")
    model.embed_tokens.requires_grad_(True)
    _, cache = model.run_with_cache(prompt(), incl_bwd=True, return_type="loss", names_filter="layer_output")
    assert cache["layer_output_grad", 0].any()


@torch.no_grad()
def test_the_head_runs_where_something_reads_it(
    base: Recipe, checkpoints: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = load(base, checkpoints), []
    head = type(model.lm_head).forward

    def counted(self: Any, x: Tensor) -> Tensor:
        ran.extend([self] if self is model.lm_head else [])
        return head(self, x)

    monkeypatch.setattr(type(model.lm_head), "forward", counted)
    assert model(prompt(), return_type=None) is None
    _, cache = model.run_with_cache(prompt(), return_type=None, names_filter="layer_output")
    kept = KVCache(model)
    model(prompt(), return_type=None, kv_cache=kept)
    assert not ran
    assert len(cache) == model.num_layers
    assert len(kept) == prompt().shape[1]
    for value in ("final_norm_output", "lm_head_output", "logits", "next_token_probs"):
        _, cache = model.run_with_cache(prompt(), return_type=None, names_filter=value)
        assert value in cache
    assert len(ran) == 3  # the final norm's output needs none


@torch.no_grad()
def test_the_loss_of_each_token(base: Recipe, checkpoints: Folders) -> None:
    model, theirs = load(base, checkpoints), load_reference(checkpoints(base), attn="sdpa")
    losses = model(prompt(), return_type="loss", loss_per_token=True)
    for row in range(2):
        for end in range(2, prompt().shape[1] + 1):
            alone = theirs(prompt()[row : row + 1, :end], labels=_last_alone(prompt()[row : row + 1, :end])).loss
            # transformers gives a mean alone: of one transition, whose prefix is another length, which rounds otherwise
            torch.testing.assert_close(losses[row, end - 2], alone, rtol=1e-4, atol=1e-4)
    mask = torch.ones_like(prompt())
    mask[0, :4] = 0
    padded = model(prompt(), attention_mask=mask, return_type="loss", loss_per_token=True)
    assert padded.shape == (2, prompt().shape[1] - 1)
    assert padded[0, :4].isnan().all()
    assert not padded[0, 4:].isnan().any()
    torch.testing.assert_close(padded.nanmean(), model(prompt(), attention_mask=mask, return_type="loss"))
    assert torch.equal(losses.mean(), model(prompt(), return_type="loss"))
    logits, both = model(prompt(), return_type="both", loss_per_token=True)
    assert torch.equal(both, losses)
    assert torch.equal(logits, model(prompt()))
    with pytest.raises(ValueError, match="loss_per_token goes with"):
        model(prompt(), loss_per_token=True)


def _last_alone(tokens: Tensor) -> Tensor:
    """Labels of which the last alone counts."""
    labels = torch.full_like(tokens, -100)
    labels[:, -1] = tokens[:, -1]
    return labels


def test_where_inputs_go(checkpoints: Folders) -> None:
    assert load(PHI3, checkpoints).device == torch.device("cpu")


@torch.no_grad()
def test_a_hook_on_a_cached_pass_and_on_the_head_sees_what_the_pass_has(checkpoints: Folders) -> None:
    model, seen = load(QWEN, checkpoints), []
    model.run_with_hooks(
        prompt(),
        return_type=None,
        fwd_hooks=[("logits", lambda value, hook: seen.append((hook.name, isinstance(hook, HookPoint), value.shape)))],
    )
    assert seen == [("logits", True, (2, prompt().shape[1], model.vocab_size))]


@torch.no_grad()
def test_a_slice_takes_any_kind_of_number(checkpoints: Folders) -> None:
    _, cache = load(PHI3, checkpoints).run_with_cache(prompt())
    for one in (torch.tensor(1), np.int64(1)):
        assert torch.equal(cache.slice(position=one)["q", 0], cache.slice(position=1)["q", 0])
        last = cache.slice(batch=one).slice(position=-1)["layer_output", 0]
        assert torch.equal(last, cache["layer_output", 0][1, -1])
        assert torch.equal(cache["mlp_output", np.int64(1)], cache["mlp_output", 1])


@pytest.mark.parametrize("recipe", [PHI3, WINDOW], ids=lambda recipe: recipe.id)
@torch.no_grad()
def test_a_slice_of_a_step_takes_the_positions_of_the_step(recipe: Recipe, checkpoints: Folders) -> None:
    model = load(recipe, checkpoints, attn_implementation="eager")
    kept, (_, whole) = KVCache(model), model.run_with_cache(prompt())
    model(prompt()[:, :8], kv_cache=kept)
    _, step = model.run_with_cache(prompt()[:, 8:], kv_cache=kept)
    for position in (0, -1, slice(1, 3), [0, 4]):
        found, at = step.slice(position=position), {0: 8, -1: 12}.get(position) if isinstance(position, int) else None
        at = at if at is not None else slice(9, 11) if isinstance(position, slice) else [8, 12]
        wanted = whole.slice(position=at)
        for value in ("attention_keys", "attention_values", "layer_output", "attention_queries"):
            # A step's products are of other sizes than the whole's, and round otherwise.
            torch.testing.assert_close(found[value, 1], wanted[value, 1], rtol=1e-4, atol=1e-5)
        assert found["attention_mask"].shape == wanted["attention_mask"].shape
    assert step.slice(position=slice(1, 4)).slice(position=0)["attention_keys", 0].shape[-2:] == (
        model.num_kv_heads,
        16,
    )


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


def test_a_cache_keeps_no_model_alive(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    _, cache = model.run_with_cache(prompt())
    del model
    assert cache["logits"].shape[0] == 2
    with pytest.raises(RuntimeError, match="this cache has no model"):
        cache.logit_lens()
