"""From released checkpoints to our model and back: one module a family, named as `config.model_type` names it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from converters.checkpoint import MERGE, Checkpoint, CheckpointError, LiveTensors, parse_json, read_json
from converters.fill import check_counts, fill, own_rules
from converters.hf_config import DTYPES, ConfigError, ConfigReader, check, check_depth
from converters.hub import ADAPTER, OUR_CONFIG, download
from transformer_std import saving
from transformer_std.config import Origin, TransformerConfig
from transformer_std.model import HookedTransformer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from converters.comparing import Difference
    from converters.verification import Report

__all__ = ["CheckpointError", "ConfigError", "diff", "export", "families", "family_of", "load", "read_config", "verify"]

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


def _with_generation(config: TransformerConfig, generation: dict[str, Any]) -> TransformerConfig:
    return check(dataclasses.replace(config, origin=dataclasses.replace(config.origin, generation=generation)))


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


def _read_json(path: Path) -> dict[str, Any]:
    values = read_json(path, ConfigError)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a config")
    return values


def _convert_config(values: dict[str, Any]) -> TransformerConfig:
    check_depth(values)
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
    return check(dataclasses.replace(config, dtype=dtype, origin=Origin(values["model_type"], values)))


def load(
    source: Any,
    *,
    dtype: torch.dtype | str | None = None,
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
    dtype = as_dtype(dtype)
    for inside in ("_orig_mod", "module"):  # of torch.compile's wrapper, of a data-parallel one
        source = getattr(source, inside, source)
    if isinstance(source, HookedTransformer) or not (isinstance(source, (str, Path)) or hasattr(source, "config")):
        raise TypeError(
            f"source is {type(source).__name__}: give a folder, a file, a Hub id, or a live transformers model"
        )
    if isinstance(source, nn.Module):
        config = _convert_config(source.config.to_dict())
        generation = source.generation_config.to_dict() if getattr(source, "generation_config", None) else {}
        config = _with_generation(config, generation)
        rules, tensors = family_of(config).WEIGHTS, LiveTensors.of(source)
        dtype = dtype or next(source.parameters()).dtype
    else:
        folder = folder_of(source, revision)
        config, tensors = read_config(folder), Checkpoint(Path(source) if Path(source).is_file() else folder)
        own = own_config(folder, tensors.header)
        config = own or config
        rules = own_rules(tensors) if own else family_of(config).WEIGHTS
        tokenizer = tokenizer or saving.find_tokenizer(tensors.header, folder)
    if dtype is None and config.dtype is not None:
        dtype = DTYPES[config.dtype]
    check_counts(config, tensors, rules)
    with torch.device("meta"):
        model = HookedTransformer(config, attn_implementation=attn_implementation, tokenizer=tokenizer)
    fill(model, tensors, rules, dtype)
    if device_map is not None:
        from converters.placing import place

        return place(model, device_map, max_memory, offload_folder)
    return model if device is None else model.to(device)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype itself, or by its name; None, or "auto", where the checkpoint is to say. Raises `TypeError` on one that
    weights do not have."""
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise TypeError(f"dtype is {dtype!r}: give 'auto', or one of {', '.join(DTYPES)}, as text or as torch's")
    return found


def export(model: HookedTransformer, folder: str | Path, **options: Any) -> None:
    """Writes our model as a folder that transformers loads: see `converters.exporting.export`."""
    from converters import exporting

    exporting.export(model, folder, **options)


def verify(source: str | Path | HookedTransformer, **options: Any) -> Report:
    """Compares our model of a checkpoint with transformers': see `converters.verification.verify`."""
    from converters import verification

    return verification.verify(source, **options)


def diff(a: Any, b: Any, **options: Any) -> Difference:
    """Compares two checkpoints value by value: see `converters.comparing.diff`."""
    from converters import comparing

    return comparing.diff(a, b, **options)
