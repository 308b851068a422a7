"""Drawings of rows. A benchmark that has a plot says `draw = bars`, or a function of its own of the same form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bars(figure: Figure, rows: list[Row]) -> None:
    """Each row's ratio, and what it should be at most as a black tick."""
    figure.set_size_inches(8, 1 + 0.22 * len(rows))
    axes = figure.subplots()
    colours = ["tab:blue" if row.met else "tab:orange" for row in rows]
    axes.barh(range(len(rows)), [row.ratio for row in rows], color=colours)
    for at, row in enumerate(rows):
        if row.target is not None:
            axes.plot([row.target] * 2, [at - 0.4, at + 0.4], color="black")
    axes.set_yticks(range(len(rows)), [f"{row.family} {row.size}: {row.what} / {row.peer}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set_xlabel("ratio (bars; orange: goal missed), goal (black)")


def curves(figure: Figure, rows: list[Row]) -> None:
    """Time over size, both in doublings: a line of plots for each `what`, a column for each family."""
    kinds = list(dict.fromkeys(row.what for row in rows))
    families = list(dict.fromkeys(row.family for row in rows))
    figure.set_size_inches(3 * len(families), 2.6 * len(kinds))
    grid = figure.subplots(len(kinds), len(families), squeeze=False)
    for line, kind in zip(grid, kinds, strict=True):
        for axes, family in zip(line, families, strict=True):
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
