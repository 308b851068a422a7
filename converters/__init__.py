"""From released checkpoints to our model and back: one module a family, named as `config.model_type` names it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from converters.checkpoint import FLOATS, MERGE, Checkpoint, CheckpointError, LiveTensors
from converters.fill import fill
from converters.hf_config import ConfigError, ConfigReader
from converters.hub import ADAPTER, OUR_CONFIG, download
from converters.rules import Copy, Rule
from transformer_std.config import Origin, TransformerConfig
from transformer_std.model import HookedTransformer

if TYPE_CHECKING:
    from converters.verification import Report

__all__ = ["CheckpointError", "ConfigError", "export", "families", "family_of", "load", "read_config", "verify"]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def families() -> list[str]:
    """The `model_type`s that can be loaded: the modules here that have a table of weights. Imports none of them."""
    return [name for _, name, _ in pkgutil.iter_modules(__path__) if _is_family(name)]


def _is_family(name: str) -> bool:
    """Whether the module's source has the line that makes its table: importing others to see what they hold would need
    what they need."""
    spec = importlib.util.find_spec(f"{__name__}.{name}") if name.isidentifier() else None
    source = spec.loader.get_source(spec.name) if spec else None  # type: ignore[union-attr]
    return source is not None and re.search(r"^WEIGHTS\b", source, re.MULTILINE) is not None


def family_of(config: TransformerConfig | dict[str, Any]) -> ModuleType:
    """The family's module, of a released config or of ours. Raises `ConfigError` where none serves it."""
    if isinstance(config, TransformerConfig):
        kind = config.origin.family if config.origin else None
    else:
        kind = config.get("model_type")
    if not _is_family(str(kind)):
        alike = max((name for name in families() if str(kind).startswith(name)), key=len, default=None)
        hint = f" (another architecture than {alike}, in spite of its name)" if alike else ""
        raise ConfigError(f"model_type is {kind!r}{hint}; supported are {', '.join(families())}")
    return importlib.import_module(f"{__name__}.{kind}")


def read_config(source: str | Path | dict[str, Any], revision: str | None = None) -> TransformerConfig:
    """The config of a checkpoint: a folder, a weights file in one, a Hub id, a `config.json`, or its dict. Reads no
    weights.

    Raises:
        ConfigError: not JSON, of an unknown family, or with something in it that we do not compute.
        CheckpointError: there is no config there.
    """
    if isinstance(source, dict):
        return _convert_config(source)
    path = Path(source)
    if path.is_file() and path.suffix == ".json":
        return _convert_config(_read_json(path))
    folder = _folder(source) or download(str(source), revision, weights=False)
    if (folder / OUR_CONFIG).exists():
        try:
            return TransformerConfig.from_dict(_read_json(folder / OUR_CONFIG))
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{folder / OUR_CONFIG} is not a config that save_pretrained wrote: {error}") from error
    if (folder / ADAPTER).exists():
        base = _read_json(folder / ADAPTER).get("base_model_name_or_path")
        raise CheckpointError(f"{folder} holds an adapter of {base} ({ADAPTER}): {MERGE}")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json")
    config = _convert_config(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    return _with_generation(config, _read_json(generation)) if generation.exists() else config


def _with_generation(config: TransformerConfig, generation: dict[str, Any]) -> TransformerConfig:
    return dataclasses.replace(config, origin=dataclasses.replace(config.origin, generation=generation))


def _folder(source: str | Path) -> Path | None:
    """Where a checkpoint on this machine is: a folder, or that of a weights file. None where `source` is a Hub id."""
    path = Path(source)
    if path.is_file() or path.suffix in WEIGHT_FILES:
        if not path.exists():
            raise CheckpointError(f"there is no file {path}")
        return path.parent
    return path if path.is_dir() else None


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds a checkpoint's files, fetched from the Hub where it is not there."""
    return _folder(source) or download(str(source), revision)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a config")
    return values


def _convert_config(values: dict[str, Any]) -> TransformerConfig:
    family = family_of(values)
    reader = ConfigReader(values, values["model_type"])
    try:
        config = family.config(reader)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config is not one of {values['model_type']}: {error}") from error
    reader.done()
    dtype = values.get("dtype") or values.get("torch_dtype")
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"config.dtype is {dtype!r}; weights are {', '.join(DTYPES)}")
    return dataclasses.replace(config, dtype=dtype, origin=Origin(values["model_type"], values))


def load(
    source: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    max_memory: Any = None,
    offload_folder: Any = None,
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    tokenizer: Any = None,
) -> HookedTransformer:
    """What `HookedTransformer.from_pretrained` does; its arguments are described there."""
    tensors: Checkpoint | LiveTensors
    if dtype is not None and dtype not in DTYPES.values():
        raise TypeError(f"dtype is {dtype!r}: give one of {', '.join(f'torch.{name}' for name in DTYPES)}")
    if not isinstance(source, (str, Path)) and not hasattr(source, "config"):
        raise TypeError(
            f"source is {type(source).__name__}: give a folder, a file, a Hub id, or a live transformers model"
        )
    if isinstance(source, nn.Module):
        config = _convert_config(source.config.to_dict())
        generation = source.generation_config.to_dict() if getattr(source, "generation_config", None) else {}
        config = _with_generation(config, generation)
        rules, tensors = family_of(config).WEIGHTS, LiveTensors(source.state_dict())
        dtype = dtype or next(source.parameters()).dtype
    else:
        folder = folder_of(source, revision)
        config, tensors = read_config(folder), Checkpoint(Path(source) if Path(source).is_file() else folder)
        rules = _own_rules(config) if (folder / OUR_CONFIG).exists() else family_of(config).WEIGHTS
        tokenizer = tokenizer or (folder if (folder / "tokenizer_config.json").exists() else None)
    if dtype is None and config.dtype is not None:
        dtype = getattr(torch, config.dtype)
    with torch.device("meta"):
        model = HookedTransformer(config, attn_implementation=attn_implementation, tokenizer=tokenizer)
    fill(model, tensors, rules, dtype)
    if device_map is not None:
        from converters.placing import place

        return place(model, device_map, max_memory, offload_folder)
    return model if device is None else model.to(device)


def _own_rules(config: TransformerConfig) -> list[Rule]:
    with torch.device("meta"):
        return [Copy(name, name) for name, _ in HookedTransformer(config).named_parameters()]


def export(model: HookedTransformer, folder: str | Path, **options: Any) -> None:
    """Writes our model as a folder that transformers loads: see `converters.exporting.export`."""
    from converters import exporting

    exporting.export(model, folder, **options)


def verify(source: str | Path, **options: Any) -> Report:
    """Compares our model of a checkpoint with transformers': see `converters.verification.verify`."""
    from converters import verification

    return verification.verify(source, **options)
