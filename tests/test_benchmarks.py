"""What the benchmarks compare is what they say; their figures are theirs alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import publish, rows
from benchmarks.__main__ import ALL
from benchmarks.idle import bare
from benchmarks.limit import Recorded
from benchmarks.rows import Result, Row, stored
from tests.tiny import BASES, Recipe, prompt
from transformer_std import HookedTransformer

ROWS = [
    Row("phi", "tiny", "forward", 1.0, "a peer", 2.0, 0.4),
    Row("phi", "tiny", "memory", 3, "it", 2.0),
]


@pytest.mark.parametrize("base", BASES, ids=lambda recipe: recipe.id)
@torch.no_grad()
def test_the_bare_model_has_no_hook_points(base: Recipe, checkpoints: Callable[[Recipe], Path]) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base))
    stripped, fired = bare(model), []
    assert torch.equal(stripped(prompt()), model(prompt()))
    with stripped.hooks(fwd_hooks=[(lambda name: True, lambda value, hook: fired.append(hook.name))]):
        stripped(prompt())
    assert not fired
    assert all(one is other for one, other in zip(stripped.parameters(), model.parameters(), strict=True))


@torch.no_grad()
def test_recorded_products_give_what_they_gave(checkpoints: Callable[[Recipe], Path]) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    with Recorded() as recorded:
        logits = model(prompt())
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(recorded.calls) == len(linears) + model.num_layers
    assert torch.equal(recorded.calls[-1]().view_as(logits), logits)


def test_a_run_writes_its_result_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    pages = [
        publish.DOCS / "benchmarks.md",
        publish.DOCS.parent / "README.md",
        publish.DOCS.parent / "benchmarks/README.md",
    ]
    before = [page.stat().st_mtime_ns for page in pages]
    rows.run("forward", iter(ROWS))
    assert [file.name for file in tmp_path.rglob("*.*")] == ["forward.json"]
    assert [page.stat().st_mtime_ns for page in pages] == before
    assert Result.read("forward") == Result("forward", rows.machine(), ROWS)


def test_every_benchmark_has_a_result_that_says_its_machine() -> None:
    assert sorted(ALL) == [result.name for result in stored()]
    for result in stored():
        assert result.rows
        assert result.machine.keys() == rows.machine().keys()


def test_the_page_is_of_the_results() -> None:
    assert (publish.DOCS / "benchmarks.md").read_text() == publish.page(stored())


def test_the_plots_are_of_the_results() -> None:
    page = (publish.DOCS / "benchmarks.md").read_text()
    shown = re.findall(r"!\[\w+\]\(benchmarks/(\w+\.svg)\)", page)
    assert shown == sorted(file.name for file in publish.PLOTS.iterdir())
    assert "growth.svg" in shown
    for name in shown:
        assert publish.digest(Result.read(name.removesuffix(".svg"))) in (publish.PLOTS / name).read_text()


def test_a_table_is_of_one_machine() -> None:
    results = stored()
    at = [result.name for result in results].index("load")
    results[at] = dataclasses.replace(results[at], machine=results[at].machine | {"torch": "2.14.0"})
    with pytest.raises(SystemExit, match=r"forward and load are of different machines .*torch 2.14.0"):
        publish.page(results)


def test_every_line_of_the_summary_has_figures() -> None:
    lines = [line.split("|")[1:-1] for line in publish.summary(stored()).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(publish.LINES)
    assert all(cell.strip() for line in lines[2:] for cell in line)


def test_rows() -> None:
    assert [row.met for row in ROWS] == [False, True]
    assert ROWS[0].cells()[-2:] == ["0.50", "0.40 missed"]
    assert ROWS[1].cells()[-2:] == ["1.50", ""]
