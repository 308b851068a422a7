"""How time grows: with the length of the prompt, the batch, the values that are watched: `python -m benchmarks.growth`.

Length and batch (of 128 tokens) at the long size, two blocks of width 512, against transformers' plain forward.
Watched values at the tiny size, where they can be seen at all, against transformers with as many forward hooks, each
keeping its module's output. No curve is to be steeper than transformers': the last row of each is the time that is
added between its first point and its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.pairs import families, medians, pair, tokens
from benchmarks.plots import curves
from benchmarks.rows import Row, run
from benchmarks.sizes import SIZES
from transformer_std import HookedTransformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16)
WATCHED = (1, 2, 4, 8, 16, 32)
RUNS = 3


@torch.no_grad()
def measure() -> Iterator[Row]:
    names = families()
    for family in names:
        ours, theirs = pair(family, "long")
        small = pair(family, "tiny")
        for what, at, call in (
            ("length", LENGTHS, lambda n: forward(ours, theirs, (1, n))),  # noqa: B023
            ("batch", BATCHES, lambda n: forward(ours, theirs, (n, 128))),  # noqa: B023
            ("watched", WATCHED, lambda n: watched(*small, n)),  # noqa: B023
        ):
            yield from curve(family, what, at, call)


def curve(family: str, what: str, at: tuple[int, ...], call: Callable[[int], list[float]]) -> Iterator[Row]:
    found = [Row(family, str(n), what, mine, "transformers", theirs) for n in at for mine, theirs in [call(n)]]
    yield from found
    mine, theirs = found[-1].ours - found[0].ours, found[-1].theirs - found[0].theirs
    yield Row(family, f"{at[0]} to {at[-1]}", f"{what}, added", mine, "transformers", theirs, 1.0)


def forward(ours: HookedTransformer, theirs: Any, shape: tuple[int, int]) -> list[float]:
    prompt = tokens(shape)
    runs = RUNS if prompt.numel() > 1000 else 3 * RUNS
    return medians(runs, lambda: ours(prompt), lambda: theirs(prompt))


def watched(ours: HookedTransformer, theirs: Any, count: int) -> list[float]:
    """`count` values on ours that its fast path computes, `count` modules' outputs on transformers' side."""
    prompt = tokens("tiny")
    slow = ("attention_scores", "attention_probabilities", "attention_result")
    names = [name for name, point in ours.names.points.items() if point.layer is not None and point.value not in slow]
    modules = [each for each in theirs.modules() if not list(each.children())][:count]
    assert len(modules) == count

    def hooked() -> None:
        kept: list[Any] = []
        handles = [each.register_forward_hook(lambda module, args, output: kept.append(output)) for each in modules]
        theirs(prompt)
        for handle in handles:
            handle.remove()

    return medians(SIZES["tiny"]["runs"], lambda: ours.run_with_cache(prompt, names_filter=names[:count]), hooked)


def draw(figure: Figure, rows: list[Row]) -> None:
    curves(figure, [row for row in rows if row.size.isdigit()])  # the points, without what is added between them


if __name__ == "__main__":
    run("growth", measure())
