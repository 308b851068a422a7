"""The families that can be loaded: one file each, named as `config.model_type` names it, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from converters.hf_config import ConfigError
from transformer_std.config import TransformerConfig


def names() -> list[str]:
    """The `model_type`s that can be loaded: a listing, which imports none of them."""
    return [name for _, name, _ in pkgutil.iter_modules(__path__)]


def module_of(config: TransformerConfig | dict[str, Any]) -> ModuleType:
    """The family's module, of a released config or of ours. Raises `ConfigError` where none serves it."""
    if isinstance(config, TransformerConfig):
        kind = config.origin.family if config.origin else None
    else:
        kind = config.get("model_type")
    if kind not in names():
        alike = max((name for name in names() if str(kind).startswith(name)), key=len, default=None)
        hint = f" (another architecture than {alike}, in spite of its name)" if alike else ""
        raise ConfigError(f"model_type is {kind!r}{hint}; supported are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{kind}")
