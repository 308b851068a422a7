"""Where a forward's time goes, and how far it is from its limit: `python -m benchmarks.limit`.

The limit is the time of the matrix products and the attention kernel alone: every call of one that a forward makes is
recorded with its tensors, and the calls are made again with nothing between them. The other rows are the largest shares
of a forward's own time by `torch.profiler`, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pairs import medians, pairs, tokens
from benchmarks.rows import Row, run
from benchmarks.sizes import SIZES

PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu")
LARGEST = 5


class Recorded(TorchDispatchMode):
    """The products of what runs under it, as calls to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.calls.append(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def measure() -> Iterator[Row]:
    for family, size, ours, theirs in pairs("tiny", "middle"):
        prompt, runs = tokens(size), SIZES[size]["runs"]
        with Recorded() as recorded:
            ours(prompt)
        calls = recorded.calls

        def products() -> None:
            for call in calls:  # noqa: B023
                call()

        alone, mine, plain = medians(runs, products, lambda: ours(prompt), lambda: theirs(prompt))  # noqa: B023
        yield Row(family, size, "products alone", alone, "our forward", mine)
        yield Row(family, size, "products alone", alone, "transformers' forward", plain)
        times = kernels(lambda: ours(prompt), runs)  # noqa: B023
        total = sum(times.values())
        for name in sorted(times, key=times.get, reverse=True)[:LARGEST]:  # type: ignore[arg-type]
            yield Row(family, size, name, times[name], "all kernels", total)


def kernels(function: Callable[[], Any], runs: int) -> dict[str, float]:
    """Milliseconds of a call in each kernel itself."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(runs):
            function()
    return {event.key: event.self_cpu_time_total / 1000 / runs for event in recorded.key_averages()}


if __name__ == "__main__":
    run("limit", measure())
