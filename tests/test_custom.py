"""Checkpoints that people save: fine-tunes, resized vocabularies, wrapped and headless models, mixed dtypes, adapters.

transformers loads each of them too, and is asked what the logits are. Bad files are in test_loading.py, the Hub and
single files in test_sources.py, the released configs in test_released.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import converters
from converters.rules import Ignore
from tests.tiny import (
    BASES,
    NAMED,
    STRUCTURES,
    VOCAB,
    Folders,
    Recipe,
    as_released,
    edit_config,
    family_of,
    hf_config,
    load_reference,
    prompt,
    refused,
    released,
    tensors_of,
    write_tensors,
)
from transformer_std import HookedTransformer

TIED = [recipe for recipe in STRUCTURES if hf_config(recipe).tie_word_embeddings]
TIED_IDS = [recipe.id for recipe in TIED]
UNTIED = [recipe for recipe in BASES if recipe not in TIED]
BIASED_HEADS = ["phi-tied"]  # nothing ties the bias


def rename(folder: Path, new_name: Callable[[str], str | None]) -> None:
    """None leaves the tensor out."""
    renamed = {new_name(name): tensor for name, tensor in tensors_of(folder).items()}
    write_tensors(folder, {name: tensor for name, tensor in renamed.items() if name is not None})


def same_weights(model: HookedTransformer, folder: Path) -> None:
    """As the untouched checkpoint's: the names differed, not the tensors."""
    expected = HookedTransformer.from_pretrained(folder).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@torch.no_grad()
def test_a_fine_tune(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    """A step of training and a larger vocabulary, saved by transformers, in today's spelling and in the last one."""
    theirs = load_reference(checkpoints(base), attn="sdpa").train()
    with torch.enable_grad():
        theirs(prompt(), labels=prompt()).loss.backward()
    for parameter in theirs.parameters():
        if parameter.grad is not None:
            parameter -= 0.01 * parameter.grad
    theirs.resize_token_embeddings(VOCAB + 9)
    theirs.save_pretrained(tmp_path)
    tokens = torch.cat([prompt(), torch.tensor([[VOCAB + 8], [VOCAB]])], dim=1)
    for respell in (lambda folder: None, as_released, lambda folder: edit_config(folder, torch_dtype=None)):
        respell(tmp_path)
        model = HookedTransformer.from_pretrained(tmp_path)
        assert model.vocab_size == VOCAB + 9
        assert torch.equal(model(tokens), load_reference(tmp_path, attn="sdpa")(tokens).logits)


def test_what_is_recomputed_may_be_in_the_file(family: Recipe, own_copy: Folders, checkpoints: Folders) -> None:
    folder = own_copy(family)
    needless = [rule.theirs for rule in family_of(family).WEIGHTS if isinstance(rule, Ignore)]
    names = {name.format(i=i) for name in needless for i in range(3)}
    write_tensors(folder, {**tensors_of(folder), **{name: torch.ones(8) for name in names}})
    same_weights(HookedTransformer.from_pretrained(folder), checkpoints(family))
    rename(folder, lambda name: f"{name}.again" if name in names else name)
    if names:
        refused(folder, rf"left over: {re.escape(min(names))}.again \[8\]")


@pytest.mark.parametrize("recipe_id", [*(recipe.id for recipe in BASES), *TIED_IDS])
@pytest.mark.parametrize("wrapper", ["base_model.model.", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrapped_model(recipe_id: str, wrapper: str, own_copy: Folders, checkpoints: Folders) -> None:
    folder = own_copy(NAMED[recipe_id])
    rename(folder, lambda name: f"{wrapper}{name}")
    same_weights(HookedTransformer.from_pretrained(folder), checkpoints(NAMED[recipe_id]))


def test_a_model_whose_blocks_were_compiled(own_copy: Folders, checkpoints: Folders) -> None:
    folder = own_copy(BASES[0])
    rename(folder, lambda name: name.replace(".self_attn.", ".self_attn._orig_mod."))
    same_weights(HookedTransformer.from_pretrained(folder), checkpoints(BASES[0]))
    whole = tensors_of(checkpoints(BASES[0]))
    write_tensors(folder, {**whole, "_orig_mod.lm_head.bias": whole["lm_head.bias"] + 1})
    refused(folder, r"twice: (_orig_mod.)?lm_head.bias and (_orig_mod.)?lm_head.bias are both lm_head.bias")


def test_without_the_prefix(family: Recipe, own_copy: Folders, checkpoints: Folders) -> None:
    folder = own_copy(family)
    prefix, _, embedding = released(family, "embed_tokens.weight").partition(".")
    rename(folder, lambda name: name.removeprefix(f"{prefix}."))
    same_weights(HookedTransformer.from_pretrained(folder), checkpoints(family))
    whole = tensors_of(folder)
    write_tensors(folder, {**whole, f"{prefix}.{embedding}": whole[embedding] + 1})
    refused(folder, rf"twice: ({prefix}.)?{embedding} and ({prefix}.)?{embedding} are both embed_tokens.weight")


@pytest.mark.parametrize("base", UNTIED, ids=lambda recipe: recipe.id)
def test_a_base_model_saved_alone(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    load_reference(checkpoints(base)).base_model.save_pretrained(tmp_path)
    embedding = released(base, "embed_tokens.weight").partition(".")[2]
    refused(tmp_path, r"missing: lm_head.weight(.|\n)*only the head is missing: this is a base model saved alone")
    whole = tensors_of(tmp_path)
    del whole[embedding]
    write_tensors(tmp_path, whole)
    with pytest.raises(converters.CheckpointError) as caught:
        HookedTransformer.from_pretrained(tmp_path)
    assert "only the head" not in str(caught.value)


@pytest.mark.parametrize("recipe_id", BIASED_HEADS)
def test_a_base_model_saved_without_its_heads_bias(recipe_id: str, checkpoints: Folders, tmp_path: Path) -> None:
    load_reference(checkpoints(NAMED[recipe_id])).base_model.save_pretrained(tmp_path)
    refused(tmp_path, "missing: lm_head.bias(.|\n)*only the head is missing")


@pytest.mark.parametrize("recipe_id", [each for each in TIED_IDS if each not in BIASED_HEADS])
@torch.no_grad()
def test_a_tied_base_model_saved_alone(recipe_id: str, checkpoints: Folders, tmp_path: Path) -> None:
    load_reference(checkpoints(NAMED[recipe_id])).base_model.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    same_weights(model, checkpoints(NAMED[recipe_id]))
    assert torch.equal(model(prompt()), load_reference(tmp_path, attn="sdpa")(prompt()).logits)


@pytest.mark.parametrize("recipe_id", TIED_IDS)
@torch.no_grad()
def test_a_tied_head_in_the_file(recipe_id: str, own_copy: Folders, checkpoints: Folders) -> None:
    folder = own_copy(NAMED[recipe_id])
    whole = tensors_of(folder)
    head, embedding = (released(NAMED[recipe_id], name) for name in ("lm_head.weight", "embed_tokens.weight"))
    assert head not in whole
    write_tensors(folder, {**whole, head: whole[embedding].clone()})
    model = HookedTransformer.from_pretrained(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    same_weights(model, checkpoints(NAMED[recipe_id]))
    rename(folder, lambda name: None if name == embedding else name)
    refused(folder, f"missing: {embedding}")


@torch.no_grad()
def test_mixed_dtypes(base: Recipe, own_copy: Folders) -> None:
    """The config's dtype for all, as in transformers; without one, that of the file's first tensor."""
    folder = own_copy(base)
    kinds = [torch.bfloat16, torch.float32, torch.float16]
    mixed = {name: t.to(kinds[i % 3]) for i, (name, t) in enumerate(sorted(tensors_of(folder).items()))}
    write_tensors(folder, mixed)
    for dtype in ("float16", None):
        edit_config(folder, dtype=dtype)
        theirs = load_reference(folder, "auto", "sdpa")
        model = HookedTransformer.from_pretrained(folder)
        assert model.embed_tokens.weight.dtype == theirs.get_input_embeddings().weight.dtype
        again = HookedTransformer.from_pretrained(theirs)
        for name, tensor in again.state_dict().items():
            assert model.state_dict()[name].dtype == tensor.dtype, name
            assert torch.equal(model.state_dict()[name], tensor), name
        assert torch.equal(again(prompt()), theirs(prompt()).logits)


def test_a_tensor_that_is_not_read_does_not_say_the_dtype(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    frequencies = {"model.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64)}
    write_tensors(folder, {**frequencies, **{name: t.half() for name, t in tensors_of(folder).items()}})
    edit_config(folder, dtype=None)
    assert {each.dtype for each in HookedTransformer.from_pretrained(folder).parameters()} == {torch.float16}


def test_adapters(base: Recipe, own_copy: Folders) -> None:
    folder = own_copy(base)
    whole = tensors_of(folder)
    projection = released(base, "layers.0.self_attn.o.weight")
    stem = projection.removesuffix(".weight")
    adapted = {f"base_model.model.{name}": tensor for name, tensor in whole.items() if name != projection}
    adapted[f"base_model.model.{stem}.base_layer.weight"] = whole[projection]
    adapted[f"base_model.model.{stem}.lora_A.default.weight"] = torch.ones(4, 96)
    write_tensors(folder, adapted)
    refused(folder, rf"missing: {re.escape(projection)}(.|\n)*adapter's tensors: merge it into its base model")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for enter in (converters.read_config, HookedTransformer.from_pretrained):
        with pytest.raises(converters.CheckpointError, match=r"holds an adapter of org/base .*merge it into its base"):
            enter(folder)
    (folder / "config.json").unlink()
    refused(folder, "holds an adapter of org/base")
