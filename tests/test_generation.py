"""Generation against transformers' own, and hooks on every step of it."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from converters.demo import make_checkpoint
from tests.test_families import both
from tests.tiny import BASES, BOUNDARY, LENGTH, RECIPES, VOCAB, Recipe, build, edit_config, prompt
from transformer_std import HookedTransformer, KVCache

Folders = Callable[[Recipe], Path]
NAMED = {recipe.id: recipe for recipe in RECIPES}
NEW = 12  # across every window and boundary of the recipes
MASK = torch.tensor([[0] * 4 + [1] * (LENGTH - 4), [1] * LENGTH])


@pytest.fixture(params=BASES, ids=lambda base: base.id)
def model(request: pytest.FixtureRequest, checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(request.param))


def theirs(reference: Any, tokens: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    return reference.model.generate(
        tokens, attention_mask=mask, **{"max_new_tokens": NEW, "do_sample": False, **settings}
    )


# -- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_greedy_is_transformers(recipe: Recipe, attn: str, checkpoints: Folders) -> None:
    """Every variant: padded and not, across windows and longrope's boundary, with the cache and without."""
    model, reference = both(checkpoints(recipe), attn)
    for mask in (None, MASK):
        expected = theirs(reference, prompt(), mask)
        assert torch.equal(model.generate(prompt(), max_new_tokens=NEW, attention_mask=mask), expected)
        plain = model.generate(prompt(), max_new_tokens=NEW, attention_mask=mask, use_kv_cache=False)
        assert torch.equal(plain, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_greedy_in_half_precision(dtype: torch.dtype, checkpoints: Folders) -> None:
    for base in BASES:
        model, reference = both(checkpoints(base), "sdpa", dtype)
        ours = model.generate(prompt(), max_new_tokens=NEW, attention_mask=MASK)
        assert torch.equal(ours, theirs(reference, prompt(), MASK)), base.id


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
def test_end_tokens(own_copy: Folders) -> None:
    """From the checkpoint's generation config, a list too; a finished row is padded, and all finished ends it."""
    whole = torch.ones_like(prompt())  # the pad id in it is a token
    for base in BASES:
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


def test_stream(model: HookedTransformer) -> None:
    expected = model.generate(prompt(), max_new_tokens=NEW, stop_at_eos=False)
    stream = model.stream(prompt(), max_new_tokens=NEW, stop_at_eos=False)
    first = next(stream)
    assert torch.equal(first, expected[:, LENGTH])
    assert torch.equal(torch.stack([first, *stream], 1), expected[:, LENGTH:])
    assert model.generate(prompt(), max_new_tokens=2, progress=True).shape == (2, LENGTH + 2)


# -- the cache ---------------------------------------------------------------------------------------------------


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
        torch.testing.assert_close(logits, whole[:, read:end], atol=1e-4, rtol=1e-4)
        read = end
    assert len(ours) == LENGTH
    assert (ours.mask is None) != padded


@torch.no_grad()
def test_stepping_past_longropes_boundary_keeps_the_keys(checkpoints: Folders) -> None:
    """A step by hand turns the new query and key by the long factors; generate reads the text again (seeds, phi3)."""
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


@torch.no_grad()
def test_a_cache_grows_by_chunks(model: HookedTransformer) -> None:
    cache = KVCache(model)
    layer = (
        next(each for each in cache.layers if each.window is None)
        if any(each.window is None for each in cache.layers)
        else cache.layers[0]
    )
    rooms = set()
    for token in range(200):
        model(prompt()[:, token % LENGTH][:, None], kv_cache=cache)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_on_many_prompts(dtype: torch.dtype, checkpoints: Folders) -> None:
    """A head with a bias rounds otherwise on one row than on many: both libraries give it the last position alone."""
    for base in BASES:
        model, reference = both(checkpoints(base), "sdpa", dtype)
        for seed in range(12):
            tokens = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(100 + seed))
            ours = model.generate(tokens, max_new_tokens=6)
            assert torch.equal(ours, theirs(reference, tokens, max_new_tokens=6)), (base.id, seed)


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
def test_a_hook_on_the_mask_of_every_step(checkpoints: Callable[[Recipe], Path]) -> None:
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
