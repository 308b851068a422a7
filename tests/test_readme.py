"""The pages: their code runs and prints what they say, their tables are written from the code, their commands exist."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import converters
from converters.cli import app
from tests.pages import BLOCK, HOSTS, PAGES, ROOT, TABLE, declared, make_kept, run_blocks, with_tables
from transformer_std.hooks import transformer_lens

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
WITH_CODE = [page for page in PAGES if BLOCK.search(TEXTS[page])]
WITH_TABLES = [page for page in PAGES if TABLE.search(TEXTS[page])]


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "kept"
    make_kept(folder)
    return folder


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_prints_what_the_page_says(page: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").symlink_to(kept)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend("examples")
    for block, out in run_blocks(page, TEXTS[page]):
        assert out == (block[2] or ""), f"{page}, after\n{block[1]}\n(python -m tests.pages writes it again)"


def test_every_guide_has_code() -> None:
    guides = [page for page in PAGES if page.startswith(("README.md", "docs/guide/"))]
    assert len(guides) >= 10
    assert set(guides) <= set(WITH_CODE)


@pytest.mark.parametrize("page", WITH_TABLES)
def test_tables_are_what_the_generator_writes(page: str) -> None:
    assert with_tables(TEXTS[page]) == TEXTS[page], "python -m tests.pages writes it again"


def test_tables_are_whole() -> None:
    for family in converters.families():
        for page in ("README.md", "docs/families.md"):
            assert f"| `{family}` |" in TEXTS[page], f"{family} in {page}"
    for host in HOSTS:
        assert declared(host)
        for value, _ in declared(host):
            assert f"{value}`" in TEXTS["docs/values.md"], value
    for theirs in transformer_lens.NAMES:
        assert f"`{theirs}`" in TEXTS["docs/transformerlens.md"], theirs


# -- commands ------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Lines of shell blocks, and what stands in backticks and begins as a command."""
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:transformer-std|pytest|python -m) [^`]*)`", prose)
    lines = [re.sub(r"\s#.*", "", line) for line in blocks] + [" ".join(each.split()) for each in inline]
    return [part.strip() for line in lines for part in re.split(r"&&|\|", line) if part.strip()]


def wrong_with(command: str) -> str | None:
    """Why a command of ours could not run; None for one that could, and for others' commands."""
    program, *words = shlex.split(command)
    if program == "transformer-std":
        return wrong_with_ours(words)
    if program == "pytest":
        files = [word.partition("::")[0] for word in words if word.startswith("tests/")]
        marks = [words[at + 1] for at, word in enumerate(words) if word == "-m"]
        missing = [file for file in files if not (ROOT / file).exists()]
        missing += [mark for mark in marks if f'"{mark}: ' not in (ROOT / "pyproject.toml").read_text()]
        return f"there is no {missing}" if missing else None
    if program == "python" and words[:1] == ["-m"] and words[1].partition(".")[0] in ("benchmarks", "tests"):
        return None if find_spec(words[1]) else f"there is no module {words[1]}"
    return None


def wrong_with_ours(words: list[str]) -> str | None:
    group = typer.main.get_command(app)
    known = {option for param in group.params for option in param.opts} | {"--help"}
    names = [word for word in words if not word.startswith("-")]
    if names:
        if names[0] not in group.commands:
            return f"there is no command {names[0]}"
        known |= {option for param in group.commands[names[0]].params for option in param.opts}
    unknown = [word for word in words if word.startswith("--") and word not in known]
    return f"there is no option {unknown}" if unknown else None


@pytest.mark.parametrize("page", [page for page in PAGES if commands(TEXTS[page])])
def test_commands_exist(page: str) -> None:
    assert [f"{each}: {wrong}" for each in commands(TEXTS[page]) if (wrong := wrong_with(each))] == []


@pytest.mark.parametrize(
    "command",
    [
        "transformer-std compare A B",
        "transformer-std verify A --prmpt x",
        "pytest tests/test_nothing.py",
        "pytest -m slow",
        "python -m benchmarks.nothing",
    ],
)
def test_a_command_that_is_wrong_is_found(command: str) -> None:
    assert wrong_with(command)


# -- links ---------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    assert broken_links(page, TEXTS[page]) == []


def test_a_broken_link_is_found() -> None:
    assert broken_links("README.md", "[a](docs/nothing.md) [b](#no-such-heading) [c](https://example.org/x)") == [
        "docs/nothing.md",
        "#no-such-heading",
    ]
