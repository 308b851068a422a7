"""A model over several devices, or partly on disk, by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from transformer_std.components.blocks import BLOCKS


def place(
    model: nn.Module,
    device_map: str | dict[str, Any],
    max_memory: dict[Any, Any] | None,
    offload_folder: str | Path | None,
) -> Any:
    """Spreads a loaded model as `device_map` says. A block is never split, and is brought to its device whole.

    Raises:
        ImportError: accelerate is not there.
        ValueError: a device_map that accelerate cannot follow, or a part on disk and no `offload_folder`.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
    except ImportError:
        raise ImportError("device_map needs accelerate: pip install 'transformer-std[big]'") from None
    blocks = [cls.__name__ for cls in BLOCKS.values()]
    if isinstance(device_map, str):
        if device_map != "auto":
            raise ValueError(f"device_map is {device_map!r}; give 'auto' or a dict")
        places = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=blocks)
    else:
        places = device_map
    if "disk" in places.values() and offload_folder is None:
        raise ValueError("device_map puts parts on disk: say where with offload_folder")
    if offload_folder is not None and Path(offload_folder).exists() and any(Path(offload_folder).iterdir()):
        raise ValueError(f"offload_folder {offload_folder} is not empty: its weights would be taken for this model's")
    return dispatch_model(model, places, offload_dir=offload_folder, preload_module_classes=blocks, force_hooks=True)
