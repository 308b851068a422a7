"""From released checkpoints to our model and back. What is here is told where it is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters import loading
from converters.checkpoint import CheckpointError
from converters.families import module_of as family_of
from converters.families import names as families  # a function here; the files are in the folder of that name
from converters.hf_config import ConfigError
from converters.sources import read_config
from transformer_std.model import HookedTransformer

if TYPE_CHECKING:
    from converters.verification.difference import Difference
    from converters.verification.report import Report

__all__ = ["CheckpointError", "ConfigError", "diff", "export", "families", "family_of", "load", "read_config", "verify"]


def load(source: Any, **options: Any) -> HookedTransformer:
    """What `HookedTransformer.from_pretrained` does; its arguments are described there."""
    return loading.load(source, HookedTransformer, **options)


def export(model: HookedTransformer, folder: str | Path, **options: Any) -> None:
    """Writes our model as a folder that transformers loads: see `converters.exporting.export`."""
    from converters import exporting

    exporting.export(model, folder, **options)


def verify(source: str | Path | HookedTransformer, **options: Any) -> Report:
    """Compares our model of a checkpoint with transformers': see `converters.verification.report.verify`."""
    from converters.verification import report

    return report.verify(source, **options)


def diff(a: Any, b: Any, **options: Any) -> Difference:
    """Compares two checkpoints value by value: see `converters.verification.difference.diff`."""
    from converters.verification import difference

    return difference.diff(a, b, **options)
