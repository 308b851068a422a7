"""Rows of a benchmark as a table, a JSON file, a plot, and a section of `benchmarks/README.md`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "transformers", "transformer-lens", "nnsight")


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: `ours` against a peer's number, in `unit`; `target` is what their ratio should be at most."""

    family: str
    size: str
    what: str
    ours: float
    peer: str
    theirs: float
    target: float | None = None
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool:
        return self.target is None or self.ratio <= self.target

    def cells(self) -> list[str]:
        numbers = [f"{each:.3g}" if each < 100 else f"{each:.0f}" for each in (self.ours, self.theirs)]
        target = "" if self.target is None else f"{self.target:.2f}" + ("" if self.met else " missed")
        return [
            self.family,
            self.size,
            self.what,
            self.unit,
            numbers[0],
            self.peer,
            numbers[1],
            f"{self.ratio:.2f}",
            target,
        ]


HEAD = ["family", "size", "what", "unit", "ours", "against", "theirs", "ratio", "at most"]


def run(name: str, rows: Iterator[Row]) -> None:
    """Measures, prints, and writes `results/NAME.json`, its plot and the README's sections."""
    found = list(track(rows, description=name, console=Console(stderr=True), transient=True))
    table = Table(*HEAD, title=name)
    for row in found:
        table.add_row(*row.cells(), style=None if row.met else "bold")
    Console(width=160).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "rows": [dataclasses.asdict(row) for row in found]}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(name, found)
    write()


def machine() -> dict[str, Any]:
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    versions = {package: installed.get(package) for package in PACKAGES}
    return {"cores": os.cpu_count(), "processor": processor(), "python": platform.python_version(), **versions}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def plot(name: str, rows: list[Row]) -> None:
    """Bars of the ratios, the expected ones as ticks; or curves, for what grows. Without matplotlib, none."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = curves(plt, rows) if name == "growth" else bars(plt, rows)
    figure.savefig(RESULTS / f"{name}.png", dpi=80, bbox_inches="tight")
    plt.close(figure)


def bars(plt: Any, rows: list[Row]) -> Any:
    figure, axes = plt.subplots(figsize=(8, 1 + 0.22 * len(rows)))
    axes.barh(
        range(len(rows)), [row.ratio for row in rows], color=["tab:blue" if row.met else "tab:orange" for row in rows]
    )
    for at, row in enumerate(rows):
        if row.target is not None:
            axes.plot([row.target] * 2, [at - 0.4, at + 0.4], color="black")
    axes.set_yticks(range(len(rows)), [f"{row.family} {row.size}: {row.what} / {row.peer}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set_xlabel("ratio (bars), expected at most (black)")
    return figure


def curves(plt: Any, rows: list[Row]) -> Any:
    rows = [row for row in rows if row.size.isdigit()]
    kinds = list(dict.fromkeys(row.what for row in rows))
    names = list(dict.fromkeys(row.family for row in rows))
    figure, grid = plt.subplots(len(kinds), len(names), figsize=(3 * len(names), 2.6 * len(kinds)), squeeze=False)
    for line, kind in zip(grid, kinds, strict=True):
        for axes, family in zip(line, names, strict=True):
            some = [row for row in rows if (row.what, row.family) == (kind, family)]
            at = [int(row.size) for row in some]
            axes.plot(at, [row.ours for row in some], "o-", label="ours")
            axes.plot(at, [row.theirs for row in some], "x--", label=some[0].peer)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{family}: {kind}", fontsize=8)
            axes.tick_params(which="both", labelsize=7)
    grid[0][0].legend(fontsize=7)
    grid[0][0].set_ylabel("ms", fontsize=8)
    figure.tight_layout()
    return figure


# The lines of the summary in the project's README: what they say, and the rows that they are.
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
BEGIN, END = "<!-- what was measured -->\n", "<!-- so far -->"


def write() -> None:
    (HERE / "README.md").write_text(readme())
    project = HERE.parent / "README.md"
    before, _, rest = project.read_text().partition(BEGIN)
    project.write_text(before + BEGIN + summary() + END + rest.partition(END)[2])


def results(name: str) -> list[Row]:
    return [Row(**row) for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]]


def summary() -> str:
    """A table of ratios, a line a comparison and a column a family."""
    names = list(dict.fromkeys(row.family for row in results("forward")))
    lines = [f"| | against | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for says, file, size, what, peer in LINES:
        found = {
            row.family: f"{row.ratio:.2f}"
            for row in results(file)
            if size in row.size and row.what.endswith(what) and row.peer == peer
        }
        lines.append(f"| {says} | {peer} | " + " | ".join(found.get(name, "") for name in names) + " |")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """`benchmarks/README.md`: the notes, what each benchmark says of itself, and what was measured last."""
    parts = [(HERE / "notes.md").read_text().rstrip()]
    for file in sorted(RESULTS.glob("*.json")):
        content = json.loads(file.read_text())
        on = content["machine"]
        versions = ", ".join(f"{package} {on[package]}" for package in PACKAGES if on[package])
        about = importlib.import_module(f"benchmarks.{file.stem}").__doc__ or ""
        lines = ["| " + " | ".join(row.cells()) + " |" for row in results(file.stem)]
        parts.append(
            f"## {file.stem}\n\n{about.strip()}\n\n{on['cores']} cores of {on['processor']}; Python {on['python']}, "
            f"{versions}.\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}\n" + "\n".join(lines)
        )
        if (RESULTS / f"{file.stem}.png").exists():
            parts[-1] += f"\n\n![{file.stem}](results/{file.stem}.png)"
    return "\n\n".join(parts) + "\n"
