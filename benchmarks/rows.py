"""The rows of a benchmark: measured, printed as a table, and written to `results/NAME.json`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "transformer-lens", "nnsight")
HEAD = ["family", "size", "what", "unit", "ours", "against", "theirs", "ratio", "at most"]


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
        ours, theirs = (f"{each:.3g}" if each < 100 else f"{each:.0f}" for each in (self.ours, self.theirs))
        target = "" if self.target is None else f"{self.target:.2f}" + ("" if self.met else " missed")
        return [self.family, self.size, self.what, self.unit, ours, self.peer, theirs, f"{self.ratio:.2f}", target]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run of a benchmark found, and the machine it ran on."""

    name: str
    machine: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, name: str) -> Result:
        content = json.loads((RESULTS / f"{name}.json").read_text())
        return cls(name, content["machine"], [Row(**row) for row in content["rows"]])

    def write(self) -> None:
        content = {"machine": self.machine, "rows": [dataclasses.asdict(row) for row in self.rows]}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")

    def table(self) -> Table:
        table = Table(*HEAD, title=self.name)
        for row in self.rows:
            table.add_row(*row.cells(), style=None if row.met else "bold")
        return table


def stored() -> list[Result]:
    return [Result.read(file.stem) for file in sorted(RESULTS.glob("*.json"))]


def run(name: str, rows: Iterator[Row]) -> None:
    found = list(track(rows, description=name, console=Console(stderr=True), transient=True))
    result = Result(name, machine(), found)
    Console(width=160).print(result.table())
    result.write()


def machine() -> dict[str, Any]:
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    versions = {package: installed.get(package) for package in PACKAGES}
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
