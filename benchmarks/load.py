"""Loading a checkpoint of 0.5 to 1 GB against transformers': `python -m benchmarks.load`.

Each load is a process of its own, on one thread, forked once everything is imported; the file is in the system's cache.
Private memory is what the process alone holds at the most (anonymous pages), without the mapped pages of the file.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import converters
from benchmarks.pairs import families, pair
from benchmarks.rows import Row, run
from transformer_std import HookedTransformer

RUNS = 3


@torch.no_grad()
def measure() -> Iterator[Row]:
    transformers.utils.logging.disable_progress_bar()
    for family in families():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "checkpoint"
            # in a process of its own, so that the ones that are measured start small
            measured(lambda: write(family, folder))  # noqa: B023
            mine, theirs = [], []
            for _ in range(RUNS):
                mine.append(measured(lambda: HookedTransformer.from_pretrained(folder)))  # noqa: B023
                theirs.append(measured(lambda: load_theirs(folder)))  # noqa: B023
            (fast, small), (slow, large) = (map(statistics.median, zip(*each, strict=True)) for each in (mine, theirs))
            megabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
            size = f"{megabytes:.0f} MB"
            yield Row(family, size, "load", 1000 * fast, "transformers", 1000 * slow)
            yield Row(family, size, "private memory", small, "the file", megabytes, unit="MB")
            yield Row(family, size, "private memory", small, "transformers", large, unit="MB")


def write(family: str, folder: Path) -> None:
    ours, _ = pair(family, "large")
    converters.export(ours.to(torch.bfloat16), folder)


def load_theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def measured(function: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call, and the megabytes of private memory it takes at the most, in a process of its own."""
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a forked process has none of its parent's threads
        gc.freeze()  # nor shall it look through its parent's objects for garbage
        peak, done = [private()], threading.Event()
        watch = threading.Thread(target=lambda: [peak.append(private()) for _ in iter(lambda: done.wait(0.002), True)])
        watch.start()
        start = time.perf_counter()
        kept = function()
        seconds = time.perf_counter() - start
        peak.append(private())
        done.set()
        os.write(write_end, f"{seconds} {max(peak) - peak[0]}".encode())
        del kept
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        seconds, megabytes = map(float, answer.read().split())
    return seconds, megabytes


def private() -> float:
    """Megabytes that this process alone holds."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3


if __name__ == "__main__":
    run("load", measure())
