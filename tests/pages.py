"""What the pages say that the code knows: tables of names, and what their code blocks print.

`python -m tests.pages` writes both into the pages; `tests/test_readme.py` says that they are what this file writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import converters
from converters.tiny import make_checkpoint
from transformer_std import HookedTransformer, HookPoint
from transformer_std.hooks import transformer_lens
from transformer_std.hooks.hosts import Host, own_values, subclasses
from transformer_std.layouts import axes, describe

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
HOSTS = {
    "model": "the model",
    "block": "`layers.i`",
    "self_attn": "`layers.i.self_attn`",
    "mlp": "`layers.i.mlp`",
    "shared_experts": "`layers.i.mlp.shared_experts`",
}
# What a page loads from the Hub is a tiny checkpoint of that family here.
RELEASES = {"microsoft/phi-2": "kept/phi", "Qwen/Qwen1.5-MoE-A2.7B": "kept/qwen2_moe"}

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


# -- code blocks ---------------------------------------------------------------------------------------------------


def make_kept(folder: Path) -> None:
    """What `transformer-std demo --keep kept` leaves."""
    for family in converters.families():
        make_checkpoint(family, folder / family)


def run_blocks(page: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each Python block of a page, and what it prints; in one namespace, in the current folder, which has `kept`."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        source = block[1]
        for name, folder in RELEASES.items():
            source = source.replace(f'"{name}"', f'"{folder}"')
        lines_before = text[: block.start(1)].count("\n")
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * lines_before + source, page, "exec"), namespace)
        yield block, "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def with_outputs(page: str, text: str) -> str:
    """The page with an output block behind every block that prints."""
    parts, end = [], 0
    for block, out in run_blocks(page, text):
        shown = f"\n```text\n{out}```\n" if out else ""
        parts += [text[end : block.start()], f"```python\n{block[1]}```\n", shown]
        end = block.end()
    return "".join([*parts, text[end:]])


# -- tables --------------------------------------------------------------------------------------------------------


def with_tables(text: str) -> str:
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def declared(host: str) -> dict[tuple[str, Any], HookPoint]:
    """Every value of a kind of host that a class of the package declares, by name and layout, as the first that has
    them describes it; a test may declare others."""
    classes = [cls for cls in subclasses(Host) if cls.host == host and cls.__module__.startswith("transformer_std.")]
    points = [(name, getattr(cls, name)) for cls in classes for name in own_values(cls)]
    return {(name, point.layout): point for name, point in reversed(points)}


def tiny(family: str) -> HookedTransformer:
    config = {"model_type": family, "pad_token_id": None, **converters.family_of({"model_type": family}).TINY}
    with torch.device("meta"):
        return HookedTransformer(converters.read_config(config))


def values() -> str:
    models = {family: tiny(family) for family in converters.families()}
    rows = []
    for host, where in HOSTS.items():
        for (name, layout), point in reversed(declared(host).items()):
            value = f"shared_experts.{name}" if host == "shared_experts" else name
            having = [family for family, model in models.items() if has(model, value, layout)]
            families = "all" if len(having) == len(models) else ", ".join(having)
            if having:
                rows.append([where, f"`{value}`", f"`{describe(layout)}`", point.description, families])
    return table(["where", "value", "layout", "what it is", "families"], rows)


def has(model: HookedTransformer, value: str, layout: Any) -> bool:
    entries = model.names.by_value[value].values()
    return any(isinstance(entry, HookPoint) and entry.layout is layout for entry in entries)


def transformerlens() -> str:
    layouts = {name: layout for host in HOSTS for name, layout in declared(host)}
    rows = []
    for theirs, ours in transformer_lens.NAMES.items():
        value = ours.rpartition(".")[2]
        names = axes(layouts[value])
        if transformer_lens.positions_first(value):
            names[1], names[2] = names[2], names[1]
        last = theirs.rpartition("hook_")[2]
        short = f"`{last}`" if last in transformer_lens.SHORT else ""
        rows.append([f"`{theirs}`", short, f"`{ours}`", f"`[{' '.join(names)}]`"])
    return table(["TransformerLens' name", "short", "here", "order of axes under TransformerLens' name"], rows)


def axis_names() -> str:
    rows = [[f"`{theirs}`", ", ".join(f"`{each}`" for each in ours)] for theirs, ours in transformer_lens.AXES.items()]
    return table(["TransformerLens' axis", "here"], rows)


TABLES = {"values": values, "transformerlens": transformerlens, "axes": axis_names}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_kept(Path(folder, "kept"))
        for page in PAGES:
            path = ROOT / page
            with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
                os.symlink(Path(folder, "kept"), "kept")
                os.symlink(ROOT / "examples", "examples")
                path.write_text(with_outputs(page, with_tables(path.read_text())))


if __name__ == "__main__":
    main()
