"""What a model can be loaded from: a released checkpoint's folder, one of ours, a live model. Each is a `Release`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from converters.checkpoint import MERGE, Checkpoint, CheckpointError, LiveTensors, parse_json, read_json
from converters.families import module_of
from converters.fill import own_rules
from converters.hf_config import DTYPES, ConfigError, ConfigReader, check, check_depth
from converters.hub import ADAPTER, OUR_CONFIG, download
from converters.rules import Rule
from transformer_std import saving
from transformer_std.config import Origin, TransformerConfig
from transformer_std.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclasses.dataclass(frozen=True)
class Release:
    """A checkpoint, opened.

    Attributes:
        config: our config of it.
        tensors: its tensors, by the names that `rules` read.
        tokenizer: where its tokenizer is; None where it has none.
        dtype: what it says its weights are; None: they are to say themselves.
        ours: it is in our own format.
        folder: where it is; None for a live model.
    """

    config: TransformerConfig
    tensors: Checkpoint | LiveTensors
    rules: list[Rule]
    tokenizer: Path | None
    dtype: torch.dtype | None
    ours: bool = False
    folder: Path | None = None


def open_source(source: Any, revision: str | None = None) -> Release:
    """Opens whatever `from_pretrained` loads.

    Raises:
        TypeError: nothing of the kind.
        ConfigError: a config that no converter understands.
        CheckpointError: what is there is no checkpoint, or cannot be read.
    """
    for inside in ("_orig_mod", "module"):  # of torch.compile's wrapper, of a data-parallel one
        source = getattr(source, inside, source)
    if isinstance(source, (str, Path)):
        folder = folder_of(source, revision)
        config, tensors = read_config(folder), Checkpoint(Path(source) if Path(source).is_file() else folder)
        return _in_folder(folder, config, tensors)
    if isinstance(source, Transformer) or not isinstance(source, nn.Module) or not hasattr(source, "config"):
        raise TypeError(
            f"source is {type(source).__name__}: give a folder, a file, a Hub id, or a live transformers model"
        )
    return _live(source)


def _in_folder(folder: Path, config: TransformerConfig, tensors: Checkpoint) -> Release:
    own = own_config(folder, tensors.header)
    config = own or config
    return Release(
        config=config,
        tensors=tensors,
        rules=own_rules(tensors) if own else module_of(config).WEIGHTS,
        tokenizer=saving.find_tokenizer(tensors.header, folder),
        dtype=None if config.dtype is None else DTYPES[config.dtype],
        ours=own is not None,
        folder=folder,
    )


def _live(model: Any) -> Release:
    config = _convert_config(model.config.to_dict())
    generation = model.generation_config.to_dict() if getattr(model, "generation_config", None) else {}
    return Release(
        config=_with_generation(config, generation),
        tensors=LiveTensors.of(model),
        rules=module_of(config).WEIGHTS,
        tokenizer=None,
        dtype=next(model.parameters()).dtype,
    )


def read_config(
    source: str | Path | dict[str, Any] | PretrainedConfig, revision: str | None = None
) -> TransformerConfig:
    """The config of a checkpoint: a folder, a weights file in one, a Hub id, a `config.json`, or its dict or
    transformers' object of it. Reads no weights.

    Raises:
        ConfigError: not JSON, of an unknown family, or with something in it that we do not compute.
        CheckpointError: there is no config there.
    """
    if not isinstance(source, (str, Path)):
        return _convert_config(source if isinstance(source, dict) else source.to_dict())
    path = Path(source)
    if path.is_file() and path.suffix == ".json":
        return _convert_config(_read_json(path))
    folder = _folder(source) or download(str(source), revision, weights=False)
    if (own := own_config(folder, saving.read_header(folder / saving.WEIGHTS))) is not None:
        return own
    if (folder / ADAPTER).exists():
        base = _read_json(folder / ADAPTER).get("base_model_name_or_path")
        raise CheckpointError(f"{folder} holds an adapter of {base} ({ADAPTER}): {MERGE}")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json")
    config = _convert_config(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    return _with_generation(config, _read_json(generation)) if generation.exists() else config


def own_config(folder: Path, header: dict[str, str]) -> TransformerConfig | None:
    """The config of a checkpoint in our own format, None of another. The header of the weights wins: it is of the same
    save as they are, whoever saves meanwhile."""
    file, written = folder / OUR_CONFIG, header.get(saving.CONFIG_KEY)
    if written is None and not file.exists():
        return None
    where = str(file) if written is None else f"the header of {folder / saving.WEIGHTS}"
    values = _read_json(file) if written is None else parse_json(written, where, ConfigError)
    try:
        return check(TransformerConfig.from_dict(values))
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where} is not a config that save_pretrained wrote: {error}") from error


def _folder(source: str | Path) -> Path | None:
    """Where a checkpoint on this machine is: a folder, or that of a weights file. None where `source` is a Hub id."""
    if not str(source):
        raise CheckpointError("the source's name is empty: '.' is the current folder")
    path = Path(source)
    if path.is_file() or path.suffix in WEIGHT_FILES:
        if not path.exists():
            raise CheckpointError(f"there is no file {path}")
        return path.parent
    return path if path.is_dir() else None


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds a checkpoint's files, fetched from the Hub where it is not there."""
    return _folder(source) or download(str(source), revision)


def _with_generation(config: TransformerConfig, generation: dict[str, Any]) -> TransformerConfig:
    origin = dataclasses.replace(config.origin, generation=generation) if config.origin else None
    return check(dataclasses.replace(config, origin=origin))


def _read_json(path: Path) -> dict[str, Any]:
    values = read_json(path, ConfigError)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a config")
    return values


def _convert_config(values: dict[str, Any]) -> TransformerConfig:
    check_depth(values)
    family = module_of(values)
    reader = ConfigReader(values, values["model_type"], family.DEFAULTS, getattr(family, "SPELLED", None))
    try:
        config = family.config(reader)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config is not one of {values['model_type']}: {error}") from error
    reader.done()
    dtype = values.get("dtype") or values.get("torch_dtype")
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    return check(dataclasses.replace(config, dtype=dtype, origin=Origin(values["model_type"], values)))


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype itself, or by its name; None, or "auto", where the checkpoint is to say. Raises `TypeError` on one that
    weights do not have."""
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise TypeError(f"dtype is {dtype!r}: give 'auto', or one of {', '.join(DTYPES)}, as text or as torch's")
    return found
