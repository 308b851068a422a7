"""A plain forward against transformers' (sdpa, grouped_mm): `python -m benchmarks.forward`.

transformers keeps keys and values in a plain call, too; the second row is against a call that is told not to. At the
long size the peak of the memory that a forward takes, over the weights, is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.pairs import medians, pairs, tokens
from benchmarks.plots import bars
from benchmarks.rows import Row, run
from benchmarks.sizes import SIZES

draw = bars
TARGETS = {"tiny": 0.55, "middle": 1.0, "long": 1.0}


@torch.no_grad()
def measure() -> Iterator[Row]:
    for family, size, ours, theirs in pairs(*TARGETS):
        target = TARGETS[size]
        prompt = tokens(size)
        assert torch.equal(ours(prompt), theirs(prompt).logits)
        calls = (
            lambda: ours(prompt),  # noqa: B023
            lambda: theirs(prompt),  # noqa: B023
            lambda: theirs(prompt, use_cache=False),  # noqa: B023
        )
        mine, plain, lean = medians(SIZES[size]["runs"], *calls)
        yield Row(family, size, "forward", mine, "transformers", plain, target)
        yield Row(family, size, "forward", mine, "transformers, use_cache=False", lean)
        if size == "long":
            mine, plain, lean = map(peak, calls)
            yield Row(family, size, "memory", mine, "transformers", plain, target, "MB")
            yield Row(family, size, "memory", mine, "transformers, use_cache=False", lean, unit="MB")


def peak(function: Callable[[], Any]) -> float:
    """Megabytes of tensors that a call holds at the most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest / 1e6


if __name__ == "__main__":
    run("forward", measure())
