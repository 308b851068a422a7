"""Draws the plots and writes `docs/benchmarks.md` from `results/*.json`: `python -m benchmarks.publish`."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

from benchmarks.rows import HEAD, PACKAGES, Result, stored

DOCS = Path(__file__).parent.parent / "docs"
PLOTS = DOCS / "benchmarks"
NOTES = Path(__file__).parent / "notes.md"
# The lines of the summary: what they say, and the rows that they are.
LINES = [
    ("forward, tiny", "forward", "tiny", "forward", "transformers"),
    ("forward, middle", "forward", "middle", "forward", "transformers"),
    ("forward, long", "forward", "long", "forward", "transformers"),
    ("memory, long", "forward", "long", "memory", "transformers"),
    ("64 tokens, tiny", "generate", "tiny", "64 tokens", "transformers"),
    ("64 tokens, middle", "generate", "middle", "64 tokens", "transformers"),
    ("gradients, middle", "gradients", "middle", "forward and backward", "transformers"),
    ("loading", "load", "MB", "load", "transformers"),
    ("cache of everything, tiny", "cache", "tiny", "everything", "TransformerLens"),
    ("cache of everything, middle", "cache", "middle", "everything", "TransformerLens"),
    ("patching, tiny", "patching", "tiny", "cells", "TransformerLens"),
    ("patching, middle", "patching", "middle", "cells", "TransformerLens"),
    ("cache of streams, tiny", "cache", "tiny", "layer_output", "nnsight"),
]


def publish() -> None:
    results = stored()
    (DOCS / "benchmarks.md").write_text(page(results))
    PLOTS.mkdir(exist_ok=True)
    for old in PLOTS.glob("*.svg"):
        old.unlink()
    for result in results:
        if plotted(result):
            plot(result)


def page(results: list[Result]) -> str:
    notes = NOTES.read_text().strip().replace("{summary}", summary(results))
    return "\n\n".join([notes, *map(section, results)]) + "\n"


def summary(results: list[Result]) -> str:
    """A table of ratios: a line a comparison, a column a family."""
    named = {result.name: result for result in results}
    used = [named[name] for name in dict.fromkeys(name for _, name, *_ in LINES)]
    same_machine(used)
    families = list(dict.fromkeys(row.family for row in named["forward"].rows))
    lines = []
    for says, name, size, what, peer in LINES:
        found = {
            row.family: f"{row.ratio:.2f}"
            for row in named[name].rows
            if size in row.size and row.what.endswith(what) and row.peer == peer
        }
        lines.append([says, peer, *(found.get(family, "") for family in families)])
    return f"On {machine(used[0])}.\n\n{table(['', 'against', *families], lines)}"


def same_machine(results: list[Result]) -> None:
    first = results[0]
    for other in results[1:]:
        differ = [key for key in first.machine if first.machine[key] != other.machine[key]]
        if differ:
            key = differ[0]
            raise SystemExit(
                f"{first.name} and {other.name} are of different machines "
                f"({key} {first.machine[key]}, {key} {other.machine[key]}): measure both on one."
            )


def section(result: Result) -> str:
    """What a benchmark says of itself, where it ran, its plot and its rows."""
    about = (benchmark(result).__doc__ or "").strip()
    image = f"![{result.name}](benchmarks/{result.name}.svg)\n\n" if plotted(result) else ""
    lines = table(HEAD, [row.cells() for row in result.rows])
    return f"## {result.name}\n\n{about}\n\nOn {machine(result)}.\n\n{image}{lines}"


def machine(result: Result) -> str:
    on = result.machine
    versions = ", ".join(f"{package} {on[package]}" for package in PACKAGES if on[package])
    return f"{on['cores']} cores of {on['processor']}, {on['threads']} threads; Python {on['python']}, {versions}"


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def plotted(result: Result) -> bool:
    return hasattr(benchmark(result), "draw")


def plot(result: Result) -> None:
    # Here, since the tests write the page where there is no matplotlib.
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure()
    benchmark(result).draw(figure, result.rows)
    # Text as text, and nothing of the day or of chance, so that the same rows are the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": result.name}):
        about = {"Date": None, "Creator": None, "Identifier": digest(result)}
        figure.savefig(PLOTS / f"{result.name}.svg", bbox_inches="tight", metadata=about)


def digest(result: Result) -> str:
    """Goes into a plot: the rows that it shows."""
    return hashlib.sha256(repr(result.rows).encode()).hexdigest()


def benchmark(result: Result) -> Any:
    return importlib.import_module(f"benchmarks.{result.name}")


if __name__ == "__main__":
    publish()
