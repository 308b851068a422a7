"""A bar where one waits, on standard error, and gone afterwards."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import rich.console

import converters
from converters import progress
from tests.tiny import BASES, Folders
from transformer_std import HookedTransformer


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the bars write, as on a terminal."""
    written, console = io.StringIO(), rich.console.Console

    def on_terminal(*, stderr: bool) -> rich.console.Console:
        assert stderr
        return console(file=written, force_terminal=True, width=80)

    monkeypatch.setattr(rich.console, "Console", on_terminal)
    return written


@pytest.mark.parametrize(("names", "size", "shown"), [(200, 10**9, False), (201, 1, True), (1, 10**9 + 1, True)])
def test_only_where_one_waits(names: int, size: int, shown: bool, terminal: io.StringIO) -> None:
    wanted = [str(i) for i in range(names)]
    assert list(progress.progress(wanted, size, "waiting")) == wanted
    assert ("waiting" in terminal.getvalue()) is shown


def test_load_and_export(
    checkpoints: Folders, tmp_path: Path, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(BASES[0])
    converters.export(HookedTransformer.from_pretrained(folder), tmp_path / "quiet")
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "LARGE", 1000)
    model = HookedTransformer.from_pretrained(folder)
    assert "loading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    terminal.truncate(0)
    converters.export(model, tmp_path / "out")
    assert "exporting" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_nothing_in_a_pipe(
    checkpoints: Folders, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LARGE", 1000)
    HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", "")
