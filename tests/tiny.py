"""Tiny checkpoints of every family, made by transformers. Each recipe is one config; every width in it is another
number, so that no swapped or transposed tensor fits, and every parameter is moved off its initial value."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import converters
from converters.families import module_of
from converters.rules import released_as
from converters.tiny import shake
from converters.verification.reference import attention_there_is
from transformer_std import HookedTransformer

VOCAB = 131
LENGTH = 13  # of a prompt; longer than every window here


@dataclass(frozen=True)
class Recipe:
    """`lengths`: prompt lengths to compare at, where a boundary lies between them."""

    family: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    lengths: tuple[int, ...] = (LENGTH, 1)

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"


def factors(count: int, first: float, step: float) -> list[float]:
    return [first + step * i for i in range(count)]


def longrope(rotated: int, **settings: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors(rotated // 2, 1.0, 0.05),
        "long_factor": factors(rotated // 2, 1.5, 0.7),
        **settings,
    }


FULL, SLIDING = "full_attention", "sliding_attention"

WINDOW = {"use_sliding_window": True, "sliding_window": 5}

BOUNDARY = 16  # of longrope
AROUND = (BOUNDARY - 1, BOUNDARY, BOUNDARY + 1)
LONG_INSIDE = {"original_max_position_embeddings": BOUNDARY}
LONG = {"original_max_position_embeddings": BOUNDARY, "max_position_embeddings": 4 * BOUNDARY}

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 50000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}

RECIPES = [
    Recipe("phi", "base"),
    Recipe("phi", "grouped", {"num_key_value_heads": 2}),
    Recipe("phi", "qk_layernorm", {"qk_layernorm": True, "num_key_value_heads": 3}),
    Recipe("phi", "share_of_head", {"partial_rotary_factor": 0.4}),
    Recipe("phi", "whole_head", {"partial_rotary_factor": 1.0, "num_key_value_heads": 1}, (5, 8, LENGTH)),
    Recipe("phi", "tied", {"tie_word_embeddings": True}),
    Recipe("phi", "head_of_10", {"hidden_size": 60, "partial_rotary_factor": 0.4}),
    Recipe("phi3", "base"),
    Recipe("phi3", "ungrouped", {"num_key_value_heads": None}),
    Recipe("phi3", "window", {"sliding_window": 5, "num_key_value_heads": 1}, (4, 5, 6, LENGTH)),
    Recipe("phi3", "tied", {"tie_word_embeddings": True, "num_attention_heads": 12, "num_key_value_heads": 3}),
    Recipe("phi3", "longrope", {**LONG, "rope_parameters": longrope(16)}, AROUND),
    Recipe(
        "phi3", "longrope_partial",
        {**LONG, "rope_parameters": longrope(12, partial_rotary_factor=0.75), "sliding_window": 64}, AROUND,
    ),
    Recipe("phi3", "longrope_factor", {**LONG, "rope_parameters": longrope(16, factor=3.0)}, AROUND),
    Recipe("phimoe", "base"),
    Recipe("phimoe", "unbiased", {"attention_bias": False, "lm_head_bias": False, "router_jitter_noise": 0.01}),
    Recipe("phimoe", "tied", {"tie_word_embeddings": True, "num_key_value_heads": 6, "router_jitter_noise": 1.0}),
    Recipe(
        "phimoe", "head_dim_window", {"head_dim": 32, "sliding_window": 5, "num_key_value_heads": 1}, (4, 5, 6, LENGTH)
    ),
    Recipe(
        "phimoe", "longrope",
        {**LONG, "rope_parameters": longrope(16, short_mscale=1.243, long_mscale=1.5, **LONG_INSIDE)},
        AROUND,
    ),
    Recipe("qwen2_moe", "base"),
    Recipe("qwen2_moe", "normalized", {"norm_topk_prob": True, "qkv_bias": False, "num_key_value_heads": 6}),
    Recipe("qwen2_moe", "dense_first", {"mlp_only_layers": [0], "tie_word_embeddings": True}),
    Recipe("qwen2_moe", "dense_between", {"decoder_sparse_step": 2}),
    Recipe("qwen2_moe", "all_dense", {"num_experts": 0}),
    Recipe("qwen2_moe", "window", {**WINDOW, "max_window_layers": 1, "num_key_value_heads": 1}, (4, 5, 6, LENGTH)),
    Recipe("qwen2_moe", "layer_types", {**WINDOW, "layer_types": [FULL, SLIDING, SLIDING]}),
    Recipe("qwen2_moe", "top_1", {"num_experts_per_tok": 1}),
    Recipe("afmoe", "base"),
    Recipe("afmoe", "all_mixtures", {"num_dense_layers": 0, "num_shared_experts": 1, "mup_enabled": False}),
    Recipe("afmoe", "all_dense", {"num_dense_layers": 4, "num_key_value_heads": None}),
    Recipe("afmoe", "biased", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 16}),
    Recipe(
        "afmoe", "layer_types",
        {"layer_types": [FULL, SLIDING] * 2, "sliding_window": 3, "num_key_value_heads": 1}, (5, 8, LENGTH),
    ),
    Recipe("llama", "base"),
    Recipe("llama", "tied", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    Recipe("llama", "biased", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
    Recipe("llama", "mlp_bias", {"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    Recipe("llama", "llama3", {"rope_parameters": LLAMA3, "max_position_embeddings": 512}, (LENGTH, 70)),
    Recipe("llama", "head_dim", {"rope_parameters": LINEAR, "head_dim": 32, "tie_word_embeddings": True}),
    Recipe(
        "llama", "dynamic",
        {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}, "max_position_embeddings": BOUNDARY}, AROUND,
    ),
    Recipe("llama", "longrope", {**LONG, "rope_parameters": longrope(16)}, AROUND),
    Recipe("mistral", "base"),
    Recipe("mistral", "window", {"sliding_window": 5, "num_key_value_heads": 1, "head_dim": 32}, (4, 5, 6, LENGTH)),
    Recipe("qwen2", "base"),
    Recipe(
        "qwen2", "window",
        {**WINDOW, "max_window_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}, (4, 5, 6, LENGTH),
    ),
    Recipe("qwen2", "yarn", {"rope_parameters": YARN, "max_position_embeddings": 256}, (LENGTH, 70)),
    Recipe("qwen3", "base"),
    Recipe("qwen3", "tied_biased", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": None}),
    Recipe("qwen3", "layer_types", {**WINDOW, "layer_types": [FULL, SLIDING, SLIDING], "head_dim": 16}),
    Recipe(
        "qwen3", "yarn",
        {"rope_parameters": {**YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1},
         "max_position_embeddings": 256}, (LENGTH, 70),
    ),
    Recipe("olmo2", "base"),
    Recipe("olmo2", "biased_tied", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None}),
    Recipe("mixtral", "base"),
    Recipe(
        "mixtral", "window",
        {"sliding_window": 5, "num_key_value_heads": 1, "tie_word_embeddings": True}, (4, 5, 6, LENGTH),
    ),
    Recipe("olmoe", "base"),
    Recipe("olmoe", "normalized", {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": None}),
    Recipe("qwen3_moe", "base"),
    Recipe("qwen3_moe", "normalized", {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 6}),
    Recipe("qwen3_moe", "dense_between", {"decoder_sparse_step": 2, "head_dim": 16, "mlp_only_layers": [1]}),
    Recipe("qwen3_moe", "window", {**WINDOW, "norm_topk_prob": True, "num_key_value_heads": 1}, (4, 5, 6, LENGTH)),
    Recipe("gemma2", "base"),
    Recipe(
        "gemma2", "uncapped",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    Recipe(
        "gemma2", "biased",
        {"attention_bias": True, "num_key_value_heads": 6, "layer_types": [FULL, SLIDING, SLIDING]}, (5, 6, 7, LENGTH),
    ),
    Recipe("gemma3_text", "base"),
    Recipe(
        "gemma3_text", "biased",
        {"attention_bias": True, "num_key_value_heads": 6, "tie_word_embeddings": False}, (5, 6, 7, LENGTH),
    ),
    Recipe(
        "gemma3_text", "linear",
        {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
         "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24},
    ),
    Recipe("gpt_neox", "base"),
    Recipe("gpt_neox", "sequential", {"use_parallel_residual": False}),
    Recipe("gpt_neox", "unbiased_tied", {"attention_bias": False, "tie_word_embeddings": True}),
    Recipe("gpt_neox", "whole_head", {"rotary_pct": 1.0, "hidden_act": "gelu_fast"}, (5, 8, LENGTH)),
    Recipe("gpt2", "base"),
    Recipe("gpt2", "scaled", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}),
    Recipe(
        "gpt2", "untied",
        {"tie_word_embeddings": False, "scale_attn_weights": False, "n_inner": None}, (5, 8, LENGTH),
    ),
    Recipe("gptj", "base"),
    Recipe("gptj", "whole_head", {"rotary_dim": 16, "n_inner": None, "activation_function": "gelu"}, (5, 8, LENGTH)),
    Recipe("opt", "base"),
    Recipe(
        "opt", "unbiased_untied",
        {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}, (5, 8, LENGTH),
    ),
    Recipe("gpt_oss", "base", {"swiglu_limit": 0.5}, (5, 6, 7, LENGTH)),
    Recipe(
        "gpt_oss", "unbiased_tied",
        {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    Recipe(
        "gpt_oss", "layer_types",
        {"layer_types": [FULL, SLIDING, SLIDING], "rope_parameters": LINEAR, "swiglu_alpha": 1.3}, (5, 8, LENGTH),
    ),
    Recipe("deepseek_v3", "base"),
    Recipe(
        "deepseek_v3", "whole_queries",
        {"q_lora_rank": None, "tie_word_embeddings": True, "n_group": 1, "topk_group": 1},
    ),
    Recipe("deepseek_v3", "halves_biased", {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False}),
    Recipe(
        "deepseek_v3", "yarn",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}, "max_position_embeddings": 256},
        (LENGTH, 70),
    ),
    Recipe("deepseek_v3", "all_dense", {"first_k_dense_replace": 3}),
]  # fmt: skip
NAMED = {recipe.id: recipe for recipe in RECIPES}
ONE = Recipe("phi", "one", {"num_hidden_layers": 1})  # the smallest
FAMILIES = [recipe for recipe in RECIPES if recipe.name == "base"]  # one of each
# Of the machinery, every part is in one of these: what no family does in a way of its own is shown on them.
DIFFERENT = ("phi", "phi3", "phimoe", "qwen2_moe", "afmoe", "gpt2", "gemma2")
BASES = [recipe for recipe in FAMILIES if recipe.family in DIFFERENT]
MIXTURES = [NAMED[f"{family}-base"] for family in ("phimoe", "qwen2_moe", "afmoe", "gpt_oss", "deepseek_v3")]
# One of each structure: what is no matter of numbers is shown on these.
MORE = {
    "phi-qk_layernorm", "phi-tied", "phi3-window", "phi3-longrope", "phimoe-unbiased", "qwen2_moe-dense_first",
    "qwen2_moe-all_dense", "afmoe-biased", "olmo2-base", "gemma3_text-base", "gpt_neox-base", "gptj-base", "opt-base",
    "mixtral-base", "llama-biased", "gpt_oss-base", "deepseek_v3-base",
}  # fmt: skip
STRUCTURES = [recipe for recipe in RECIPES if recipe in BASES or recipe.id in MORE]

Folders = Callable[[Recipe], Path]  # the fixtures `checkpoints` and `own_copy`
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASK = torch.tensor([[0] * 4 + [1] * (LENGTH - 4), [1] * LENGTH])  # the first four positions of row 0 are padding


def family_of(recipe: Recipe) -> ModuleType:
    return module_of({"model_type": recipe.family})


def released(recipe: Recipe, ours: str) -> str:
    """What the family's files call a tensor of ours."""
    rule, numbers = released_as(family_of(recipe).WEIGHTS, ours)
    return rule.sources[0].format(**numbers, e=0)


def spelled(recipe: Recipe, key: str) -> str:
    """What the family's configs call `key`."""
    return getattr(family_of(recipe), "SPELLED", {}).get(key, key)


def hf_config(recipe: Recipe) -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = {"vocab_size": VOCAB, **special, **family_of(recipe).TINY, **recipe.settings}
    return transformers.AutoConfig.for_model(recipe.family, **settings)


def build(recipe: Recipe, folder: Path) -> Path:
    """Writes the recipe's checkpoint, in float32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(recipe))
    shake(model)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of a checkpoint's config; None takes a key out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def as_released(folder: Path) -> None:
    """Rewrites a checkpoint's config as transformers 4 spelled it, the way the released files are."""
    config = json.loads((folder / "config.json").read_text())
    if not (rope := config.get("rope_parameters")) or "rope_theta" not in rope:  # none, or one for each kind of block
        edit_config(folder, dtype=None, torch_dtype=config["dtype"])
        return
    theta, partial, kind = (rope.pop(key, None) for key in ("rope_theta", "partial_rotary_factor", "rope_type"))
    if config["model_type"] == "phi3":  # its files have it at the top level
        rope.pop("original_max_position_embeddings", None)
    edit_config(
        folder,
        rope_parameters=None,
        rope_theta=theta,
        partial_rotary_factor=partial,
        rope_scaling=None if kind == "default" else {"type": kind, **rope},
        dtype=None,
        torch_dtype=config["dtype"],
    )


def load_reference(folder: Path, dtype: torch.dtype | str = torch.float32, attn: str = "eager") -> Any:
    attn = attention_there_is(converters.read_config(folder), attn)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn).eval()


@functools.cache
def prompt(length: int = LENGTH, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))


def clean() -> torch.Tensor:
    return prompt()[:1]


def corrupted() -> torch.Tensor:
    return prompt()[1:2]


def score(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 3] - logits[0, -1, 5]


def left_padded(length: int = LENGTH, pads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, a mask that covers the first `pads` of row 0, and the positions that the mask makes."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :pads] = 0
    return prompt(length), mask, (mask.cumsum(-1) - 1).clamp(min=0)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, message: str) -> None:
    with pytest.raises(converters.CheckpointError, match=message):
        HookedTransformer.from_pretrained(folder)
