"""Files that come to a folder whole or not at all, whoever else writes there and whenever it is stopped.

A saver writes into a room of its own: beside the folder where that is not there yet, else inside it. What is written
goes to the disk, and is then moved by renames, of which the last one decides. A lock tells a room in use from one that
a killed saver left behind, which the next saver empties.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

ROOM, LOCK, WRITTEN, MOVING = ".transformer_std.saving", "lock", "written", "moving"

Move = Callable[[Path, Path], None]


def write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


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
                sync_folder(folder.parent)
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
    sync_folder(written.parent)
    for name in names:
        if name == last:
            sync_folder(folder)
        (written / name).rename(folder / name)
    sync_folder(folder)


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
        sync_folder(path)
    else:
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
        with path.open("r+b") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
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
