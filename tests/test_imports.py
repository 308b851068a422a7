"""What importing costs, and that no module needs another to be imported first."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from converters.tiny import make_checkpoint
from tests.tiny import BASES, Folders, prompt
from transformer_std import HookedTransformer

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("transformer_std", "converters")
    for path in (ROOT / package).rglob("*.py")
)


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_families_are_listed_without_importing_anything() -> None:
    code = (
        "import sys, converters\n"
        "before = set(sys.modules); print(*converters.families())\n"
        "try: converters.read_config({'model_type': 'mamba'})\n"
        "except converters.ConfigError as error: print(error)\n"
        "assert set(sys.modules) == before\n"
        "converters.read_config({'model_type': 'phi', 'vocab_size': 9})\n"
        "print(*{f'converters.families.{name}' for name in converters.families()} & set(sys.modules))"
    )
    listed, error, imported = run(code).splitlines()
    names = [name for name in MODULES if isinstance(getattr(importlib.import_module(name), "WEIGHTS", None), list)]
    assert [f"converters.families.{name}" for name in listed.split()] == names
    assert error == f"model_type is 'mamba'; supported are {', '.join(listed.split())}"
    assert imported == "converters.families.phi"


def only_what_is_declared() -> str:
    """Code after which no package can be imported that is neither declared by the project nor by one that is."""
    declared, waiting = set(), ["transformer-std"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in declared:
            continue
        declared.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):  # not on this system
            wanted = [Requirement(line) for line in metadata.requires(name) or ()]
            waiting += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    absent = [
        top
        for top, names in metadata.packages_distributions().items()
        if not declared & {canonicalize_name(name) for name in names}
    ]
    assert {"pytest", "_pytest", "beartype"} <= set(absent)
    return f"import sys\nsys.modules |= dict.fromkeys({absent!r})\n"


def test_the_demo_needs_nothing_that_is_not_declared() -> None:
    run(only_what_is_declared() + "from converters.cli import app; app(['demo'])")


WITHOUT = """
import sys
for name in ("transformers", "tokenizers"):
    sys.modules[name] = None
import json, torch, converters
from typer.testing import CliRunner
from converters.cli import app
from transformer_std import HookedTransformer

quiet, speaks, folder = sys.argv[1:]
ids = torch.tensor([[3, 4]])

def call(*line):
    done = CliRunner().invoke(app, line)
    print(json.dumps([done.exit_code, done.output]))

def fails(call, *args, **options):
    try:
        call(*args, **options)
    except ImportError as error:
        print(json.dumps(["ImportError", f"error: {error}\\n"]))

call("--help"); call("verify", "--help"); call("support", quiet); call("support", speaks)
call("convert", quiet, f"{folder}/ours"); call("export", quiet, f"{folder}/theirs")
call("demo"); call("verify", quiet)
model = HookedTransformer.from_pretrained(speaks)
assert model.generate(ids, max_new_tokens=2).shape == (1, 4)
fails(model, "the cat")
fails(model.generate, ids, max_new_tokens=2, do_sample=True, top_k=3)
fails(model.generate, ids, max_new_tokens=2, stop_strings=["cat"])
fails(converters.verify, quiet)
"""


def test_what_needs_transformers_says_so_and_all_else_works(checkpoints: Folders, tmp_path: Path) -> None:
    make_checkpoint("phi", tmp_path / "speaks")
    lines = run(WITHOUT, checkpoints(BASES[0]), tmp_path / "speaks", tmp_path).splitlines()
    found = [json.loads(line) for line in lines]
    assert [status for status, _ in found] == [0] * 6 + [2] * 2 + ["ImportError"] * 4, found
    for _, text in found[6:]:
        assert re.fullmatch(r"error: .* needs transformers, which is not installed: pip install transformers\n", text)


def test_every_module_can_be_imported_first() -> None:
    loaded = set()  # by the package above, so before any module of it
    for package in ("transformer_std", "converters"):
        loaded |= set(json.loads(run(f"import sys, json, {package}; print(json.dumps(list(sys.modules)))")))
    later = [name for name in MODULES if name not in loaded]
    assert len(later) > 20
    code = (
        "import os, sys, importlib, torch, transformers, torch.export, torch._dynamo\n"  # what takes time
        "from transformers import AutoConfig, AutoTokenizer, PreTrainedModel\n"
        f"for name in {later!r}:\n"
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


def test_our_format_runs_where_transformers_is_absent(checkpoints: Folders, tmp_path: Path) -> None:
    models = [HookedTransformer.from_pretrained(checkpoints(base)) for base in BASES]
    for base, model in zip(BASES, models, strict=True):
        model.save_pretrained(tmp_path / base.id)
    code = (
        "import sys\nfor name in ('transformers', 'huggingface_hub', 'tokenizers'): sys.modules[name] = None\n"
        "import torch\ntorch.set_num_threads(1)\nfrom transformer_std import HookedTransformer\n"
        f"tokens = torch.tensor({prompt().tolist()})\n"
        "for folder in sys.argv[1:]:\n"
        "    model = HookedTransformer.from_pretrained(folder)\n"
        "    print(model(tokens).double().sum().item(), len(model.run_with_cache(tokens)[1]))"
    )
    lines = run(code, *(tmp_path / base.id for base in BASES)).splitlines()
    expected = [(model(prompt()).double().sum().item(), len(model.names.points)) for model in models]
    assert [(float(line.split()[0]), int(line.split()[1])) for line in lines] == expected


@pytest.mark.quick
def test_the_library_never_names_a_family() -> None:
    files = list((ROOT / "transformer_std").rglob("*.py"))
    assert len(files) > 20
    for path in files:
        text = path.read_text().lower()
        for name in ("phi3", "phimoe", "qwen", "afmoe", "trinity", "model_type", "architecture"):
            assert name not in text, f"{path.name} says {name}"


def imported(name: str) -> Iterator[str]:
    """The project's modules that one names in its imports, wherever they stand in it, for types too."""
    path = ROOT.joinpath(*name.split("."))
    for node in ast.walk(ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())):
        names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        inside = [f"{node.module}.{each}" for each in names] if isinstance(node, ast.ImportFrom) else names
        outer = [node.module] if isinstance(node, ast.ImportFrom) else []
        found = [each for each in inside if each in MODULES]
        yield from found if len(found) == len(inside) else [*found, *(each for each in outer if each in MODULES)]


@pytest.mark.quick
def test_no_module_imports_one_that_leads_back_to_it() -> None:
    """But for one arrow: `from_pretrained` reaches up to where checkpoints are read."""
    graph = {name: set(imported(name)) for name in MODULES}
    assert "converters.loading" in graph["transformer_std.model"]
    graph["transformer_std.model"].remove("converters.loading")
    assert sum(map(len, graph.values())) > 200
    assert list(TopologicalSorter(graph).static_order())
    ups = {
        name
        for name, found in graph.items()
        if name.startswith("transformer_std") and any("converters" in each for each in found)
    }
    assert not ups
