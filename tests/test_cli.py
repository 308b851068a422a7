"""The commands, as a shell runs them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import converters
from converters import cli
from tests.tiny import BASES, Recipe
from transformer_std.components import functions

Folders = Callable[[Recipe], Path]


@pytest.fixture
def run() -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        with cli.console.capture() as output:
            done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        return done.exit_code, output.get() + done.output

    return run


def test_demo(run: Callable[..., tuple[int, str]]) -> None:
    status, output = run("demo")
    assert status == 0, output
    for family in converters.families():
        assert f"│ {family} " in output
    assert "no │" not in output


@pytest.mark.parametrize("base", BASES, ids=lambda recipe: recipe.id)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_verify(base: Recipe, attn: str, run: Callable[..., tuple[int, str]], checkpoints: Folders) -> None:
    folder = checkpoints(base)
    status, output = run("verify", folder, "--attn-implementation", attn, "--dtype", "bfloat16")
    assert status == 0, output
    assert f"verify {folder} bfloat16 {attn}: bit-equal" in output


def test_verify_names_the_first_value_that_departs(
    run: Callable[..., tuple[int, str]], checkpoints: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = functions.turn
    monkeypatch.setattr("transformer_std.components.functions.turn", lambda x, *rest: turn(x, *rest) + 1e-3)
    status, output = run("verify", checkpoints(BASES[0]))
    assert status == 1
    assert "layers.0.self_attn.attention_queries (by 0.001" in output
    assert "DIFFERS" in output


def test_verify_for_continuous_integration(
    run: Callable[..., tuple[int, str]], checkpoints: Folders, tmp_path: Path
) -> None:
    files = {"row.json": [1, 2, 3, 4, 5], "rows.json": [[1, 2, 3], [7, 8, 9]]}
    for name, tokens in files.items():
        (tmp_path / name).write_text(json.dumps(tokens))
    report = tmp_path / "report.json"
    for base in BASES:
        options = ["--layers", "--json", report, "--tokens", tmp_path / "row.json", "--tokens", tmp_path / "rows.json"]
        status, output = run("verify", checkpoints(base), *options)
        assert status == 0, output
        found = json.loads(report.read_text())
        assert found["bit_equal"]
        assert found["summary"] in output
        assert [each["tokens"] for each in found["comparisons"]] == [5, 6]
        assert all(each["values"] > 40 and each["first_departure"] is None for each in found["comparisons"])
        assert found == json.loads(
            json.dumps(
                converters.verify(
                    checkpoints(base), layers=True, token_files=[tmp_path / name for name in files]
                ).to_dict()
            )
        )
    (tmp_path / "row.json").write_text("[[1, 2], [3]]")
    status, output = run("verify", checkpoints(BASES[0]), "--tokens", tmp_path / "row.json")
    assert status == 2
    assert "row.json is no JSON list of token ids" in output


def test_verify_finds_a_tensor_read_otherwise(
    run: Callable[..., tuple[int, str]], checkpoints: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from converters import phi

    swapped = [
        dataclasses.replace(rule, theirs=rule.theirs.replace("q_proj.bias", "k_proj.bias"))
        if "q_proj.bias" in rule.sources[0]
        else dataclasses.replace(rule, theirs=rule.theirs.replace("k_proj.bias", "q_proj.bias"))
        if "k_proj.bias" in rule.sources[0]
        else rule
        for rule in phi.WEIGHTS
    ]
    monkeypatch.setattr("converters.phi.WEIGHTS", swapped)
    status, output = run("verify", checkpoints(BASES[0]))
    assert status == 1
    assert "DIFFERS" in output


def test_a_project_verifies_its_own_checkpoint(checkpoints: Folders, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["converters.pytest_plugin"]\n')
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(verify_checkpoint):\n"
        f"    report = verify_checkpoint({str(checkpoints(BASES[1]))!r}, layers=True)\n"
        "    assert report.comparisons\n"
        "def test_not(verify_checkpoint, monkeypatch):\n"
        "    monkeypatch.setattr('converters.verification.Report.bit_equal', False)\n"
        f"    verify_checkpoint({str(checkpoints(BASES[1]))!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    root = Path(cli.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "verify " in done.stdout


def test_support_reads_the_config_alone(run: Callable[..., tuple[int, str]], own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    (folder / "model.safetensors").unlink()
    status, output = run("support", folder)
    assert status == 0
    assert "Queries [batch 6 seq 16]" in output
    assert "all layers: the block is parallel" in output
    assert "Logits [batch seq 131]" in output


def test_errors_are_one_line(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, output = run("support", tmp_path)
    assert status == 2
    assert f"{tmp_path} has no config.json" in output
    assert "Traceback" not in output
    assert torch.is_grad_enabled()
