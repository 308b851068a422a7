"""TransformerLens' names of our values, for habits and scripts that have them.

Where TransformerLens has positions before heads ([batch pos head d_head]: queries, keys, values), a hook or look-up by
its name speaks its order of axes; every other value has one order in both.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from einops import rearrange
from torch import Tensor

from transformer_std.hooks.hook_point import HookFn, HookPoint

NAMES = {
    "hook_embed": "token_embeddings",
    "hook_pos_embed": "position_embeddings",
    "blocks.{i}.hook_resid_pre": "layers.{i}.layer_input",
    "blocks.{i}.ln1.hook_scale": "layers.{i}.attention_norm_scale",
    "blocks.{i}.ln1.hook_normalized": "layers.{i}.attention_norm_output",
    "blocks.{i}.attn.hook_q": "layers.{i}.self_attn.attention_queries_before_rotary",
    "blocks.{i}.attn.hook_k": "layers.{i}.self_attn.attention_keys_before_rotary",
    "blocks.{i}.attn.hook_v": "layers.{i}.self_attn.attention_values",
    "blocks.{i}.attn.hook_rot_q": "layers.{i}.self_attn.attention_queries",
    "blocks.{i}.attn.hook_rot_k": "layers.{i}.self_attn.attention_keys",
    "blocks.{i}.attn.hook_attn_scores": "layers.{i}.self_attn.attention_scores",
    "blocks.{i}.attn.hook_pattern": "layers.{i}.self_attn.attention_probabilities",
    "blocks.{i}.attn.hook_z": "layers.{i}.self_attn.attention_premix",
    "blocks.{i}.attn.hook_result": "layers.{i}.self_attn.attention_result",
    "blocks.{i}.hook_attn_out": "layers.{i}.self_attn.attention_output",
    "blocks.{i}.hook_resid_mid": "layers.{i}.layer_mid",
    "blocks.{i}.ln2.hook_scale": "layers.{i}.mlp_norm_scale",
    "blocks.{i}.ln2.hook_normalized": "layers.{i}.mlp_norm_output",
    "blocks.{i}.mlp.hook_pre": "layers.{i}.mlp.mlp_preactivation",
    "blocks.{i}.mlp.hook_pre_linear": "layers.{i}.mlp.mlp_up",
    "blocks.{i}.mlp.hook_post": "layers.{i}.mlp.mlp_neurons",
    "blocks.{i}.mlp.hook_expert_weights": "layers.{i}.mlp.expert_weights",
    "blocks.{i}.mlp.hook_expert_indices": "layers.{i}.mlp.expert_indices",
    "blocks.{i}.hook_mlp_out": "layers.{i}.mlp.mlp_output",
    "blocks.{i}.hook_resid_post": "layers.{i}.layer_output",
    "ln_final.hook_scale": "final_norm_scale",
    "ln_final.hook_normalized": "final_norm_output",
}
# What TransformerLens' get_act_name takes: the last part, without hook_.
SHORT = {their.rpartition("hook_")[2]: ours.rpartition(".")[2] for their, ours in NAMES.items() if "ln" not in their}
POSITIONS_FIRST = {"attention_queries", "attention_keys", "attention_values"} | {
    f"attention_{each}_before_rotary" for each in ("queries", "keys")
}


def translate(name: str) -> str | None:
    """Our name for a TransformerLens name, with a block's index or any pattern in its place; None where it is none."""
    found = re.fullmatch(r"blocks\.([^.]+)\.(.+)", name)
    block, template = (found[1], f"blocks.{{i}}.{found[2]}") if found else ("", name)
    return NAMES[template].format(i=block) if template in NAMES else None


def name_of(name: str) -> str | None:
    """TransformerLens' name for a full name of ours; None where it has none."""
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    template = f"layers.{{i}}.{found[2]}" if found else name
    theirs = next((theirs for theirs, ours in NAMES.items() if ours == template), None)
    return theirs and theirs.format(i=found[1] if found else "")


def positions_first(value: str) -> bool:
    """Whether TransformerLens has this value of ours as [batch pos head d_head]."""
    return value in POSITIONS_FIRST


# TransformerLens' names of axes, and what they can be here.
AXES = {
    "pos": ("seq", "query"),
    "dest_pos": ("query", "seq"),
    "src_pos": ("key",),
    "head": ("num_heads", "num_kv_heads"),
    "head_index": ("num_heads", "num_kv_heads"),
}


def axis(name: str, names: list[str]) -> str:
    """The axis among `names` that `name` means; `name` itself where none is."""
    return next((each for each in AXES.get(name, ()) if each in names), name)


class TheirPoint:
    """A hook point as TransformerLens' scripts know it: under its name there, and with `layer()`."""

    def __init__(self, point: HookPoint, name: str):
        self._point, self.name = point, name

    def layer(self) -> int | None:
        return self._point.layer

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_point"), name)


def spoken(fn: HookFn, point: HookPoint, name: str, positions_first: bool) -> HookFn:
    """`fn` as it is called at `point`: it hears `name` from its hook, and sees [batch seq head dim] where
    `positions_first`."""
    there: Any = TheirPoint(point, name)
    return functools.partial(_call, fn, there, positions_first)


def _call(fn: HookFn, point: Any, positions_first: bool, value: Tensor, hook: HookPoint) -> Any:
    if not positions_first:
        return fn(value, point)
    seen = rearrange(value, "batch head seq dim -> batch seq head dim")
    new = fn(seen, point)
    if not isinstance(new, Tensor) or new.ndim != 4:
        return new
    return None if new is seen else rearrange(new, "batch seq head dim -> batch head seq dim")
