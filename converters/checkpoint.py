"""Names and tensors of a checkpoint on disk, read by memory map, one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# What a checkpoint's weights may be; safetensors' other types are integers or quantised.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


MERGE = "merge it into its base model first (peft's merge_and_unload()) and save that"


class CheckpointError(ValueError):
    """A file or tensor that is missing, left over, or not what it should be."""


class Checkpoint:
    """The tensors of a folder's `model.safetensors`, of the shards that its `model.safetensors.index.json` lists, or of
    one file.

    Nothing is read when it is opened but the headers, and every file is checked to be whole.

    Raises:
        CheckpointError: a shard that is missing, a file that is cut short or is none, or only pickled weights.
    """

    def __init__(self, path: Path):
        alone = path.is_file()
        self.folder = folder = path.parent if alone else path
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        if alone and path.suffix != ".safetensors":
            raise CheckpointError(f"{path} is no safetensors file; pickled and quantised weights are not read")
        for file in [path.name] if alone else self._shards():
            try:
                self._files[file] = _open(folder / file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file} is not a whole safetensors file: {error}") from None
            names = self._files[file].keys()
            for name in names:
                if name in self._where:
                    raise CheckpointError(f"tensor {name} is in two files, {self._where[name]} and {file}")
                self._where[name] = file
        if not alone:
            self._check_index()

    def _shards(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(weight_map(index).values()))
            missing = [file for file in files if not (self.folder / file).exists()]
            if missing:
                raise CheckpointError(f"{self.folder} lacks {', '.join(missing)}, which {index.name} lists")
            return files
        if (self.folder / "model.safetensors").exists():
            return ["model.safetensors"]
        pickled = [*self.folder.glob("*.bin"), *self.folder.glob("*.pt"), *self.folder.glob("*.pth")]
        if pickled:
            raise CheckpointError(
                f"{self.folder} has only pickled weights ({pickled[0].name}), and unpickling one can run code; load it "
                "with transformers and save_pretrained() it as safetensors"
            )
        raise CheckpointError(f"{self.folder} has no model.safetensors and no model.safetensors.index.json")

    def _check_index(self) -> None:
        index = self.folder / "model.safetensors.index.json"
        if index.exists() and (lost := sorted(set(weight_map(index)) - set(self._where))):
            raise CheckpointError(f"{index} lists tensors that no shard holds: {', '.join(lost[:5])}")

    @property
    def header(self) -> dict[str, str]:
        """The metadata of the file; empty where there are shards."""
        return next(iter(self._files.values())).metadata() or {} if len(self._files) == 1 else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def shape(self, name: str) -> list[int]:
        return self._files[self._where[name]].get_slice(name).get_shape()

    def dtype(self, name: str) -> torch.dtype:
        return FLOATS.get(self._files[self._where[name]].get_slice(name).get_dtype(), torch.int64)

    def tensor(self, name: str) -> Tensor:
        """Memory-mapped: its bytes are read when they are first touched."""
        return self._files[self._where[name]].get_tensor(name)

    def origin(self, name: str) -> str:
        return str(self.folder / self._where[name])


def _open(file: Path) -> Any:
    """safetensors opens a file twice, for its header and for its tensors: the same one, though it is saved over."""
    while True:
        before, opened, after = os.stat(file), safe_open(file, framework="pt"), os.stat(file)
        if (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
            return opened


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index of shards has it."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): Path(file).name for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from None


class LiveTensors:
    """The tensors of a live module, by the same interface."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def origin(self, name: str) -> str:
        return "the live model"
