"""What a user's checker knows of the front door. mypy reads this file; nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

from torch import Tensor

from transformer_std import ActivationCache, HookedTransformer, Sweep
from transformer_std.components.attention import Attention
from transformer_std.components.latent import LatentAttention
from transformer_std.hooks.hook_point import HookPoint


def scaled(value: Tensor, hook: HookPoint) -> Tensor:
    return value * 2


def looked_at(value: Tensor, hook: HookPoint) -> None:
    print(hook.name, value.shape)


def runs(model: HookedTransformer, tokens: Tensor) -> None:
    assert_type(model(tokens), Tensor)
    assert_type(model(["two", "texts"], return_type="loss", attention_mask=None), Tensor)
    assert_type(model("text", return_type="both"), tuple[Tensor, Tensor])
    assert_type(model([[1, 2]], stop_at_layer=2), Tensor)
    model(tokens, attention_masks=tokens)  # type: ignore[call-overload]  # a misspelt argument is found
    model(3.5)  # type: ignore[call-overload]  # no input

    logits, cache = model.run_with_cache(tokens, names_filter=["layer_input", ("mlp_output", 1)])
    assert_type(logits, Tensor)
    assert_type(cache, ActivationCache)
    assert_type(cache["layer_input", 0], Tensor)
    assert_type(model.run_with_cache(tokens, return_type="both")[0], tuple[Tensor, Tensor])

    assert_type(model.run_with_hooks(tokens, fwd_hooks=[(lambda name: "mlp" in name, scaled)]), Tensor)
    assert_type(model.run_with_hooks(tokens, fwd_hooks=[(("mlp_output", 1), looked_at)]), Tensor)
    with model.hooks(fwd_hooks=[("layer_output", scaled)]) as hooked:
        hooked(tokens)


def parts(model: HookedTransformer) -> None:
    assert_type(model.layers[0].self_attn, Attention | LatentAttention)
    assert_type(model.layers[0].self_attn.W_O, Tensor)
    assert_type([block.self_attn.cfg.num_heads for block in model.layers], list[int])
    assert_type(model.tokenizer.eos_token_id, Any)


def analyses(model: HookedTransformer, tokens: Tensor) -> None:
    found = model.activation_patching(tokens, tokens, "layer_input", lambda logits: logits[0, -1, 3] - logits[0, -1, 4])
    assert_type(found, Sweep)
