"""A save is whole or not there, whoever else saves and whenever it is stopped.

A saver writes into a room of its own: beside the folder where that is not there yet, else inside it. What is written
goes to the disk, and is then moved by renames, of which the last one decides. A lock tells a room in use from one that
a killed saver left behind, which the next saver empties.

Our own format is decided by one rename, that of `model.safetensors`: its header holds the config, and the name of the
folder that holds the tokenizer. `transformer_std.json` says the config once more, for people and for the Hub; it alone
counts where the header holds none, as in what older versions saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer_std.model import HookedTransformer

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

WEIGHTS, CONFIG = "model.safetensors", "transformer_std.json"
CONFIG_KEY, TOKENIZER_KEY = "transformer_std", "tokenizer"  # in the header of the weights
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = [
    TOKENIZER_CONFIG, "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja",
]  # fmt: skip
TOKENIZER_FOLDER = re.compile("tokenizer-[0-9a-f]{16}")  # named by what is in it
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 64
ROOM, LOCK, WRITTEN, MOVING = ".transformer_std.saving", "lock", "written", "moving"

Move = Callable[[Path, Path], None]


# -- our own format ----------------------------------------------------------------------------------------------


def save(model: HookedTransformer, folder: str | Path) -> None:
    """What `HookedTransformer.save_pretrained` does."""
    model.check_in_memory()
    if problem := unlike_its_config(model):
        raise ValueError(problem)
    tied = model.lm_head.weight is model.embed_tokens.weight
    dtype = str(model.dtype).removeprefix("torch.")
    config = dataclasses.replace(model.config, dtype=dtype, tied_head=tied).to_dict()
    header = {"format": "pt", CONFIG_KEY: json.dumps(config)}
    with whole(folder, _refuse_another, _move_own) as written:
        write_tokenizer(model, beside := written / "tokenizer")
        if beside.exists():
            header[TOKENIZER_KEY] = _named_by_content(beside)
            beside.rename(written / header[TOKENIZER_KEY])
        write_weights(written / WEIGHTS, weights(model), header)
        write_json(written / CONFIG, config)
    if isinstance(model._tokenizer, (str, Path)) and not _tokenizer_files(Path(model._tokenizer)):
        model._tokenizer = Path(folder) / header[TOKENIZER_KEY]  # it was of the save that this one replaced


def read_header(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty where it has none, or is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def find_tokenizer(header: dict[str, str], folder: Path) -> Path | None:
    """Where a checkpoint's tokenizer is: where the header of its weights says, or beside them."""
    name = header.get(TOKENIZER_KEY)
    if name is None:
        return folder if (folder / TOKENIZER_CONFIG).exists() else None
    return folder / name if TOKENIZER_FOLDER.fullmatch(name) and (folder / name).is_dir() else None


def _refuse_another(folder: Path) -> None:
    for theirs in ("config.json", "model.safetensors.index.json"):
        if (folder / theirs).exists():
            raise ValueError(f"{folder} holds another checkpoint ({theirs}), which ours would ruin: name a new folder")


def _move_own(written: Path, folder: Path) -> None:
    new = {each.name for each in written.iterdir()}
    if (folder / CONFIG).exists() and CONFIG_KEY not in read_header(folder / WEIGHTS):
        for file in _tokenizer_files(folder):  # an older version's: beside the weights, where they would be found
            file.unlink()
    for name in new - {WEIGHTS, CONFIG}:
        if not (folder / name).exists():
            (written / name).rename(folder / name)
    _sync_folder(folder)
    (written / WEIGHTS).replace(folder / WEIGHTS)
    (written / CONFIG).replace(folder / CONFIG)
    _sync_folder(folder)
    for each in folder.iterdir():
        if TOKENIZER_FOLDER.fullmatch(each.name) and each.name not in new:
            shutil.rmtree(each, ignore_errors=True)


def _named_by_content(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size} ".encode())
            digest.update(file.read_bytes())
    return f"tokenizer-{digest.hexdigest()[:16]}"


# -- what is written -------------------------------------------------------------------------------------------------


def unlike_its_config(model: HookedTransformer) -> str | None:
    """Why the model's weights cannot be written as its config describes them; None where they can."""
    with torch.device("meta"):
        described = HookedTransformer(model.config)
    held = model.state_dict(keep_vars=True)
    found = {name: list(each.shape) for name, each in held.items()}
    wanted = {name: list(each.shape) for name, each in described.state_dict().items()}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            return (
                f"the model is not what its config says: {name} is {found.get(name, 'missing')}, the config makes it "
                f"{wanted.get(name, 'nothing')}{_advice(found)}"
            )
        weight, (path, _, attribute) = held[name], name.rpartition(".")
        if type(weight) not in (nn.Parameter, Tensor) or weight.layout != torch.strided:
            advice = GATHER if hasattr(weight, "full_tensor") else "make it a plain dense tensor first"
            return f"{name} is a {type(weight).__name__} ({weight.layout}): {advice}"
        dtype = described.get_submodule(path).held_dtype(attribute, model.dtype)  # type: ignore[operator]
        # What a load keeps wider, a cast of the model may have made as narrow as the rest: it is read wide again.
        if weight.dtype not in (dtype, model.dtype) or dtype not in DTYPES:
            return f"{name} is {weight.dtype} in a model of {model.dtype}, and would not be read as that: cast it first"
    return None


GATHER = (
    "gather the shards first, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict, and load them into a model that is not sharded"
)
MADE_PLAIN = {
    ".parametrizations.": "torch.nn.utils.parametrize.remove_parametrizations(module, name)",
    ".lora_": "peft's merge_and_unload()",
    ".base_layer.": "peft's merge_and_unload()",
    "weight_orig": "torch.nn.utils.prune.remove(module, name)",
    "weight_v": "torch.nn.utils.remove_weight_norm(module)",
    "_orig_mod.": "compile modules in place (module.compile())",
}


def _advice(names: Iterable[str]) -> str:
    """How weights under other names, such as those that a weight is computed from, become plain."""
    found = next((mark for mark in MADE_PLAIN if any(mark in name for name in names)), None)
    return "" if found is None else f"; make the weights plain first: {MADE_PLAIN[found]}"


def weights(model: HookedTransformer) -> dict[str, Tensor]:
    """The model's weights by name; a head that is the embedding is left out."""
    named = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    if model.lm_head.weight is model.embed_tokens.weight:
        del named["lm_head.weight"]
    return named


def write_weights(file: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """A safetensors file whose tensors lie at multiples of 64 bytes, as they do in torch's memory, but for the small
    ones of other sizes, which come last: the last bits of a product can depend on where its factors lie."""
    tensors = dict(sorted(tensors.items(), key=lambda each: each[1].nbytes % ALIGNMENT > 0))
    entries: dict[str, Any] = {"__metadata__": header}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in one piece each, none at another's place, as a safetensors file holds them."""
    places: set[int] = set()
    held = {}
    for name, tensor in tensors.items():
        held[name] = tensor.clone() if tensor.data_ptr() in places else tensor.contiguous()
        places.add(tensor.data_ptr())
    return held


def write_tokenizer(model: HookedTransformer, folder: Path) -> None:
    """The tokenizer's files into `folder`, where the model has one. One that was not read yet is copied: that needs no
    transformers, nor that it can be loaded."""
    source = model._tokenizer
    if source is None:
        return
    if not isinstance(source, (str, Path)) or (isinstance(source, str) and not Path(source).is_dir()):  # a Hub id
        model.tokenizer.save_pretrained(str(folder))
        return
    if not (files := _tokenizer_files(Path(source))):
        raise FileNotFoundError(f"{source} holds no tokenizer (any more): set model.tokenizer, to None for none")
    for file in files:
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _tokenizer_files(folder: Path) -> list[Path]:
    """All that is in a folder of a tokenizer's own; of a checkpoint's folder, what a tokenizer reads."""
    patterns = ["**/*"] if TOKENIZER_FOLDER.fullmatch(folder.name) else TOKENIZER_FILES
    return [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]


def write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# -- whole or not there ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole(folder: str | Path, refuse: Callable[[Path], None], move: Move) -> Iterator[Path]:
    """An empty folder to write into. When the block ends, what is in it comes to `folder`, whole; when the block
    raises, or is killed, nothing does.

    A folder that is not there yet is made by one rename. Into one that is there, `move(written, folder)` renames: such
    a folder may be a mount point or have a parent that is read-only, and it keeps its mode. Another saver into the same
    folder is waited for.

    Args:
        folder: where the files will be.
        refuse: raises where nothing may be saved into a folder; asked before anything is written, and before it moves.
        move: moves what is written into a folder that is there; whatever it has moved when it is stopped must be what
            was there before, or what is new, or be taken back as `move_all` has it.

    Raises:
        FileExistsError: locks do not work here, and another saver is at it, or was killed.
        RuntimeError: this thread is saving into the folder already, as in a signal's handler.
    """
    if not str(folder):
        raise ValueError("the folder's name is empty: '.' is the current one")
    folder = Path(folder).resolve()
    inside, beside = folder / ROOM, folder.parent / f".{folder.name}{ROOM}"
    if not inside.exists():
        refuse(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        new = not folder.exists()
        with _alone(beside if new else inside, folder) as room:
            if folder.exists() == new:  # another saver, whom this one waited for, has made it
                continue
            if not new and beside.exists():
                with contextlib.suppress(OSError), _alone(beside, folder, wait=False):
                    pass  # what was left there is gone now
            refuse(folder)
            written = room / WRITTEN
            written.mkdir()
            yield written
            (room / "new").touch()
            _sync(written, stat.S_IMODE((room / "new").stat().st_mode))
            if new and not folder.exists():
                written.rename(folder)
                _sync_folder(folder.parent)
                return
            with _alone(inside, folder) if new else contextlib.nullcontext():
                refuse(folder)
                move(written, folder)
            return


def move_all(written: Path, folder: Path, *, last: str) -> None:
    """Moves files into a folder that held none; until `last` is there, the next saver takes them back."""
    names = sorted((each.name for each in written.iterdir()), key=lambda name: name == last)
    write_json(written.parent / MOVING, names)
    _sync(written.parent / MOVING, 0o600)
    _sync_folder(written.parent)
    for name in names:
        if name == last:
            _sync_folder(folder)
        (written / name).rename(folder / name)
    _sync_folder(folder)


def in_use(folder: Path) -> bool:
    """Whether something is in a folder, beside what a killed saver left."""
    return folder.exists() and (not folder.is_dir() or any(each.name != ROOM for each in folder.iterdir()))


_held: set[tuple[Path, int]] = set()  # rooms, and the threads that are in them


@contextlib.contextmanager
def _alone(room: Path, folder: Path, *, wait: bool = True) -> Iterator[Path]:
    """`room`, empty, for this saver into `folder` alone. One that lives is waited for, or without `wait` is a
    `BlockingIOError`; what a killed one left is removed."""
    me = (room, threading.get_ident())
    if me in _held:
        raise RuntimeError(f"this thread is saving into {folder} already")
    _held.add(me)
    try:
        with _enter(room, wait):
            try:
                _empty(room, folder)
                yield room
            finally:
                _empty(room, folder)
                (room / LOCK).unlink(missing_ok=True)  # while it is held: who waits for it finds it gone
                with contextlib.suppress(OSError):  # another saver is in it by now
                    room.rmdir()
    finally:
        _held.remove(me)


def _enter(room: Path, wait: bool) -> AbstractContextManager[Any]:
    """Makes `room` and takes its lock, which ends with the process, however that ends."""
    while True:
        try:
            room.mkdir()
            made = True
        except FileExistsError:
            made = False
        with contextlib.ExitStack() as stack:
            try:
                if fcntl is None:
                    raise OSError(errno.ENOSYS, "no locks")
                lock = stack.enter_context((room / LOCK).open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if not os.path.samestat(os.fstat(lock.fileno()), os.stat(room / LOCK)):
                    continue
            except FileNotFoundError:  # the saver before removed it
                continue
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
                    raise
                if not made:  # nothing tells whether its saver lives
                    raise FileExistsError(
                        f"{room} is of another saver; if none is running, one was killed: remove it"
                    ) from None
            return stack.pop_all()


def _empty(room: Path, folder: Path) -> None:
    """Removes what is in a room, and takes back what was moved from it if that was not all."""
    names = []
    with contextlib.suppress(FileNotFoundError, ValueError):  # a list cut short: nothing was moved yet
        names = json.loads((room / MOVING).read_text(encoding="utf-8"))
    if names and (room / WRITTEN / names[-1]).exists():
        for name in names:
            if not (room / WRITTEN / name).exists():
                _remove(folder / name)
    _remove(room / MOVING)
    for each in room.iterdir():
        if each.name != LOCK:
            _remove(each)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path, mode: int) -> None:
    """Waits until a file, or all that is in a folder, is on the disk. Files get `mode`: safetensors leaves its own to
    their owner alone."""
    if path.is_dir():
        for each in path.iterdir():
            _sync(each, mode)
        _sync_folder(path)
    else:
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
        with path.open("r+b") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if fcntl is None:  # nor can a folder be opened there
        return
    at = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(at)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not on this file system
            raise
    finally:
        os.close(at)
