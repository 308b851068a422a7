"""What importing costs, and that no module needs another to be imported first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import BASES, Recipe

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("transformer_std", "converters")
    for path in (ROOT / package).rglob("*.py")
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_can_be_imported_first() -> None:
    code = (
        "import os, sys, importlib, torch\n"
        f"for name in {MODULES!r}:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        importlib.import_module(name); os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )
    run(code)


def test_import_loads_neither_transformers_nor_the_hub() -> None:
    code = "import sys, json, transformer_std; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run(code)))
    assert "torch" in loaded
    assert not loaded & {"transformers", "huggingface_hub", "tokenizers", "converters", "rich", "typer"}


@pytest.mark.parametrize("base", BASES, ids=lambda recipe: recipe.id)
def test_our_format_runs_where_transformers_is_absent(
    base: Recipe, checkpoints: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    from tests.tiny import prompt
    from transformer_std import HookedTransformer

    model = HookedTransformer.from_pretrained(checkpoints(base))
    model.save_pretrained(tmp_path)
    code = (
        "import sys\nfor name in ('transformers', 'huggingface_hub', 'tokenizers'): sys.modules[name] = None\n"
        "import torch\ntorch.set_num_threads(1)\nfrom transformer_std import HookedTransformer\n"
        f"model = HookedTransformer.from_pretrained({str(tmp_path)!r})\n"
        f"tokens = torch.tensor({prompt().tolist()})\n"
        "print(model(tokens).double().sum().item(), len(model.run_with_cache(tokens)[1]))"
    )
    total, values = run(code).split()
    assert float(total) == model(prompt()).double().sum().item()
    assert int(values) == len(model.names.points)


def test_the_library_never_names_a_family() -> None:
    for path in (ROOT / "transformer_std").rglob("*.py"):
        text = path.read_text().lower()
        for name in ("phi3", "phimoe", "qwen", "afmoe", "trinity", "model_type", "architecture"):
            assert name not in text, f"{path.name} says {name}"
