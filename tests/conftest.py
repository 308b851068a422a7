from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny import BASES, RECIPES, Recipe, build

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """The folder of a recipe's checkpoint, made once; read-only by agreement."""
    made: dict[str, Path] = {}

    def folder(recipe: Recipe) -> Path:
        if recipe.id not in made:
            made[recipe.id] = build(recipe, tmp_path_factory.mktemp(recipe.id))
        return made[recipe.id]

    return folder


@pytest.fixture
def own_copy(checkpoints: Callable[[Recipe], Path], tmp_path: Path) -> Callable[[Recipe], Path]:
    """A copy of a recipe's checkpoint that a test may damage."""

    def folder(recipe: Recipe) -> Path:
        return Path(shutil.copytree(checkpoints(recipe), tmp_path / recipe.id))

    return folder


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.id)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a quick test that goes through the recipes, one recipe of each family is quick."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("recipe", BASES[0]) not in BASES:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "quick"]
