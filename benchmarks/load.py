"""From a checkpoint's file to the first logits, against transformers': `python -m benchmarks.load`.

Each load is a process of its own, forked once everything is imported, so that its peak memory is its own; the file is
in the system's cache. Peak is what the process grew by, mapped pages of the file included.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import converters
from benchmarks.pairs import families, pair, tokens
from transformer_std import HookedTransformer

RUNS = 5


@torch.no_grad()
def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    table = Table(
        "family", "file, MB", "ours, ms", "transformers, ms", "ratio", "ours, peak MB", "transformers, peak MB"
    )
    for family in families():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "checkpoint"
            ours, _ = pair(family, "middle")
            converters.export(ours.to(torch.bfloat16), folder)
            del ours
            mine, theirs = [], []
            for _ in range(RUNS):
                mine.append(measured(lambda: HookedTransformer.from_pretrained(folder)(tokens("tiny"))))  # noqa: B023
                theirs.append(measured(lambda: load_theirs(folder)(tokens("tiny")).logits))  # noqa: B023
            (fast, small), (slow, large) = (map(statistics.median, zip(*each, strict=True)) for each in (mine, theirs))
            size = (folder / "model.safetensors").stat().st_size / 1e6
            times = [f"{1000 * fast:.0f}", f"{1000 * slow:.0f}", f"{fast / slow:.2f}"]
            table.add_row(family, f"{size:.0f}", *times, f"{small:.0f}", f"{large:.0f}")
    Console(width=120).print(table)


def load_theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def measured(function: Callable[[], Any]) -> tuple[float, float]:
    """Seconds and megabytes of a call, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a forked process has none of its parent's threads
        before, start = peak(), time.perf_counter()
        function()
        os.write(write, f"{time.perf_counter() - start} {peak() - before}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        seconds, megabytes = map(float, answer.read().split())
    return seconds, megabytes


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
