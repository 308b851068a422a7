"""What the benchmarks compare is what they say; their figures are theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.idle import bare
from benchmarks.limit import Recorded
from tests.tiny import BASES, Recipe, prompt
from transformer_std import HookedTransformer

ROWS = [
    report.Row("phi", "tiny", "forward", 1.0, "a peer", 2.0, 0.4),
    report.Row("phi", "tiny", "memory", 3, "it", 2.0),
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


def test_the_readme_is_of_the_results() -> None:
    assert (report.HERE / "README.md").read_text() == report.readme()
    project = (report.HERE.parent / "README.md").read_text()
    assert report.BEGIN + report.summary() + report.END in project


def test_rows() -> None:
    assert [row.met for row in ROWS] == [False, True]
    assert ROWS[0].cells()[-2:] == ["0.50", "0.40 missed"]
    assert ROWS[1].cells()[-2:] == ["1.50", ""]
