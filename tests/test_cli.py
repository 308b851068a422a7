"""The commands, as a shell runs them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from typer.testing import CliRunner

import converters
from converters import cli
from converters.tiny import make_tokenizer
from converters.verification.reference import attention_there_is
from tests.tiny import BASES, Folders, Recipe
from transformer_std.components import rotary


@pytest.fixture
def run() -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        return done.exit_code, done.output

    return run


def test_demo(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, output = run("demo", "--keep", tmp_path / "kept")
    assert status == 0, output
    for family in converters.families():
        assert f"│ {family} " in output
        assert run("verify", tmp_path / "kept" / family)[0] == 0
    assert "no │" not in output
    config = tmp_path / "kept" / "phi" / "config.json"
    written = config.stat().st_mtime_ns
    status, output = run("demo", "--keep", tmp_path / "kept")
    assert status == 2
    assert "kept is not empty: name a new folder" in output
    assert config.stat().st_mtime_ns == written


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_verify(base: Recipe, attn: str, run: Callable[..., tuple[int, str]], checkpoints: Folders) -> None:
    folder = checkpoints(base)
    status, output = run("verify", folder, "--attn-implementation", attn, "--dtype", "bfloat16")
    assert status == 0, output
    compared = attention_there_is(converters.read_config(folder), attn)
    assert f"verify {folder} bfloat16 {compared}: bit-equal" in output


def test_verify_names_the_first_value_that_departs(
    run: Callable[..., tuple[int, str]], checkpoints: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = rotary.turn
    monkeypatch.setattr("transformer_std.components.rotary.turn", lambda x, *rest: turn(x, *rest) + 1e-3)
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
    from converters.families import phi

    swapped = [
        dataclasses.replace(rule, theirs=rule.theirs.replace("q_proj.bias", "k_proj.bias"))
        if "q_proj.bias" in rule.sources[0]
        else dataclasses.replace(rule, theirs=rule.theirs.replace("k_proj.bias", "q_proj.bias"))
        if "k_proj.bias" in rule.sources[0]
        else rule
        for rule in phi.WEIGHTS
    ]
    monkeypatch.setattr(phi, "WEIGHTS", swapped)
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
        "    monkeypatch.setattr('converters.verification.report.Report.bit_equal', False)\n"
        f"    verify_checkpoint({str(checkpoints(BASES[1]))!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    root = Path(cli.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "verify " in done.stdout


@pytest.mark.quick
def test_support_reads_the_config_alone(run: Callable[..., tuple[int, str]], own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    (folder / "model.safetensors").unlink()
    status, output = run("support", folder)
    assert status == 0
    assert "Queries [batch 6 seq 16]" in output
    assert "all layers: the block is parallel" in output
    assert "Logits [batch seq 131]" in output


class Panic(BaseException):
    """What a panic of a library in Rust comes as."""


STOPS: list[tuple[BaseException, str]] = [
    (ValueError("it is not\n  so"), "it is not so"),
    (KeyError("x"), "KeyError: 'x'"),
    (AttributeError("no x"), "AttributeError: no x"),
    (RuntimeError("[Errno 5]\nIn C++"), "RuntimeError: [Errno 5] In C++"),
    (RecursionError("too deep"), "RecursionError: too deep"),
    (AssertionError(), "AssertionError"),
    (MemoryError(), "MemoryError"),
    (EOFError(), "EOFError"),
    (SafetensorError("no space"), "SafetensorError: no space"),
    (ModuleNotFoundError("No module named 'x.y'", name="x.y"), "No module named 'x.y': pip install x"),
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    (Panic("index out of bounds"), "Panic: index out of bounds"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("error", "line"), STOPS, ids=[type(error).__name__ for error, _ in STOPS])
def test_whatever_stops_a_command_is_one_line_and_status_2(
    error: BaseException, line: str, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("converters.verify", stop)
    assert run("verify", "x") == (2, f"error: {line}\n")
    status, output = run("--debug", "verify", "x")
    assert status == 2
    assert "Traceback" in output


@pytest.mark.quick
def test_a_reader_that_leaves_and_an_interrupt(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, wanted in ((SystemExit(1), 2), (BrokenPipeError(32, "Broken pipe"), 2), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr("converters.verify", mock.Mock(side_effect=error))
        assert run("verify", "x")[0] == wanted


@pytest.mark.quick
def test_errors_are_one_line(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, output = run("support", tmp_path)
    assert (status, output) == (2, f"error: {tmp_path} has no config.json\n")
    assert torch.is_grad_enabled()
    assert run("verify", tmp_path, "--dtype", "[/b]")[0] == 2
    assert run("[/b]")[0] == 2


@pytest.mark.quick
def test_help_names_every_command(run: Callable[..., tuple[int, str]]) -> None:
    status, output = run("--help")
    assert status == 0
    for name in ("demo", "verify", "support", "convert", "export"):
        assert name in output
        status, text = run(name, "--help")
        assert status == 0
        assert "Usage" in text


HOSTILE = "a[/b] [red]x[/] :dog:"


@pytest.mark.quick
def test_text_from_outside_is_never_markup(
    run: Callable[..., tuple[int, str]], checkpoints: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / HOSTILE
    assert run("export", checkpoints(BASES[0]), folder) == (0, f"exported {checkpoints(BASES[0])} to {folder}\n")
    make_tokenizer(folder)
    status, output = run("support", folder)
    assert status == 0
    assert f"{HOSTILE}: 3 blocks" in output
    status, output = run("verify", folder, "--prompt", f"{HOSTILE}\n\x1b[2J")
    assert status == 0, output
    assert f"│ {HOSTILE}\\n\\x1b[2J " in output
    assert f"verify {folder} float32 sdpa: bit-equal\n" in output
    status, output = run("convert", folder, tmp_path / f"{HOSTILE}2")
    assert (status, output) == (0, f"converted {folder} to {folder}2\n")
    assert run("convert", folder, folder) == (2, f"error: {folder} is not empty: name a new folder\n")
    assert HOSTILE in run("support", tmp_path / "no" / HOSTILE)[1]


def test_a_report_that_cannot_be_written(
    run: Callable[..., tuple[int, str]], checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What can be seen beforehand stops it before the work; a full disk cannot, and takes nothing of the answer.
    status, output = run("verify", checkpoints(BASES[0]), "--json", "/dev/full")
    assert status == 2
    assert "sdpa: bit-equal\n" in output
    assert "│ random tokens [2, 64] " in output
    assert output.count("error: ") == output.count("No space left on device") == 1

    def half(file: Path, text: str, **_: Any) -> None:
        file.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        assert run("verify", checkpoints(BASES[0]), "--json", tmp_path / "half.json")[0] == 2
    assert not (tmp_path / "half.json").exists()
    compare = mock.Mock(side_effect=AssertionError("it was compared"))
    monkeypatch.setattr("converters.verify", compare)
    for file in (tmp_path / "no" / "report.json", tmp_path):
        status, output = run("verify", checkpoints(BASES[0]), "--json", file)
        assert status == 2
        assert str(file) in output
    compare.assert_not_called()
    assert run("verify", checkpoints(BASES[0]), "--json", tmp_path / "report.json")[0] == 2
    compare.assert_called_once()
    assert not (tmp_path / "report.json").exists()
