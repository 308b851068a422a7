"""Savers that are killed, and savers that race, for tests/test_saving.py: `python -m tests.savers TASK KIND FOLDER A B`
in a process of its own, which imports torch once and forks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import converters
from transformer_std import HookedTransformer

REFUSED = 3


def save(model: HookedTransformer, folder: Path) -> None:
    model.save_pretrained(folder)


def export(model: HookedTransformer, folder: Path) -> None:
    converters.export(model, folder, max_shard_size=60_000)


def tokenizer_of(model: HookedTransformer) -> bytes:
    return (Path(model.tokenizer_source) / "tokenizer.json").read_bytes()


def held(folder: Path, models: list[HookedTransformer], racing: bool = False) -> int | None:
    """Which of the models a folder holds, whole; None where it holds no checkpoint."""
    if not folder.exists():
        return None
    try:
        found = HookedTransformer.from_pretrained(folder)
    except converters.CheckpointError as error:
        if "has no config.json" in str(error):
            return None
        raise
    same = [
        found.config == model.config
        and all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
        for model in models
    ]
    assert sum(same) == 1, f"{folder} holds {sum(same)} of the models"
    try:
        assert tokenizer_of(found) == tokenizer_of(models[same.index(True)]), "the tokenizer is of another model"
    except (FileNotFoundError, TypeError):
        if not racing:  # nobody saved over it since it was loaded
            raise
    return same.index(True)


class Steps:
    """What this process does to the file system, counted; at step `last` it is killed."""

    done, last = 0, None

    def __call__(self, event: str, arguments: Any) -> None:
        if event.startswith(("os.", "shutil.", "fcntl.", "open")):
            self.done += 1
            if self.done == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


steps = Steps()


def forked(work: Callable[[], None], kill_at: int | None = None) -> int:
    """Runs `work` in a child; `kill_at`: which of its steps is its last."""
    child = os.fork()
    if child:
        return child
    steps.done, steps.last = 0, kill_at
    try:
        work()
    except FileExistsError:
        os._exit(REFUSED)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(folder: Path, start: str, older: HookedTransformer) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if start != "new":
        folder.mkdir()
    if start == "older":
        older.save_pretrained(folder)


def clean(folder: Path) -> None:
    left = [each for each in folder.parent.rglob("*") if each.name.startswith(".")]
    assert not left, f"left behind: {left}"


def kill(write: Callable, folder: Path, models: list[HookedTransformer], tries: int) -> None:
    """Kills a saver at its steps, and by the clock, over nothing, an empty folder and (a save) the older model."""
    older, newer = models
    starts = ["new", "empty", *(["older"] if write is save else [])]
    takes = {}
    for start in starts:
        prepare(folder, start, older)
        steps.done, before = 0, time.perf_counter()
        write(newer, folder)
        takes[start] = steps.done, time.perf_counter() - before
    draw, killed, outcomes = random.Random(0), 0, set()
    for i in range(tries):
        start = starts[i % len(starts)]
        count, seconds = takes[start]
        prepare(folder, start, older)
        if i % 5:
            child = forked(lambda: write(newer, folder), kill_at=draw.randint(1, count))
        else:
            child = forked(lambda: write(newer, folder))
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        killed += status(child) == -signal.SIGKILL
        found = held(folder, models)
        assert found in {"new": (None, 1), "empty": (None, 1), "older": (0, 1)}[start], (start, found)
        assert start != "new" or found == 1 or not folder.exists()
        outcomes.add((start, found))
        if write is save or found is None:  # an export into a checkpoint is refused
            write(newer, folder)
            assert held(folder, models) == 1
            clean(folder)
    assert killed > 0.7 * tries, killed
    assert outcomes == {(start, found) for start in starts for found in (0 if start == "older" else None, 1)}, outcomes


def race(write: Callable, folder: Path, models: list[HookedTransformer], tries: int) -> None:
    """Two savers at once, and beside them a reader."""
    starts = ["new", "empty", *(["older"] if write is save else [])]
    for i in range(tries):
        start = starts[i % len(starts)]
        prepare(folder, start, models[0])
        children = [forked(lambda model=model: write(model, folder)) for model in models]
        if i % 4 == 2:
            for _ in range(5):
                assert held(folder, models, racing=True) is not None or start != "older"
        codes = [status(child) for child in children]
        assert sorted(codes) == ([0, 0] if write is save else [0, REFUSED]), codes
        found = held(folder, models)
        assert found is not None
        assert write is save or codes[found] == 0
        clean(folder)


if __name__ == "__main__":
    sys.addaudithook(steps)
    os.fsync = lambda file: None  # type: ignore[assignment]  # what a killed process wrote, the system still has
    torch.set_num_threads(1)
    task, kind, tries, target, *sources = sys.argv[1:]
    loaded = [HookedTransformer.from_pretrained(source) for source in sources]
    writer, place = {"save": save, "export": export}[kind], Path(target)
    writer(loaded[0], place.parent / "first")  # imports what a save imports, once
    {"kill": kill, "race": race}[task](writer, place, loaded, int(tries))
