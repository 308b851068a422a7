"""Arithmetic that is never silently other: the same bits under autocast and in float64, whatever ran before; and a
forward that asks the device for no number."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import BASES, LENGTH, RECIPES, VOCAB, Recipe, edit_config, load_reference, prompt
from transformer_std import HookedTransformer
from transformer_std.components import mixture as mixtures
from transformer_std.components import tracing
from transformer_std.components.reuse import filled, plus, tanh, times
from transformer_std.config import Mixture, SigmoidTopK, SoftmaxTopK, SparseMixer
from transformer_std.kv_cache import KVCache

Folders = Callable[[Recipe], Path]
MIXTURES = [base for base in BASES if base.family in ("phimoe", "qwen2_moe", "afmoe")]
LONGROPE = next(recipe for recipe in RECIPES if recipe.id == "phi3-longrope")

every_family = pytest.mark.parametrize("base", BASES, ids=lambda base: base.id)
every_mixture = pytest.mark.parametrize("base", MIXTURES, ids=lambda base: base.id)


def named(recipe: str) -> Recipe:
    return next(each for each in RECIPES if each.id == recipe)


# -- nothing that ran before is heard of again ---------------------------------------------------------------------


def exported(model: HookedTransformer, tokens: Tensor) -> None:
    torch.export.export(model, (tokens,), strict=False)


def faked(model: HookedTransformer, tokens: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(tokens))


def faked_without_a_fake_input(model: HookedTransformer, tokens: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(tokens)
        model(tokens, attention_mask=torch.ones_like(tokens))


def traced_fake(model: HookedTransformer, tokens: Tensor) -> None:
    weights = {name: each.detach() for name, each in model.named_parameters()}
    make_fx(lambda held, each: torch.func.functional_call(model, held, (each,)), tracing_mode="fake")(weights, tokens)


def traced_real(model: HookedTransformer, tokens: Tensor) -> None:
    make_fx(model)(tokens)


def traced_with_a_mask(model: HookedTransformer, tokens: Tensor) -> None:
    make_fx(lambda tokens, mask: model(tokens, attention_mask=mask))(tokens, torch.ones_like(tokens))


def on_meta(model: HookedTransformer, tokens: Tensor) -> None:
    with torch.device("meta"):
        model(tokens)
        HookedTransformer(model.config)(tokens)


def without_autograd(model: HookedTransformer, tokens: Tensor) -> None:
    with torch.inference_mode():
        model(tokens)
        model(tokens, attention_mask=left_padded(tokens))


def batched(model: HookedTransformer, tokens: Tensor) -> None:
    torch.func.vmap(model)(tokens[:, None])


def differentiated(model: HookedTransformer, tokens: Tensor) -> None:
    weights = {name: each.detach() for name, each in model.named_parameters()}
    torch.func.grad(lambda held: torch.func.functional_call(model, held, (tokens,)).sum())(weights)


def under(dtype: torch.dtype) -> Callable[[HookedTransformer, Tensor], None]:
    def run(model: HookedTransformer, tokens: Tensor) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model(tokens)
        finally:
            torch.set_default_dtype(before)

    run.__name__ = f"default_{dtype}"
    return run


def under_autocast(model: HookedTransformer, tokens: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)


def with_strange_tensors(model: HookedTransformer, tokens: Tensor) -> None:
    class Strange(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2 if func is torch.Tensor.cos else func(*args, **(kwargs or {}))

    with Strange():
        model(tokens)


WAYS = [
    exported, faked, faked_without_a_fake_input, traced_fake, traced_real, traced_with_a_mask, on_meta, without_autograd,
    batched, differentiated, under(torch.float64), under(torch.bfloat16), under_autocast,
    with_strange_tensors,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WAYS)), ids=lambda number: WAYS[number].__name__)
@pytest.mark.parametrize("recipe", [LONGROPE, named("phimoe-base")], ids=lambda recipe: recipe.id)
def test_what_ran_before_leaves_no_trace(own_copy: Folders, recipe: Recipe, number: int) -> None:
    """After each way to run a model that has no numbers, or others, the model and fresh loads of it are as ever. With
    a rotary of its own, so that nothing that is kept of it was made before."""
    folder = own_copy(recipe)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_config(folder, rope_parameters={**rope, "rope_theta": 5000.0 + number})
    model, tokens = HookedTransformer.from_pretrained(folder), prompt()
    WAYS[number](model, tokens)
    reference = load_reference(folder, attn="sdpa")
    for each in (model, HookedTransformer.from_pretrained(folder)):
        for length in (LENGTH, 7):
            logits = each(tokens[:, :length])
            assert type(logits) is Tensor
            assert torch.equal(logits, reference(tokens[:, :length]).logits)
        cache = KVCache(each)
        each(tokens[:, :5], kv_cache=cache)
        torch.testing.assert_close(each(tokens[:, 5:], kv_cache=cache), reference(tokens).logits[:, 5:])
        each(tokens, return_type="loss").backward()
        assert type(each.generate(tokens, max_new_tokens=2)) is Tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_default_dtype_changes_no_bit(checkpoints: Folders, dtype: torch.dtype) -> None:
    for recipe in (*BASES, named("phimoe-longrope")):  # whose two scales are told apart in the forward
        tokens = prompt(max(recipe.lengths))
        reference = load_reference(checkpoints(recipe), attn="sdpa")
        expected = reference(tokens).logits
        model = HookedTransformer.from_pretrained(checkpoints(recipe))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            logits = model(tokens)
        finally:
            torch.set_default_dtype(before)
        assert torch.equal(logits, expected), recipe.id


def left_padded(tokens: Tensor, by: int = 3) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :by] = 0
    return mask
