"""Names and tensors of a checkpoint on disk, read by memory map, one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

# What a checkpoint's weights may be; safetensors' other types are integers or quantised.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEPEST = 100  # what is nested deeper is no config, and would end in a RecursionError somewhere

MERGE = "merge it into its base model first (peft's merge_and_unload()) and save that"


class CheckpointError(ValueError):
    """A file or tensor that is missing, left over, or not what it should be."""


def read_json(path: Path, error: type[ValueError] = CheckpointError) -> Any:
    """What a JSON file holds. Raises `error` where it is not JSON, or nested deeper than anything we read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as wrong:
        raise error(f"{path} cannot be read: {wrong}") from None
    except UnicodeDecodeError as wrong:
        raise error(f"{path} is not JSON: {wrong}") from None
    return parse_json(text, str(path), error)


def parse_json(text: str, where: str, error: type[ValueError] = CheckpointError) -> Any:
    """The same of a text that stands at `where`."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise error(f"{where} is nested too deep to be read") from None
    except ValueError as wrong:
        raise error(f"{where} is not JSON: {wrong}") from None
    if too_deep(values):
        raise error(f"{where} is nested deeper than {DEEPEST} levels")
    return values


def too_deep(values: Any) -> bool:
    """Whether lists and dicts stand in one another more than `DEEPEST` times."""
    level = [values]
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [each for values in inner for each in values]
    return bool(level)


class Checkpoint:
    """The tensors of a folder's `model.safetensors`, else of the shards that its `model.safetensors.index.json` lists
    (transformers' order), or of one file.

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
        files = [path.name] if alone else self._weight_files()
        for file in files:
            try:
                self._files[file] = _open(folder / file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file} is not a whole safetensors file: {error}") from None
            names = self._files[file].keys()
            for name in names:
                if name in self._where:
                    raise CheckpointError(f"tensor {name} is in two files, {self._where[name]} and {file}")
                self._where[name] = file
        if not alone and files != [WHOLE]:
            self._check_index()

    def _weight_files(self) -> list[str]:
        if (self.folder / WHOLE).is_file():
            return [WHOLE]
        index = self.folder / INDEX
        if index.exists():
            files = sorted(set(weight_map(index).values()))
            missing = [file for file in files if not (self.folder / file).exists()]
            if missing:
                raise CheckpointError(f"{self.folder} lacks {', '.join(missing)}, which {index.name} lists")
            return files
        if quantised := sorted(self.folder.glob("*.gguf")):
            raise CheckpointError(
                f"{self.folder} has its weights in {quantised[0].name}, and GGUF is not read: take the release's "
                "safetensors"
            )
        pickled = [*self.folder.glob("*.bin"), *self.folder.glob("*.pt"), *self.folder.glob("*.pth")]
        if pickled:
            raise CheckpointError(
                f"{self.folder} has only pickled weights ({pickled[0].name}), and unpickling one can run code; load it "
                "with transformers and save_pretrained() it as safetensors"
            )
        others = sorted(file.name for file in self.folder.glob("*.safetensors"))
        hint = f"; a file of another name is loaded by its path ({', '.join(others[:3])})" if others else ""
        raise CheckpointError(f"{self.folder} has no {WHOLE} and no {INDEX}{hint}")

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if lost := sorted(set(weight_map(index)) - set(self._where)):
            raise CheckpointError(f"{index} lists tensors that no shard holds: {', '.join(lost[:5])}")

    @property
    def header(self) -> dict[str, str]:
        """The metadata of the file; empty where there are shards."""
        return next(iter(self._files.values())).metadata() or {} if len(self._files) == 1 else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def shape(self, name: str) -> list[int]:
        return self._files[self._where[name]].get_slice(name).get_shape()

    def kind(self, name: str) -> str:
        """The dtype by safetensors' name."""
        return self._files[self._where[name]].get_slice(name).get_dtype()

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
    found = read_json(index)
    try:
        return {str(name): Path(file).name for name, file in found["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from None


class LiveTensors:
    """The tensors of a live module, by the same interface."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    @classmethod
    def of(cls, model: nn.Module) -> LiveTensors:
        """Those of a model that is whole in memory.

        Raises:
            CheckpointError: a tensor that is elsewhere (offloaded, or never filled), or of a kind of its own (sharded,
                quantised).
        """
        tensors = model.state_dict()
        if away := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise CheckpointError(
                f"{len(away)} of the live model's tensors are not in memory ({', '.join(away[:3])}, ...): they are "
                "offloaded or were never filled; load it without offloading, or give the folder or Hub id it came from"
            )
        if odd := [name for name, tensor in tensors.items() if type(tensor) is not Tensor]:
            raise CheckpointError(
                f"{len(odd)} of the live model's tensors are no plain ones ({odd[0]} is a "
                f"{type(tensors[odd[0]]).__name__}, ...): gather or dequantise them first, or give the folder or Hub "
                "id it came from"
            )
        return cls(tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name].shape)

    def kind(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return next((kind for kind, each in FLOATS.items() if each == dtype), str(dtype).removeprefix("torch."))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def origin(self, name: str) -> str:
        return "the live model"
