from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import transformers

from tests.tiny import BASES, FAMILIES, MASK, NAMED, RECIPES, STRUCTURES, Folders, Recipe, build, prompt
from transformer_std import HookedTransformer

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

QUICK = NAMED["phi3-base"]
QUICK_FILES = {f"test_{name}.py" for name in ("components", "hooks", "names", "decomposition", "interventions")}


@pytest.fixture(autouse=True)
def annotations(request: pytest.FixtureRequest) -> None:
    """Are checked, which takes longer than a tiny model's products, but not in a test marked `unchecked`."""
    jaxtyping.config.update("jaxtyping_disable", request.node.get_closest_marker("unchecked") is not None)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a recipe's checkpoint, made once; read-only by agreement."""
    made: dict[str, Path] = {}

    def folder(recipe: Recipe) -> Path:
        if recipe.id not in made:
            made[recipe.id] = build(recipe, tmp_path_factory.mktemp(recipe.id))
        return made[recipe.id]

    return folder


@pytest.fixture
def own_copy(checkpoints: Folders, tmp_path: Path) -> Folders:
    """A copy of a recipe's checkpoint that a test may damage."""

    def folder(recipe: Recipe) -> Path:
        return Path(shutil.copytree(checkpoints(recipe), tmp_path / recipe.id))

    return folder


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.id)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Every recipe: for what is a matter of numbers."""
    return request.param


@pytest.fixture(params=STRUCTURES, ids=lambda recipe: recipe.id)
def structure(request: pytest.FixtureRequest) -> Recipe:
    """One recipe of each structure: for the machinery, which no number changes."""
    return request.param


@pytest.fixture(params=FAMILIES, ids=lambda recipe: recipe.id)
def family(request: pytest.FixtureRequest) -> Recipe:
    """One recipe of each family: for what its tables and its reading of a config decide."""
    return request.param


@pytest.fixture(params=BASES, ids=lambda recipe: recipe.id)
def base(request: pytest.FixtureRequest) -> Recipe:
    """One recipe of each family whose machinery differs: for what the blocks decide."""
    return request.param


@pytest.fixture
def model(base: Recipe, checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(base))


@pytest.fixture
def cache(model: HookedTransformer) -> Any:
    """Every value of a prompt that is padded on the left."""
    with torch.no_grad():
        return model.run_with_cache(prompt(), attention_mask=MASK)[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """`quick` are the files named above and the tests marked so; of those that go through recipes, one recipe."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if any(params.get(each, QUICK) != QUICK for each in ("recipe", "structure", "family", "base")):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "quick"]
        elif item.path.name in QUICK_FILES:
            item.add_marker(pytest.mark.quick)
