"""A bar for what takes a while, and nothing for what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable

LONG, LARGE = 200, 1_000_000_000  # tensors, bytes


def progress(names: Collection[str], size: int, doing: str) -> Iterable[str]:
    """`names`, one by one; more than `LONG` of them, or more than `LARGE` bytes behind them, go under a bar on standard
    error, which is gone when they are through."""
    if len(names) <= LONG and size <= LARGE:
        return names
    from rich.console import Console
    from rich.progress import track

    return track(names, description=doing, console=Console(stderr=True), transient=True)
