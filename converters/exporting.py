"""Writing a model as the release it came from has it: a folder that transformers loads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from converters.families import module_of
from converters.hf_config import ConfigError
from converters.progress import progress
from converters.rules import Copy, Rule, released_as
from transformer_std import saving, whole
from transformer_std.transformer import Transformer


def export(model: Transformer, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Writes a model that came from a release back as one: `config.json`, safetensors, and the tokenizer if it has one.

    A new folder appears when it is whole. One that is there and empty is kept, and filled from within; `config.json`,
    without which it is no checkpoint, comes last. An export that fails or is killed leaves no checkpoint, and what it
    left is removed by the next one. Of two exports into one folder one is refused.

    Args:
        model: of a known family; its weights may have changed, in value and in dtype, but not in shape.
        folder: a new or empty folder.
        max_shard_size: in bytes, or as "5GB".

    Raises:
        ConfigError: the model was not made from a release's config, or its weights are not plain tensors as its config
            describes them (adapters, parametrisations, shards).
        FileExistsError: something is in `folder`.
        RuntimeError: weights that are not in memory.
    """
    if (origin := model.config.origin) is None:
        raise ConfigError(
            "this model was made from a config of ours alone, so there is no release to write it as: save_pretrained() "
            "it, or build it from converters.read_config(...)"
        )
    rules = module_of(model.config).WEIGHTS
    model.check_in_memory()
    if problem := saving.unlike_its_config(model):
        raise ConfigError(problem)
    with whole.whole(folder, _refuse_used, functools.partial(whole.move_all, last="config.json")) as written:
        _write_tensors(dict(released(model, rules)), written, max_shard_size)
        whole.write_json(written / "config.json", released_config(model))
        if origin.generation:
            whole.write_json(written / "generation_config.json", origin.generation)
        saving.write_tokenizer(model, written)


def _refuse_used(folder: Path) -> None:
    if whole.in_use(folder):
        raise FileExistsError(f"{folder} is not empty: export to a new folder")


def released(model: Transformer, rules: list[Rule]) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors by the names and in the pieces of the released files, as views; a tied head is left out."""
    for name, weight in saving.weights(model).items():
        rule, numbers = released_as(rules, name)
        if isinstance(rule, Copy):
            yield rule.theirs.format(**numbers), weight.mT if rule.transposed else weight
            continue
        for e, expert in enumerate(weight):
            for source, part in zip(rule.sources, expert.chunk(len(rule.sources)), strict=True):
                yield source.format(**numbers, e=e), part


def released_config(model: Transformer) -> dict[str, Any]:
    """The release's own config, with what may have changed since: the weights' dtype and whether the head is tied."""
    assert model.config.origin is not None
    family = module_of(model.config)
    config = dict(getattr(family, "spelled_for_transformers", dict)(model.config.origin.config))
    config.pop("auto_map", None)  # names files of code that are not in the folder
    config["architectures"] = [family.ARCHITECTURES[-1]]
    now = saving.config_now(model)
    spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(spelled, now.dtype), "tie_word_embeddings": now.tied_head}


def _write_tensors(tensors: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    # By bytes alone: the experts are views of one tensor, which need not stay in one file.
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    shards = plan.filename_to_tensors
    for file in progress(shards, plan.metadata["total_size"], "exporting"):
        save_file(saving.apart({name: tensors[name] for name in shards[file]}), folder / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        whole.write_json(folder / "model.safetensors.index.json", index)
