"""Every released config, whole, on the meta device: our tensors are those of the release, name by name.

Tiny checkpoints with weights are in test_loading.py, what people save in test_custom.py, the Hub in test_sources.py."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

import converters
from converters.checkpoint import LiveTensors
from converters.fill import HEAD, _plan, part_shape, turned
from converters.rules import Copy, written_by
from transformer_std import HookedTransformer

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
REFUSED = {  # and what the error says
    "Qwen--Qwen2.5-7B-Instruct-1M": "dual_chunk_attention_config",
    "facebook--opt-350m": "do_layer_norm_before",
}
NAMES = [path.stem for path in CONFIGS if path.stem not in REFUSED]


@dataclass(frozen=True)
class Sizes:
    """What the family's pages say, and `billions` of parameters, as the release is called (1.3 on phi-1's page, though
    it has 1.4)."""

    blocks: int
    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    mlp: int
    context: int
    window: int | None
    turned: int  # dimensions of each head that the rotary turns
    billions: float
    tied: bool = False
    experts: int | None = None
    top_k: int | None = None
    expert_mlp: int | None = None
    dense_first: int = 0


SIZES = {
    "microsoft--phi-1": Sizes(24, 2048, 32, 64, 32, 8192, 2048, None, 32, 1.4),
    "microsoft--phi-1_5": Sizes(24, 2048, 32, 64, 32, 8192, 2048, None, 32, 1.4),
    "microsoft--phi-2": Sizes(32, 2560, 32, 80, 32, 10240, 2048, None, 32, 2.8),
    "microsoft--Phi-3-mini-4k-instruct": Sizes(32, 3072, 32, 96, 32, 8192, 4096, 2047, 96, 3.8),
    "microsoft--Phi-3-mini-128k-instruct": Sizes(32, 3072, 32, 96, 32, 8192, 131072, 262144, 96, 3.8),
    "microsoft--Phi-3.5-mini-instruct": Sizes(32, 3072, 32, 96, 32, 8192, 131072, 262144, 96, 3.8),
    "microsoft--Phi-3-medium-4k-instruct": Sizes(40, 5120, 40, 128, 10, 17920, 4096, 2047, 128, 14.0),
    "microsoft--Phi-3-medium-128k-instruct": Sizes(40, 5120, 40, 128, 10, 17920, 131072, 131072, 128, 14.0),
    "microsoft--Phi-4-mini-instruct": Sizes(32, 3072, 24, 128, 8, 8192, 131072, 262144, 96, 3.8, tied=True),
    "microsoft--Phi-4-mini-reasoning": Sizes(32, 3072, 24, 128, 8, 8192, 131072, 262144, 96, 3.8, tied=True),
    "microsoft--phi-4": Sizes(40, 5120, 40, 128, 10, 17920, 16384, None, 128, 14.7),
    "microsoft--Phi-4-reasoning": Sizes(40, 5120, 40, 128, 10, 17920, 32768, None, 128, 14.7),
    "microsoft--Phi-4-reasoning-plus": Sizes(40, 5120, 40, 128, 10, 17920, 32768, None, 128, 14.7),
    "microsoft--Phi-3.5-MoE-instruct": Sizes(
        32, 4096, 32, 128, 8, 6400, 131072, 131072, 128, 41.9, experts=16, top_k=2, expert_mlp=6400
    ),
    "microsoft--Phi-mini-MoE-instruct": Sizes(
        32, 4096, 32, 128, 8, 960, 4096, 2047, 128, 7.6, experts=16, top_k=2, expert_mlp=960
    ),
    "microsoft--Phi-tiny-MoE-instruct": Sizes(
        32, 4096, 16, 128, 4, 448, 4096, 2047, 128, 3.8, experts=16, top_k=2, expert_mlp=448
    ),
    "Qwen--Qwen1.5-MoE-A2.7B": Sizes(
        24, 2048, 16, 128, 16, 5632, 8192, None, 128, 14.3, experts=60, top_k=4, expert_mlp=1408
    ),
    "Qwen--Qwen1.5-MoE-A2.7B-Chat": Sizes(
        24, 2048, 16, 128, 16, 5632, 32768, None, 128, 14.3, experts=60, top_k=4, expert_mlp=1408
    ),
    "Qwen--Qwen2-57B-A14B": Sizes(
        28, 3584, 28, 128, 4, 18944, 131072, None, 128, 57.4, experts=64, top_k=8, expert_mlp=2560
    ),
    "Qwen--Qwen2-57B-A14B-Instruct": Sizes(
        28, 3584, 28, 128, 4, 18944, 32768, None, 128, 57.4, experts=64, top_k=8, expert_mlp=2560
    ),
    "arcee-ai--Trinity-Nano-Preview": Sizes(
        56, 1024, 8, 128, 2, 3072, 131072, 2048, 128, 6.1, experts=128, top_k=8, expert_mlp=256, dense_first=2
    ),
    "arcee-ai--Trinity-Nano-Base": Sizes(
        56, 1024, 8, 128, 2, 3072, 131072, 2048, 128, 6.1, experts=128, top_k=8, expert_mlp=256, dense_first=2
    ),
    "arcee-ai--Trinity-Mini": Sizes(
        32, 2048, 32, 128, 4, 6144, 131072, 2048, 128, 26.1, experts=128, top_k=8, expert_mlp=1024, dense_first=2
    ),
    "arcee-ai--Trinity-Large-Preview": Sizes(
        60, 3072, 48, 128, 8, 12288, 262144, 4096, 128, 398.6, experts=256, top_k=4, expert_mlp=3072, dense_first=6
    ),
    "arcee-ai--Trinity-Large-Base": Sizes(
        60, 3072, 48, 128, 8, 12288, 16384, 4096, 128, 398.6, experts=256, top_k=4, expert_mlp=3072, dense_first=6
    ),
}


def as_it_is(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())


QUANTISED = [name for name in NAMES if "quantization_config" in as_it_is(name)]


@functools.cache
def released(name: str) -> dict[str, Any]:
    """The config, of weights that were made plain where the release's are quantised."""
    values = as_it_is(name)
    values.pop("quantization_config", None)
    rope = values.get("rope_scaling") or {}
    if "long_factor" in rope and "short_factor" not in rope:  # nobody saw Phi-3-medium-128k's
        values["rope_scaling"] = {**rope, "short_factor": [1.0] * len(rope["long_factor"])}
    return values


def as_transformers_reads_it(values: dict[str, Any]) -> dict[str, Any]:
    """Phi-3-medium-128k calls its longrope `su`, which transformers does not know."""
    rope = values.get("rope_scaling") or {}
    return {**values, "rope_scaling": {**rope, "type": "longrope"}} if rope.get("type") == "su" else values


def cut(values: dict[str, Any]) -> dict[str, Any]:
    """The config with no more blocks than it takes to have one of each kind."""
    layers = converters.read_config(values).layers
    count = 1 + max(layers.index(layer) for layer in set(layers))
    spelled = getattr(converters.family_of(values), "SPELLED", {}).get("num_hidden_layers", "num_hidden_layers")
    kinds = {"layer_types": values["layer_types"][:count]} if values.get("layer_types") else {}
    return {**values, spelled: count, **kinds}


def theirs(name: str) -> transformers.PreTrainedModel:
    settings = as_transformers_reads_it(cut(released(name)))
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@functools.cache
def ours(name: str) -> HookedTransformer:
    with torch.device("meta"):
        return HookedTransformer(converters.read_config(cut(released(name))))


def on_disk(model: HookedTransformer) -> dict[str, list[int]]:
    """Names and shapes of a model of ours as the release's files have it."""
    rules, found = converters.family_of(model.config).WEIGHTS, {}
    for name, parameter in model.named_parameters():
        rule, numbers = written_by(rules, name)  # type: ignore[misc]
        for e in range(1 if isinstance(rule, Copy) else len(parameter)):
            for source in rule.sources:
                *stacked, out, width = [1, *part_shape(list(parameter.shape), rule)]
                shape = [*stacked, width, out] if getattr(rule, "transposed", False) else [*stacked, out, width]
                found[source.format(**numbers, e=e)] = shape[1:]
    return found


def test_there_is_a_config_of_every_family() -> None:
    assert {released(name)["model_type"] for name in NAMES} == set(converters.families())


@pytest.mark.parametrize("name", NAMES)
def test_tensors(name: str) -> None:
    model, reference = ours(name), theirs(name)
    state = dict(reference.state_dict())
    if model.config.tied_head:
        del state[HEAD]  # as save_pretrained does
    saved = revert_weight_conversion(reference, state)
    assert on_disk(model) == {each: list(tensor.shape) for each, tensor in saved.items()}
    held = {parameter.numel() for parameter in (model.embed_tokens.weight, reference.get_input_embeddings().weight)}
    assert held == {released(name).get("vocab_size", model.vocab_size) * model.hidden_size}
    rules = converters.family_of(model.config).WEIGHTS
    _, problems = _plan(model, turned(LiveTensors(saved), rules), rules, model.config.tied_head)
    assert problems == []
    assert sum(each.numel() for each in model.parameters()) == sum(each.numel() for each in saved.values())


@pytest.mark.parametrize("name", NAMES)
def test_config_is_read_as_transformers_reads_it(name: str) -> None:
    """Our reading of the released file is our reading of what transformers makes of it, in today's spelling."""
    settings = as_transformers_reads_it(released(name))
    kind = settings["model_type"]
    today = transformers.AutoConfig.for_model(kind, **{k: v for k, v in settings.items() if k != "model_type"})
    assert converters.read_config(today.to_dict()) == converters.read_config(released(name))


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    with torch.device("meta"):
        model, sizes = HookedTransformer(converters.read_config(released(name))), SIZES[name]
    attention, mlp, last = model.config.layers[0].attention, model.config.layers[-1].mlp, model.layers[-1].mlp
    mixture = hasattr(mlp, "num_experts")
    windows = {each.attention.window for each in model.config.layers}
    assert sizes == Sizes(
        blocks=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        head_dim=model.head_dim,
        kv_heads=model.num_kv_heads,
        mlp=model.intermediate_size,
        context=model.config.max_length,
        window=attention.window,
        turned=attention.rotary.dims,
        billions=round(sum(each.numel() for each in model.parameters()) / 1e9, 1),
        tied=model.config.tied_head,
        experts=last.num_experts if mixture else None,
        top_k=last.top_k if mixture else None,
        expert_mlp=last.intermediate_size if mixture else None,
        dense_first=[hasattr(each.mlp, "num_experts") for each in model.config.layers].index(True) if mixture else 0,
    )
    if "Trinity" in name:
        full = [i for i, each in enumerate(model.config.layers) if each.attention.window is None]
        assert full == list(range(3, sizes.blocks, 4))
    else:
        assert windows == {sizes.window}


@pytest.mark.parametrize("kind", ["phi3small", "phi4flash"])
def test_other_architectures_of_a_family_name(kind: str) -> None:
    values = {**released("microsoft--Phi-3-mini-4k-instruct"), "model_type": kind}
    with pytest.raises(converters.ConfigError, match=f"model_type is '{kind}'.*supported are"):
        converters.read_config(values)


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_compute_is_refused_by_name(name: str) -> None:
    with pytest.raises(converters.ConfigError, match=REFUSED[name]):
        converters.read_config(released(name))


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_release_is_refused_by_name(name: str) -> None:
    method = as_it_is(name)["quantization_config"]["quant_method"]
    with pytest.raises(converters.ConfigError, match=rf"this checkpoint is quantised \({method}\)"):
        converters.read_config(as_it_is(name))
