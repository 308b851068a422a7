"""Generation against transformers' own, and hooks on every step of it."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from converters.tiny import make_checkpoint
from tests.oracle import both
from tests.tiny import BASES, BOUNDARY, LENGTH, MASK, NAMED, VOCAB, Folders, Recipe, build, edit_config, prompt
from transformer_std import HookedTransformer, KVCache

NEW = 8  # across every window and boundary of the recipes
WINDOW = NAMED["phi3-window"]


def theirs(reference: Any, tokens: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    return reference.model.generate(
        tokens, attention_mask=mask, **{"max_new_tokens": NEW, "do_sample": False, **settings}
    )


# -- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
def test_greedy_is_transformers(recipe: Recipe, checkpoints: Folders) -> None:
    """Padded and not, across windows and longrope's boundary."""
    model, reference = both(checkpoints(recipe), "sdpa")
    for mask in (None, MASK):
        ours = model.generate(prompt(), max_new_tokens=NEW, attention_mask=mask)
        assert torch.equal(ours, theirs(reference, prompt(), mask))


@pytest.mark.unchecked
def test_greedy_is_the_same_by_eager_attention_and_without_the_cache(structure: Recipe, checkpoints: Folders) -> None:
    model, reference = both(checkpoints(structure), "eager")
    for mask in (None, MASK):
        expected = theirs(reference, prompt(), mask)
        for use in (True, False):
            ours = model.generate(prompt(), max_new_tokens=NEW, attention_mask=mask, use_kv_cache=use)
            assert torch.equal(ours, expected), use


@pytest.mark.unchecked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_greedy_in_half_precision(dtype: torch.dtype, checkpoints: Folders) -> None:
    for base in BASES:
        model, reference = both(checkpoints(base), "sdpa", dtype)
        ours = model.generate(prompt(), max_new_tokens=NEW, attention_mask=MASK)
        assert torch.equal(ours, theirs(reference, prompt(), MASK)), base.id


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8, "top_k": 0},
        {"min_p": 0.05, "top_k": 0, "repetition_penalty": 1.3},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
def test_sampling_is_transformers(settings: dict[str, Any], checkpoints: Folders) -> None:
    for base in BASES[:3]:
        model, reference = both(checkpoints(base), "sdpa")
        torch.manual_seed(5)
        expected = theirs(reference, prompt(), do_sample=True, **settings)
        torch.manual_seed(5)
        ours = model.generate(
            prompt(), max_new_tokens=NEW, do_sample=True, **{key: value or None for key, value in settings.items()}
        )
        assert torch.equal(ours, expected), base.id


def test_repetition_penalty_when_greedy(checkpoints: Folders) -> None:
    model, reference = both(checkpoints(BASES[0]), "sdpa")
    ours = model.generate(prompt(), max_new_tokens=NEW, repetition_penalty=1.5)
    assert torch.equal(ours, theirs(reference, prompt(), repetition_penalty=1.5))


@pytest.mark.quick
def test_end_tokens(base: Recipe, own_copy: Folders) -> None:
    """From the checkpoint's generation config, a list too; a finished row is padded, and all finished ends it."""
    whole = torch.ones_like(prompt())  # the pad id in it is a token
    folder = own_copy(base)
    model, reference = both(folder, "sdpa")
    free = model.generate(prompt(), max_new_tokens=NEW, stop_at_eos=False)[:, LENGTH:]
    assert free.shape == (2, NEW)
    ends = [int(free[0, 2]), int(free[1, 5])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 9}))
    model, reference = both(folder, "sdpa")
    ours = model.generate(prompt(), max_new_tokens=NEW, attention_mask=whole)
    assert torch.equal(ours, theirs(reference, prompt()))
    assert ours.shape[1] <= LENGTH + 6
    given = model.generate(prompt(), max_new_tokens=NEW, attention_mask=whole, eos_token_id=ends[0])
    assert torch.equal(given, theirs(reference, prompt(), eos_token_id=ends[0]))


@pytest.mark.unchecked
def test_batched_rows_write_what_they_write_alone(model: HookedTransformer) -> None:
    together = model.generate(prompt(), max_new_tokens=NEW, attention_mask=MASK, stop_at_eos=False)
    alone = [model.generate(prompt()[:1, 4:], max_new_tokens=NEW, stop_at_eos=False)]
    alone.append(model.generate(prompt()[1:], max_new_tokens=NEW, stop_at_eos=False))
    assert torch.equal(together[0, 4:], alone[0][0])
    assert torch.equal(together[1], alone[1][0])


# -- text --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_text_in_text_out(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    texts = ["the cat sat on the red mat", "the dog ran"]
    one = model.generate(texts[0], max_new_tokens=5, stop_at_eos=False)
    assert isinstance(one, str)
    assert one.startswith(texts[0] + " ")
    many = model.generate(texts, max_new_tokens=5, stop_at_eos=False)
    assert many == [model.generate(text, max_new_tokens=5, stop_at_eos=False) for text in texts]
    tokens = model.generate(model.to_tokens(texts[0]), max_new_tokens=5, stop_at_eos=False)
    assert model.tokenizer.decode(tokens[0], skip_special_tokens=True) == one


def test_stop_strings(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    build(Recipe("phi3", "bytes", {"vocab_size": len(alphabet)}), tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    tokens = model.to_tokens(["the cat sat", "a dog ran o"])
    free = model.generate(tokens, max_new_tokens=20, stop_at_eos=False, repetition_penalty=3.0)
    written = [[model.tokenizer.decode([int(each)]) for each in row[11:]] for row in free]
    ends = [next(each for each in row[2:] if each.isascii()) for row in written]
    stopped = model.generate(tokens, max_new_tokens=20, stop_strings=ends, eos_token_id=0, repetition_penalty=3.0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = {"do_sample": False, "stop_strings": ends, "tokenizer": model.tokenizer, "repetition_penalty": 3.0}
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = 0, 0
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, **settings)
    assert torch.equal(stopped, expected)
    assert stopped.shape[1] < free.shape[1]
    told = model.generate(tokens, max_new_tokens=20, stop_strings=ends, return_dict=True, repetition_penalty=3.0)
    assert told.stopped == ["stop_string"] * 2
    assert all(text.endswith(tuple(ends)) for text in told.new_text)


def test_stream(model: HookedTransformer) -> None:
    expected = model.generate(prompt(), max_new_tokens=NEW, stop_at_eos=False)
    stream = model.stream(prompt(), max_new_tokens=NEW, stop_at_eos=False)
    first = next(stream)
    assert torch.equal(first, expected[:, LENGTH])
    assert torch.equal(torch.stack([first, *stream], 1), expected[:, LENGTH:])
    assert model.generate(prompt(), max_new_tokens=2, progress=True).shape == (2, LENGTH + 2)


# -- the cache ---------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@torch.no_grad()
def test_a_cached_forward_is_transformers(recipe: Recipe, padded: bool, checkpoints: Folders) -> None:
    """Two passes, then single tokens: the logits of transformers' own cached passes, to the bit."""
    model, reference = both(checkpoints(recipe), "sdpa")
    mask = MASK if padded else torch.ones_like(MASK)
    ours = KVCache(model)
    their_cache = transformers.DynamicCache(config=reference.model.config)
    whole = model(prompt(), attention_mask=mask)
    read = 0
    for end in (6, 10, 11, 12, LENGTH):
        part, positions = prompt()[:, read:end], (mask.cumsum(-1) - 1).clamp(min=0)[:, read:end]
        given = {"attention_mask": mask[:, :end], "position_ids": positions} if padded else {}
        expected = reference.model(part, cache=their_cache, use_cache=True, **given).logits
        logits = model(part, kv_cache=ours, attention_mask=mask[:, read:end] if padded else None)
        if model.head_dim == 10:  # our cache's rows of heads lie elsewhere; of 40 bytes they are not aligned alike
            torch.testing.assert_close(logits, expected)
        else:
            assert torch.equal(logits, expected), end
        real = mask[:, read:end].bool()  # the open path mixes a padding position evenly, of however many there are
        torch.testing.assert_close(logits[real], whole[:, read:end][real], atol=1e-4, rtol=1e-4)
        read = end
    assert len(ours) == LENGTH
    assert (ours.mask is None) != padded


@torch.no_grad()
def test_stepping_past_longropes_boundary_keeps_the_keys(checkpoints: Folders) -> None:
    """A step by hand turns the new query and key by the long factors; generate reads the text again."""
    model, reference = both(checkpoints(NAMED["phi3-longrope"]), "sdpa")
    tokens = prompt(BOUNDARY + 2)
    cache, their_cache = KVCache(model), transformers.DynamicCache(config=reference.model.config)
    for start, end in ((0, BOUNDARY), (BOUNDARY, BOUNDARY + 1), (BOUNDARY + 1, BOUNDARY + 2)):
        logits = model(tokens[:, start:end], kv_cache=cache)
        expected = reference.model(tokens[:, start:end], cache=their_cache, use_cache=True).logits
        assert torch.equal(logits, expected)
    assert not torch.allclose(logits, model(tokens)[:, -1:], atol=1e-3)
    _, caches = model.generate(
        tokens[:, : BOUNDARY - 1], max_new_tokens=4, names_filter="input_size", stop_at_eos=False
    )
    assert [cache["input_size"][1] for cache in caches] == [BOUNDARY - 1, 1, BOUNDARY + 1, 1]


@pytest.mark.unchecked
@torch.no_grad()
def test_a_cache_grows_by_chunks(model: HookedTransformer) -> None:
    cache = KVCache(model)
    layer = (
        next(each for each in cache.layers if each.window is None)
        if any(each.window is None for each in cache.layers)
        else cache.layers[0]
    )
    rooms = set()
    for _ in range(50):
        model(prompt()[:, :4], kv_cache=cache)
        rooms.add(layer._keys.data_ptr())
        if layer.window is not None:
            assert layer._keys.shape[2] <= 192
    assert len(rooms) <= 6
    assert len(cache) == 200


def test_a_cached_forward_has_gradients(model: HookedTransformer) -> None:
    cache = KVCache(model)
    first = model(prompt()[:, :6], kv_cache=cache)
    second = model(prompt()[:, 6:], kv_cache=cache)
    torch.cat((first, second), 1).square().mean().backward()
    stepped = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    model(prompt()).square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(stepped[name], parameter.grad, atol=1e-4, rtol=1e-3)


# -- hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_hooks_run_on_every_step(model: HookedTransformer) -> None:
    seen: list[tuple[int, str, int]] = []

    def look(value: Tensor, hook: Any) -> None:
        seen.append((hook.step, hook.value, value.shape[2]))

    with model.hooks(fwd_hooks=[([("attention_queries", -1), ("attention_keys", -1)], look)]):
        model.generate(prompt(), max_new_tokens=4, stop_at_eos=False)
    window = model.config.layers[-1].attention.window
    for step in range(4):
        keys = LENGTH if step == 0 else min(LENGTH + step, window or 999)
        assert (step, "attention_queries", LENGTH if step == 0 else 1) in seen
        assert (step, "attention_keys", keys) in seen
    assert len(seen) == 8
    assert all(point.step == 0 for point in model.names.points.values())


def test_a_write_on_a_step_stays_on_it(model: HookedTransformer) -> None:
    names = ["layer_output", "logits", "attention_keys"]
    clean, before = model.generate(prompt(), max_new_tokens=4, stop_at_eos=False, names_filter=names)

    def steer(value: Tensor, hook: Any) -> Tensor | None:
        return value + 3 * value.flip(-1) if hook.step == 1 else None

    with model.hooks(fwd_hooks=[(("layer_output", 0), steer)]):
        steered, after = model.generate(prompt(), max_new_tokens=4, stop_at_eos=False, names_filter=names)
    assert torch.equal(steered[:, : LENGTH + 1], clean[:, : LENGTH + 1])
    assert torch.equal(after[0]["logits"], before[0]["logits"])
    assert not torch.equal(after[1]["logits"], before[1]["logits"])

    def zero_keys(value: Tensor, hook: Any) -> None:
        if hook.step == 1:
            value.zero_()

    with model.hooks(fwd_hooks=[("attention_keys", zero_keys)]):
        _, zeroed = model.generate(prompt(), max_new_tokens=4, stop_at_eos=False, names_filter=names)
    assert not zeroed[1]["attention_keys", 1].any()
    first = 0 if model.config.layers[0].attention.window is None else -1
    past = zeroed[2]["attention_keys", 0][:, :, : LENGTH - 1 if first == 0 else 3]
    assert torch.equal(past, before[2]["attention_keys", 0][:, :, : LENGTH - 1 if first == 0 else 3])
    assert past.any()


def test_caches_of_the_steps_join(model: HookedTransformer) -> None:
    names = ["input_ids", "layer_output", "mlp_output", "attention_probabilities", "attention_keys", "logits"]
    tokens, caches = model.generate(prompt(), max_new_tokens=4, stop_at_eos=False, names_filter=names)
    assert len(caches) == 4
    joined = caches.cat()
    assert torch.equal(joined["input_ids"], tokens[:, :-1])
    with torch.no_grad():
        _, whole = model.run_with_cache(tokens[:, :-1], names_filter=names)
    for name in joined:
        torch.testing.assert_close(joined[name], whole[name], atol=1e-3, rtol=1e-3)
    _, plain = model.generate(prompt(), max_new_tokens=4, stop_at_eos=False, names_filter=names, use_kv_cache=False)
    for name, value in plain.cat().items():
        torch.testing.assert_close(value, whole[name], atol=1e-3, rtol=1e-3)


def test_interventions_through_generation(model: HookedTransformer) -> None:
    def caches(names: Any) -> Any:
        return model.generate(prompt(), max_new_tokens=4, stop_at_eos=False, names_filter=names)[1]

    with model.skip_layers(1, model.num_layers - 1):
        for cache in caches(["layer_input", "layer_output"]):
            assert torch.equal(cache["layer_output", -1], cache["layer_input", 1])
    vector = torch.randn(model.hidden_size)
    clean = caches("layer_output")
    with model.steer(0, vector, token_positions=-1):
        steered = caches("layer_output")
    torch.testing.assert_close(steered[0]["layer_output", 0][:, -1], clean[0]["layer_output", 0][:, -1] + vector)
    with model.steer(0, vector):
        _, everywhere = model.generate(
            prompt(), max_new_tokens=2, stop_at_eos=False, names_filter=["layer_output", "layer_input"]
        )
    assert everywhere[1]["layer_output", 0].shape[1] == 1
    if model.support(-1)["router_logits"] is None:
        names = ["expert_indices", "expert_weights"]
        with model.hooks(fwd_hooks=model.ablate_expert(1, 3)):
            for cache in caches(names):
                assert not cache["expert_weights", 1][cache["expert_indices", 1] == 3].any()


def test_a_hook_that_raises_leaves_nothing(model: HookedTransformer) -> None:
    def fail(value: Tensor, hook: Any) -> None:
        if hook.step == 2:
            raise RuntimeError("third step")

    with pytest.raises(RuntimeError, match="third step"), model.hooks(fwd_hooks=[(("layer_output", 0), fail)]):
        model.generate(prompt(), max_new_tokens=4)
    assert all(point.step == 0 and not point.watched for point in model.names.points.values())


# -- errors ------------------------------------------------------------------------------------------------------


def test_errors(model: HookedTransformer, checkpoints: Folders, own_copy: Folders) -> None:
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"max_new_tokens is {wrong}; give a whole number of at least 1"):
            model.generate(prompt(), max_new_tokens=wrong)
    with pytest.raises(ValueError, match=r"the input has no tokens: it is \[2, 0\]"):
        model.generate(prompt()[:, :0], max_new_tokens=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_length'"):
        model.generate(prompt(), max_new_tokens=3, max_length=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_length'"):
        model.stream(prompt(), max_new_tokens=3, max_length=3)
    folder = own_copy(BASES[0])
    edit_config(folder, max_position_embeddings=8)
    with pytest.raises(ValueError, match="the prompt has 13 tokens; the model's context is 8"):
        HookedTransformer.from_pretrained(folder).generate(prompt(), max_new_tokens=1)
    other = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    cache = KVCache(model)
    with pytest.raises(ValueError, match="the kv_cache is of another model"):
        other(prompt(), kv_cache=cache)
    model(prompt(), kv_cache=cache, attention_mask=MASK)
    with pytest.raises(ValueError, match="the kv_cache holds 2 rows; the input has 1"):
        model(prompt()[:1], kv_cache=cache)
    with pytest.raises(ValueError, match="the attention_mask has 3 positions; the kv_cache holds 13 and the input 1"):
        model(prompt()[:, :1], kv_cache=cache, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="says otherwise of the positions that the kv_cache holds"):
        model(prompt()[:, :1], kv_cache=cache, attention_mask=torch.ones(2, LENGTH + 1))
    with pytest.raises(ValueError, match="a kv_cache needs all layers"):
        model(prompt(), kv_cache=cache, stop_at_layer=1)
    assert len(cache) == LENGTH
    assert "KVCache(13 positions of 2 rows" in repr(cache)
    assert int(prompt().max()) < VOCAB


def test_generation_is_freed(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    _, caches = model.generate(prompt(), max_new_tokens=3, names_filter="layer_output")
    watched = weakref.ref(caches[0]["layer_output", 0])
    gc.disable()
    try:
        del caches
        assert watched() is None
    finally:
        gc.enable()


# -- what broke it once ------------------------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_on_many_prompts(dtype: torch.dtype, checkpoints: Folders) -> None:
    """A head with a bias rounds otherwise on one row than on many: both libraries give it the last position alone."""
    for base in BASES:
        model, reference = both(checkpoints(base), "sdpa", dtype)
        for seed in range(8):
            tokens = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(100 + seed))
            ours = model.generate(tokens, max_new_tokens=4)
            assert torch.equal(ours, theirs(reference, tokens, max_new_tokens=4)), (base.id, seed)


@pytest.mark.unchecked
def test_repetition_penalty_leaves_padding_out(checkpoints: Folders) -> None:
    model, reference = both(checkpoints(BASES[0]), "sdpa")
    for seed in range(8):
        tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        tokens[0, :4] = model.generate(tokens[:1, 4:], max_new_tokens=1)[0, -1]  # padding with what it would write
        ours = model.generate(tokens, max_new_tokens=5, attention_mask=MASK, repetition_penalty=1.5)
        assert torch.equal(ours, theirs(reference, tokens, MASK, max_new_tokens=5, repetition_penalty=1.5))


@torch.no_grad()
def test_a_pass_that_fails_leaves_the_cache_as_it_was(model: HookedTransformer) -> None:
    def fail(value: Tensor, hook: Any) -> None:
        raise RuntimeError("half-way")

    cache, other = KVCache(model), KVCache(model)
    for each in (cache, other):
        model(prompt()[:, :6], kv_cache=each)
    with pytest.raises(RuntimeError, match="half-way"):
        model.run_with_hooks(prompt()[:, 6:7], kv_cache=cache, fwd_hooks=[(("layer_output", 1), fail)])
    assert len(cache) == 6
    assert torch.equal(model(prompt()[:, 6:7], kv_cache=cache), model(prompt()[:, 6:7], kv_cache=other))

    def fail_late() -> None:
        with cache.reading(MASK[:, :9], 2, 2):
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail_late()
    assert (len(cache), cache.mask) == (7, None)


def test_losses_and_counts_of_cached_passes(model: HookedTransformer) -> None:
    cache = KVCache(model)
    with torch.no_grad():
        model(prompt()[:, :6], kv_cache=cache, attention_mask=MASK[:, :6])
        loss, kept = model.run_with_cache(
            prompt()[:, 6:], kv_cache=cache, attention_mask=MASK[:, 6:], return_type="loss", names_filter="*"
        )
        logits = model(prompt(), attention_mask=MASK)[:, 6:]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), prompt()[:, 7:].flatten())
    torch.testing.assert_close(loss, expected)
    if model.support(-1)["router_logits"] is None:
        assert int(kept.expert_counts(1).sum()) == 2 * (LENGTH - 6) * model.layers[1].mlp.top_k
        assert kept.routing_entropy(1).shape == (2 * (LENGTH - 6),)


def test_gradients_of_a_soft_prompt_through_a_cache(model: HookedTransformer) -> None:
    model.requires_grad_(False)

    def gradient(bounds: list[int]) -> Tensor:
        soft = torch.zeros(2, 4, model.hidden_size, requires_grad=True)
        cache, outputs = KVCache(model), []

        def add(value: Tensor, hook: Any) -> Tensor:
            return torch.cat((value[:, :4] + soft, value[:, 4:]), 1)

        for start, end in itertools.pairwise(bounds):
            hooks = [("token_embeddings", add)] if start == 0 else []
            outputs.append(model.run_with_hooks(prompt()[:, start:end], kv_cache=cache, fwd_hooks=hooks))
        torch.cat(outputs, 1).square().mean().backward()
        return soft.grad

    torch.testing.assert_close(gradient([0, 8, 9, 10, 11, 12]), gradient([0, 12]), atol=1e-4, rtol=1e-3)


def test_a_stream_leaves_other_passes_alone(model: HookedTransformer) -> None:
    stream = model.stream(prompt(), max_new_tokens=5, stop_at_eos=False)
    next(stream)
    next(stream)
    assert all(point.step == 0 for point in model.names.points.values())
    vector = torch.randn(model.hidden_size)
    with torch.no_grad():
        plain = model(prompt())
        with model.steer(0, vector, token_positions=-1):
            assert not torch.equal(model(prompt()), plain)


@pytest.mark.unchecked
def test_steering_does_not_depend_on_the_cache(model: HookedTransformer) -> None:
    vector = 3 * torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0))
    for positions in ([[2, 3, 4]], [4, 2], [[1, 2], [3]], slice(1, 3), -1, None):
        with model.steer(0, vector, token_positions=positions):
            cached, plain = (
                model.generate(prompt(), max_new_tokens=5, stop_at_eos=False, use_kv_cache=each)
                for each in (True, False)
            )
        assert torch.equal(cached, plain)


@torch.no_grad()
def test_a_hook_on_the_mask_of_every_step(checkpoints: Folders) -> None:
    """Each step is called with the mask as it was given, and computes with what the hook makes of it."""
    model = HookedTransformer.from_pretrained(checkpoints(BASES[1]))

    def hide(mask: Tensor, hook: Any) -> None:
        mask[:, 2] = 0

    mask = torch.ones(1, LENGTH, dtype=torch.long).expand(2, -1)
    settings = {"attention_mask": mask, "max_new_tokens": 4, "stop_at_eos": False}
    with model.hooks(fwd_hooks=[("attention_mask", hide)]):
        cached = model.generate(prompt(), **settings)
        assert torch.equal(cached, model.generate(prompt(), use_kv_cache=False, **settings))
    assert not torch.equal(cached, model.generate(prompt(), **settings))


# -- the checkpoint's settings -----------------------------------------------------------------------------------

GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "pad_token_id": 0},
    {"suppress_tokens": list(range(0, VOCAB, 2)), "begin_suppress_tokens": list(range(1, VOCAB, 4))},
    {"bad_words_ids": [[each] for each in range(40)], "sequence_bias": [[[90], 2.5]], "renormalize_logits": True},
    {"forced_eos_token_id": 7, "forced_bos_token_id": 3, "min_new_tokens": 5, "eos_token_id": list(range(0, VOCAB, 3))},
    {"min_length": LENGTH + 4, "eos_token_id": list(range(0, VOCAB, 3)), "exponential_decay_length_penalty": [3, 1.2]},
    {"temperature": 0.3, "top_k": 2},  # of sampling only
]
SAMPLED: list[dict[str, Any]] = [
    {},  # top_k is 50 where nobody says otherwise
    {"temperature": 0.6, "top_p": 0.9, "top_k": None},
    {"typical_p": 0.6, "epsilon_cutoff": 0.004, "top_k": 30, "repetition_penalty": 1.2},
    {"min_p": 0.02, "eta_cutoff": 0.01, "num_return_sequences": 3},
]


@pytest.mark.unchecked
@pytest.mark.parametrize("where", ["checkpoint", "call"])
@pytest.mark.parametrize("settings", [*GREEDY, *({"do_sample": True, **each} for each in SAMPLED)], ids=str)
def test_generation_settings_are_followed(settings: dict[str, Any], where: str, own_copy: Folders) -> None:
    """Those of the checkpoint's generation config and those of the call, as transformers' generate follows them."""
    folder = own_copy(BASES[1])
    known = {key: value for key, value in settings.items() if value is not None or where == "call"}
    stored = known if where == "checkpoint" else {"eos_token_id": 2, "temperature": 3.0, "repetition_penalty": 2.0}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    model, given = HookedTransformer.from_pretrained(folder), {} if where == "checkpoint" else known
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for mask in (torch.ones_like(prompt()), MASK):
        torch.manual_seed(3)
        expected = reference.generate(prompt(), attention_mask=mask, max_new_tokens=NEW, **given)
        torch.manual_seed(3)
        assert torch.equal(model.generate(prompt(), attention_mask=mask, max_new_tokens=NEW, **given), expected)
        torch.manual_seed(3)
        stream = torch.stack([*model.stream(prompt(), attention_mask=mask, max_new_tokens=NEW, **given)], 1)
        assert torch.equal(stream, expected[:, LENGTH:])


def test_settings_in_an_old_config_are_followed(own_copy: Folders) -> None:
    """Before there were generation configs they stood in the config, where transformers reads them still."""
    folder = own_copy(BASES[1])
    (folder / "generation_config.json").unlink()
    edit_config(folder, repetition_penalty=1.4, eos_token_id=[5, 17])
    model, reference = both(folder, "sdpa")
    expected = theirs(reference, prompt(), do_sample=None)
    assert torch.equal(model.generate(prompt(), max_new_tokens=NEW), expected)
    assert not torch.equal(model.generate(prompt(), max_new_tokens=NEW, repetition_penalty=1.0), expected)


def test_settings_of_a_live_model_are_followed(checkpoints: Folders) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(BASES[1]))
    reference.generation_config.repetition_penalty = 1.4
    model = HookedTransformer.from_pretrained(reference)
    expected = reference.generate(prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=NEW)
    assert torch.equal(model.generate(prompt(), max_new_tokens=NEW), expected)


def test_rows_that_ended_are_filled_as_transformers_fills_them(own_copy: Folders) -> None:
    """With eos, where the generation config has no pad token, whatever the config has."""
    folder = own_copy(BASES[1])
    free = HookedTransformer.from_pretrained(folder).generate(prompt(), max_new_tokens=NEW, stop_at_eos=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(free[0, LENGTH + 2]), 5]}))
    model, reference = both(folder, "sdpa")
    assert model.config.origin.config["pad_token_id"] == 0
    ours = model.generate(prompt(), max_new_tokens=NEW)
    assert torch.equal(ours, theirs(reference, prompt()))
    assert ours[0, -1] == free[0, LENGTH + 2]


def test_settings_that_are_not_followed_are_named(own_copy: Folders) -> None:
    folder = own_copy(BASES[1])
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "guidance_scale": 1.5}))
    model = HookedTransformer.from_pretrained(folder)
    for call in (model.generate, model.stream):
        with pytest.raises(
            ValueError, match=r"num_beams=4 in the checkpoint's generation config is .* pass num_beams=1"
        ):
            call(prompt(), max_new_tokens=3)
        with pytest.raises(ValueError, match=r"guidance_scale=1.5 in the checkpoint's .* pass guidance_scale=1.0"):
            call(prompt(), max_new_tokens=3, num_beams=1)
        with pytest.raises(ValueError, match="prompt_lookup_num_tokens=3 is nothing that generate does"):
            call(prompt(), max_new_tokens=3, num_beams=1, guidance_scale=None, prompt_lookup_num_tokens=3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'; did you mean 'temperature'"):
            call(prompt(), max_new_tokens=3, temprature=0.5)
        with pytest.raises(ValueError, match="num_return_sequences=2 would be the same row 2 times: pass do_sample"):
            call(prompt(), max_new_tokens=3, num_beams=1, guidance_scale=1, num_return_sequences=2)
        with pytest.raises(ValueError, match="eos_token_id is 'x': give a token's id, or a list of them"):
            call(prompt(), max_new_tokens=3, num_beams=1, guidance_scale=1, eos_token_id="x")
    assert model.generate(prompt(), max_new_tokens=3, num_beams=1, guidance_scale=1).shape == (2, LENGTH + 3)


def test_greedy_needs_no_transformers(checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[1]))
    expected = model.generate(prompt(), max_new_tokens=3)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert torch.equal(model.generate(prompt(), max_new_tokens=np.int64(3)), expected)
    for settings in ({"do_sample": True}, {"repetition_penalty": 1.2}):
        with pytest.raises(ImportError, match=r"generation with .* needs transformers, which is not installed"):
            model.generate(prompt(), max_new_tokens=3, **settings)


# -- the answer --------------------------------------------------------------------------------------------------


def test_the_answer_has_the_inputs_form(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    tokenizer, text, more = model.tokenizer, "the  cat sat", ["the cat sat", "the dog ran by the sea"]
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    settings = {"max_new_tokens": 4, "stop_at_eos": False}
    tensor = model.generate(model.to_tokens(text), **settings)
    assert tensor.shape == (1, 7)
    new = tokenizer.decode(tensor[0, 3:], skip_special_tokens=True)
    assert model.generate(text, **settings) == f"{text} {new}"  # the text as it was given, two spaces and all
    assert torch.equal(model.generate(tensor[0, :3], **settings), tensor[0])
    assert model.generate(tensor[0, :3].tolist(), **settings) == tensor[0].tolist()
    assert model.generate([tensor[0, :3].tolist()], **settings) == [tensor[0].tolist()]
    assert torch.equal(model.generate(tokenizer(text, return_tensors="pt"), **settings), tensor)
    assert model.generate([{"role": "user", "content": text}], **settings) == [
        {"role": "user", "content": text}, {"role": "assistant", "content": " " + new},
    ]  # fmt: skip
    rows = [tokenizer(each)["input_ids"] for each in more]
    expected = [model.generate(row, **settings) for row in rows]
    assert model.generate(rows, **settings) == expected
    assert model.generate(more, **settings) == [model.generate(each, **settings) for each in more]
    chats = [[{"role": "user", "content": each}] for each in more]
    assert model.generate(chats, **settings) == [model.generate(chat, **settings) for chat in chats]
    written = model.generate(model.to_tokens(more), **settings)  # which carries its mask on
    assert [row[real.bool()].tolist() for row, real in zip(written, written.mask, strict=True)] == expected
    longer = [model.generate(row, **settings) for row in expected]
    again = model.generate(written, **settings)
    assert [row[real.bool()].tolist() for row, real in zip(again, again.mask, strict=True)] == longer
    special = "<eos> the cat"
    assert model.generate(special, **settings).startswith(special + " ")
    sampled = model.generate(text, do_sample=True, num_return_sequences=3, **settings)
    assert len(sampled) == 3
    assert all(each.startswith(text) for each in sampled)


def test_a_generation_tells_all_of_itself(own_copy: Folders) -> None:
    """Ids, log probabilities and reasons; the numbers are transformers'."""
    folder = own_copy(BASES[1])
    model = HookedTransformer.from_pretrained(folder)
    free = model.generate(prompt(), max_new_tokens=NEW, attention_mask=MASK, stop_at_eos=False)
    settings = {"eos_token_id": int(free[0, LENGTH + 2]), "pad_token_id": 0, "do_sample": True, "temperature": 1e-3}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model, reference = both(folder, "sdpa")
    torch.manual_seed(0)
    ours = model.generate(
        prompt(), max_new_tokens=NEW, attention_mask=MASK, return_dict=True, names_filter="layer_output"
    )
    torch.manual_seed(0)
    extra = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": True}
    expected = theirs(reference, prompt(), MASK, **extra)
    assert torch.equal(ours.tokens, expected.sequences)
    assert torch.equal(ours.output, ours.tokens)
    assert torch.equal(ours.new_tokens, expected.sequences[:, LENGTH:])
    real = ours.mask[:, LENGTH:].bool()
    for found, scores in ((ours.log_probs, expected.logits), (ours.drawn_log_probs, expected.scores)):
        theirs_ = torch.stack([each.log_softmax(-1) for each in scores], 1)
        theirs_ = theirs_.gather(2, ours.new_tokens[:, :, None])[:, :, 0]
        assert torch.equal(found[real], theirs_[real])
        assert not found[~real].any()
    ended = [int(settings["eos_token_id"]) in row.tolist() for row in ours.new_tokens]
    assert any(ended)
    assert ours.stopped == ["eos" if each else "length" for each in ended]
    assert torch.equal(ours.mask[:, :LENGTH], MASK)
    assert len(ours.caches) == ours.new_tokens.shape[1]
    assert ours.text is ours.new_text is None  # there is no tokenizer


def test_a_generation_tells_its_texts(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    texts = ["the cat sat on the red mat", "the dog ran"]
    free = model.generate(texts, max_new_tokens=6, stop_at_eos=False, return_dict=True)
    assert free.output == free.text == [text + new for text, new in zip(texts, free.new_text, strict=True)]
    assert free.stopped == ["length"] * 2
    assert free.caches is None


def test_samples_are_transformers_and_a_a_generators(checkpoints: Folders) -> None:
    model, reference = both(checkpoints(BASES[1]), "sdpa")
    settings = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(7)
    expected = theirs(reference, prompt(), MASK, **settings)
    torch.manual_seed(7)
    ours = model.generate(prompt(), max_new_tokens=NEW, attention_mask=MASK, **settings)
    assert torch.equal(ours, expected)
    state = torch.get_rng_state()
    own = torch.Generator().manual_seed(7)
    again = model.generate(prompt(), max_new_tokens=NEW, attention_mask=MASK, generator=own, **settings)
    assert torch.equal(again, expected)
    assert torch.equal(torch.get_rng_state(), state)


# -- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
def test_rows_padded_on_the_right_write_what_they_write_alone(model: HookedTransformer) -> None:
    real = (6, LENGTH)
    mask = torch.stack([(torch.arange(LENGTH) < each).long() for each in real])
    settings = {"max_new_tokens": NEW, "stop_at_eos": False}
    for kept in (mask, mask.float(), mask.bool()):
        written = model.generate(prompt(), attention_mask=kept, **settings)
        assert torch.equal(written[:, :LENGTH], prompt())  # as it was given
    for row, length in enumerate(real):
        alone = model.generate(prompt()[row : row + 1, :length], **settings)[0, length:]
        assert torch.equal(written[row, LENGTH:], alone)
        stream = torch.stack([*model.stream(prompt(), attention_mask=mask, **settings)], 1)
        assert torch.equal(stream[row], alone)
    for watched in ({"names_filter": "logits"}, {}):
        hooks = [] if watched else [("layer_output", lambda value, hook: None)]
        said = "the prompt is padded on the right, and hooks and kept values"
        with model.hooks(fwd_hooks=hooks), pytest.raises(ValueError, match=said):
            model.generate(prompt(), attention_mask=mask, **settings, **watched)


@torch.no_grad()
def test_the_last_position_of_a_padded_row_is_its_last_token(model: HookedTransformer) -> None:
    mask = torch.stack([(torch.arange(LENGTH) < each).long() for each in (6, LENGTH)])
    _, cache = model.run_with_cache(prompt(), attention_mask=mask, names_filter="next_token_probs")
    alone = [model(prompt()[:1, :6])[0, -1], model(prompt()[1:])[0, -1]]
    last = model(prompt(), attention_mask=mask, last_logits_only=True)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(cache["next_token_probs"][row], expected.softmax(-1))
        torch.testing.assert_close(last[row, 0], expected)
    for given in (None, MASK):
        last = model(prompt(), attention_mask=given, last_logits_only=True)
        torch.testing.assert_close(last, model(prompt(), attention_mask=given)[:, -1:])
    kept = KVCache(model)
    model(prompt()[:, :4], kv_cache=kept)
    cached = model(prompt()[:, 4:], kv_cache=kept, attention_mask=mask[:, 4:], last_logits_only=True)
    torch.testing.assert_close(cached[:, 0], torch.stack(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.unchecked
def test_pad_ids_without_a_mask_are_padding_as_for_transformers(checkpoints: Folders) -> None:
    for base in BASES[:3]:
        model = HookedTransformer.from_pretrained(checkpoints(base))
        reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(base))
        tokens = prompt().clone()
        tokens[1, :4] = 0
        ours = model.generate(tokens, max_new_tokens=NEW)
        assert torch.equal(ours, reference.generate(tokens, max_new_tokens=NEW)), base.id
        assert torch.equal(ours, model.generate(tokens, attention_mask=tokens != 0, max_new_tokens=NEW))
        whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW)
        assert not torch.equal(whole, ours)
        told = model.generate(tokens, max_new_tokens=NEW, eos_token_id=0)  # the pad id ends texts: no padding
        assert torch.equal(told, reference.generate(tokens, max_new_tokens=NEW, eos_token_id=0))


@pytest.mark.parametrize("name", ["phi3-longrope", "phimoe-longrope"])
def test_longrope_with_padding_in_every_row_writes_what_it_writes_alone(name: str, checkpoints: Folders) -> None:
    """The border is at so many real tokens, whatever is padding."""
    model = HookedTransformer.from_pretrained(checkpoints(NAMED[name]))
    tokens = prompt(BOUNDARY - 3)
    padded = torch.cat((torch.zeros(2, 6, dtype=torch.long), tokens), 1)
    mask = (torch.arange(padded.shape[1]) >= 6).long().expand(2, -1).clone()
    settings = {"max_new_tokens": NEW, "stop_at_eos": False}
    alone = model.generate(tokens, **settings)
    for use in (True, False):
        written = model.generate(padded, attention_mask=mask, use_kv_cache=use, **settings)
        assert torch.equal(written[:, 6:], alone)
    mask[0, 6:8] = 0  # the longest row decides
    expected = model.generate(padded, attention_mask=mask, use_kv_cache=False, **settings)
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings), expected)


# -- steps joined, caches copied ---------------------------------------------------------------------------------


def test_joined_scores_are_those_of_the_joined_pattern(model: HookedTransformer) -> None:
    names = ["attention_scores", "attention_probabilities"]
    for use in (True, False):
        _, caches = model.generate(prompt(), max_new_tokens=5, stop_at_eos=False, names_filter=names, use_kv_cache=use)
        joined = caches.cat()
        for layer in range(model.num_layers):
            scores, pattern = joined["attention_scores", layer], joined["attention_probabilities", layer]
            assert scores.isfinite().all()
            torch.testing.assert_close(scores.softmax(-1), pattern)


def saved(cache: KVCache) -> KVCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "copy": lambda cache: cache.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": saved,
}


@pytest.mark.unchecked
@pytest.mark.parametrize("way", COPIES)
@torch.no_grad()
def test_a_copied_cache_goes_on_by_itself(way: str, model: HookedTransformer) -> None:
    for mask in (torch.ones_like(MASK), MASK):
        first, cache = prompt()[:, :8], KVCache(model, 30)
        model(first, kv_cache=cache, attention_mask=mask[:, :8])
        branch = COPIES[way](cache)
        other = prompt(20)[:, :6]
        branched = model(other, kv_cache=branch)
        expected = model(torch.cat((first, other), 1), attention_mask=torch.cat((mask[:, :8], mask[:, -6:]), 1))
        torch.testing.assert_close(branched, expected[:, 8:], atol=1e-4, rtol=1e-4)
        went_on = model(prompt()[:, 8:], kv_cache=cache)  # the first one never heard of it
        torch.testing.assert_close(went_on, model(prompt(), attention_mask=mask)[:, 8:], atol=1e-4, rtol=1e-4)
        assert (len(cache), len(branch)) == (LENGTH, 14)


@torch.no_grad()
def test_an_expanded_cache_has_each_row_so_often(model: HookedTransformer) -> None:
    cache = KVCache(model)
    model(prompt()[:, :8], kv_cache=cache, attention_mask=MASK[:, :8])
    more = prompt(20, 6)[:, :5]
    wide = cache.expand(np.int64(3))
    logits = model(more, kv_cache=wide)
    tokens = torch.cat((prompt()[:, :8].repeat_interleave(3, 0), more), 1)
    mask = torch.cat((MASK[:, :8].repeat_interleave(3, 0), torch.ones(6, 5, dtype=torch.long)), 1)
    torch.testing.assert_close(logits, model(tokens, attention_mask=mask)[:, 8:], atol=1e-4, rtol=1e-4)
    assert (len(cache), cache.batch, wide.batch) == (8, 2, 6)
    empty = KVCache(model).expand(3)
    assert torch.equal(model(prompt(), kv_cache=empty), model(prompt(), kv_cache=KVCache(model)))
    with pytest.raises(ValueError, match="at least one row a row, not 0"):
        cache.expand(0)
    with pytest.raises(ValueError, match=r"the kv_cache holds 2 rows; the input has 6: kv_cache.expand\(n\)"):
        model(more, kv_cache=cache)


def test_a_copied_cache_stays_in_the_graph(checkpoints: Folders) -> None:
    """Gradients of two branches of one prompt are those of two whole passes; a saved one has left the graph."""
    model = HookedTransformer.from_pretrained(checkpoints(BASES[1]))
    ends = (prompt()[:, 8:], prompt(20)[:, :4])

    def gradient(branches: Callable[[], list[Tensor]]) -> Tensor:
        model.zero_grad()
        sum(logits.square().mean() for logits in branches()).backward()
        return model.embed_tokens.weight.grad.clone()

    def branched(way: Callable[[KVCache], KVCache]) -> list[Tensor]:
        cache = KVCache(model)
        model(prompt()[:, :8], kv_cache=cache)
        return [model(end, kv_cache=way(cache)) for end in ends]

    def whole() -> list[Tensor]:
        return [model(torch.cat((prompt()[:, :8], end), 1))[:, 8:] for end in ends]

    expected = gradient(whole)
    for way in (KVCache.copy, copy.deepcopy, lambda cache: cache.expand(1)):
        torch.testing.assert_close(gradient(lambda: branched(way)), expected, atol=1e-5, rtol=1e-3)  # noqa: B023
    for left, right in zip(branched(saved), whole(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_a_saved_cache_is_of_an_equal_model_only(checkpoints: Folders) -> None:
    model, again = (HookedTransformer.from_pretrained(checkpoints(BASES[1])) for _ in range(2))
    cache = KVCache(model)
    with torch.no_grad():
        model(prompt(), kv_cache=cache)
        assert again(prompt()[:, :1], kv_cache=saved(cache)).shape == (2, 1, VOCAB)
        for wrong, taken in ((again, cache), (again, cache.copy())):
            with pytest.raises(ValueError, match="the kv_cache is of another model"):
                wrong(prompt()[:, :1], kv_cache=taken)
        other = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
        with pytest.raises(ValueError, match="the kv_cache is of another model"):
            other(prompt()[:, :1], kv_cache=saved(cache))


def test_a_stream_begun_in_inference_mode_goes_on_outside(model: HookedTransformer) -> None:
    settings = {"max_new_tokens": 6, "stop_at_eos": False}
    expected = model.generate(prompt(), **settings)[:, LENGTH:]
    with torch.inference_mode():
        stream = model.stream(prompt(), **settings)
        written = [next(stream), next(stream)]
    written.append(next(stream))
    with torch.inference_mode():
        written.append(next(stream))
    written += stream
    assert torch.equal(torch.stack(written, 1), expected)
    with torch.inference_mode():
        cache = KVCache(model)
        model(prompt()[:, :6], kv_cache=cache)
    model.requires_grad_(False)
    torch.testing.assert_close(model(prompt()[:, 6:], kv_cache=cache), model(prompt())[:, 6:], atol=1e-4, rtol=1e-4)


# -- steering by row ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_positions_of_rows_are_each_rows_own(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[1]))
    vector, tokens = torch.randn(model.hidden_size), prompt(rows=3)
    _, clean = model.run_with_cache(tokens, names_filter="layer_output")
    cases: list[tuple[Any, Any, list[tuple[int, int]]]] = [
        (torch.tensor([[1], [10], [4]]), None, [(0, 1), (1, 10), (2, 4)]),
        ([1, 10, 4], None, [(0, 1), (1, 10), (2, 4)]),
        (torch.tensor([1, 10, -1]), None, [(0, 1), (1, 10), (2, 12)]),
        ([1, 10], [0, 2], [(0, 1), (2, 10)]),
        ([1, 10], torch.tensor([2, 0]), [(2, 1), (0, 10)]),
        ([1, 10], slice(0, 2), [(0, 1), (1, 10)]),
        (np.array([[1, 2], [10, 11]]), [0, -1], [(0, 1), (0, 2), (2, 10), (2, 11)]),
        ([[1], [10, 11], [4]], None, [(0, 1), (1, 10), (1, 11), (2, 4)]),
        ([[1, 10]], None, [(row, at) for row in range(3) for at in (1, 10)]),
        ([1, 10], 1, [(1, 1), (1, 10)]),
        (range(2), 1, [(1, 0), (1, 1)]),
        (-2, [0, 1], [(0, 11), (1, 11)]),
    ]
    for positions, rows, places in cases:
        with model.steer(1, vector, token_positions=positions, batch_index=rows):
            _, cache = model.run_with_cache(tokens, names_filter="layer_output")
        change = torch.zeros_like(clean["layer_output", 1])
        for place in places:
            change[place] = vector
        assert torch.equal(cache["layer_output", 1], clean["layer_output", 1] + change), (positions, rows)


def test_places_that_are_not_there_are_named(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[1]))
    vector = torch.randn(model.hidden_size)
    for where, said in (
        ({"token_positions": 13}, "token_positions 13 is out of range: the input has 13"),
        ({"token_positions": [[1], [-14]]}, "token_positions -14 is out of range: the input has 13"),
        ({"token_positions": slice(13, 20)}, r"token_positions slice\(13, 20, None\) is out of range"),
        ({"batch_index": 2}, "batch_index 2 is out of range: the input has 2"),
        ({"token_positions": [1, 2, 3]}, "token_positions are for 3 rows, and 2 are steered: give each row its own"),
        ({"token_positions": [[1], [2]], "batch_index": 0}, "token_positions are for 2 rows, and 1 are steered"),
    ):
        with model.steer(0, vector, **where), pytest.raises(ValueError, match=said):
            model(prompt())
    for wrong in (True, [0.5], torch.ones(2, LENGTH, dtype=torch.bool), []):
        with pytest.raises(TypeError, match=r"token_positions holds .*: give whole numbers"):
            with model.steer(0, vector, token_positions=wrong):
                pass


@pytest.mark.unchecked
@pytest.mark.parametrize("recipe", [WINDOW, *BASES], ids=lambda recipe: recipe.id)
@torch.no_grad()
def test_an_answer_with_holes_is_written_on_from(recipe: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe))
    ids, mask = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]]), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    first = model.generate({"input_ids": ids, "attention_mask": mask}, max_new_tokens=3, stop_at_eos=False)
    found = model.generate(first, max_new_tokens=8, stop_at_eos=False)[1, -8:]
    alone = model.generate(first[1][first.mask[1].bool()].tolist(), max_new_tokens=8, stop_at_eos=False)
    assert found.tolist() == alone[-8:]


@pytest.mark.parametrize("use_kv_cache", [True, False])
@torch.no_grad()
def test_steering_a_prompt_of_one_token_steers_the_prompt_alone(use_kv_cache: bool, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    vector, prompt, written = 3 * torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0)), 7, []

    def steered(stream: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.cat((stream[:, :1] + vector, stream[:, 1:]), dim=1)

    for _ in range(6):  # whole passes, by hand
        tokens = torch.tensor([[prompt, *written]])
        logits = model.run_with_hooks(tokens, fwd_hooks=[(("layer_output", 1), steered)])
        written.append(int(logits[0, -1].argmax()))
    with model.steer(1, vector, token_positions=0):
        found = model.generate(torch.tensor([[prompt]]), max_new_tokens=6, stop_at_eos=False, use_kv_cache=use_kv_cache)
    assert found[0, 1:].tolist() == written


def test_a_mask_of_other_rows_is_refused_beside_a_cache(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    with pytest.raises(ValueError, match="attention_mask has 1 rows; the input has 2"):
        model(prompt(), kv_cache=KVCache(model), attention_mask=torch.ones(1, 13))


def test_a_tokenizer_that_stop_strings_cannot_use_is_named(tmp_path: Path) -> None:
    make_checkpoint("phi", tmp_path)  # words, without what they are joined by
    model = HookedTransformer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot read the tokens of this tokenizer"):
        model.generate("the cat sat", max_new_tokens=2, stop_strings=["mat"])
