"""The commands, as a shell runs them."""

from __future__ import annotations

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
    monkeypatch.setattr("transformer_std.components.attention.turn", lambda x, *rest: turn(x, *rest) + 1e-3)
    status, output = run("verify", checkpoints(BASES[0]))
    assert status == 1
    assert "layers.0.self_attn.attention_queries (by 0.001" in output
    assert "DIFFERS" in output


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
