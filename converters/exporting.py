"""Writing a model as the release it came from has it: a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import converters
from converters.hf_config import ConfigError
from converters.progress import progress
from converters.rules import Copy, Rule, written_by
from transformer_std.model import HookedTransformer


def export(model: HookedTransformer, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Writes a model that came from a release back as one: `config.json`, safetensors, and the tokenizer if it has one.

    The folder appears when it is whole; an export that fails or is interrupted leaves none.

    Args:
        model: of a known family; its weights may have changed, in value and in dtype, but not in shape.
        folder: a new or empty folder.
        max_shard_size: in bytes, or as "5GB".

    Raises:
        ConfigError: the model was not made from a release's config, or is no longer what its config says.
        FileExistsError: something is in `folder`.
    """
    rules = converters.family_of(model.config).WEIGHTS if model.config.origin else None
    if rules is None:
        raise ConfigError(
            "this model was made from a config of ours alone, so there is no release to write it as: save_pretrained() "
            "it, or build it from converters.read_config(...)"
        )
    model.check_in_memory()
    _check(model)
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: export to a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        _write_tensors(dict(released(model, rules)), partial, max_shard_size)
        (partial / "config.json").write_text(json.dumps(released_config(model), indent=2) + "\n")
        if model.config.origin.generation:  # type: ignore[union-attr]
            settings = json.dumps(model.config.origin.generation, indent=2)  # type: ignore[union-attr]
            (partial / "generation_config.json").write_text(settings + "\n")
        if model._tokenizer is not None:
            model.tokenizer.save_pretrained(str(partial))
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def released(model: HookedTransformer, rules: list[Rule]) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors by the names and in the pieces of the released files, as views; a tied head is left out."""
    for name, parameter in model.named_parameters():
        rule, numbers = written_by(rules, name)  # type: ignore[misc]
        if isinstance(rule, Copy):
            yield rule.theirs.format(**numbers), parameter.detach()
            continue
        for e, expert in enumerate(parameter.detach()):
            for source, part in zip(rule.sources, expert.chunk(len(rule.sources)), strict=True):
                yield source.format(**numbers, e=e), part


def released_config(model: HookedTransformer) -> dict[str, Any]:
    """The release's own config, with what may have changed since: the weights' dtype and whether the head is tied."""
    assert model.config.origin is not None
    config = dict(model.config.origin.config)
    config.pop("auto_map", None)  # names files of code that are not in the folder
    config["architectures"] = [converters.family_of(model.config).ARCHITECTURES[-1]]
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    tied = model.lm_head.weight is model.embed_tokens.weight
    return {**config, **dict.fromkeys(spelled, dtype), "tie_word_embeddings": tied}


def _check(model: HookedTransformer) -> None:
    """The config, which alone says what is in the files, must still describe the model."""
    with torch.device("meta"):
        described = HookedTransformer(model.config)
    wanted = {name: list(each.shape) for name, each in described.named_parameters(remove_duplicate=False)}
    found = {name: list(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"the model is not what its config says: {name} is {found.get(name, 'missing')}, the config makes it "
                f"{wanted.get(name, 'nothing')}"
            )


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
        save_file({name: tensors[name].contiguous() for name in shards[file]}, folder / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
