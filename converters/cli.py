"""The command line, `transformer-std`."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

import converters
from converters.verification.difference import Change
from transformer_std import HookedTransformer
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.layouts import axes, describe
from transformer_std.whole import in_use


class Commands(typer.core.TyperGroup):
    """Commands that end in one line and status 2 on whatever stops them: status 1 says that something differs."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except BaseException as error:
            # What typer ends a command with knows its status.
            if hasattr(error, "exit_code") or isinstance(error, KeyboardInterrupt):
                raise
            if context.params["debug"]:
                traceback.print_exc()
            elif not isinstance(error, SystemExit):  # rich's, where nobody reads on
                errors.print(Text("error: ", style="red") + Text(explain(error)), soft_wrap=True)
            raise typer.Exit(2) from None


def explain(error: BaseException) -> str:
    """One line, or the list that an error of ours is."""
    if isinstance(error, (converters.CheckpointError, converters.ConfigError)):
        return "\n".join(map(printable, str(error).splitlines()))
    text = printable(" ".join(str(error).split()))
    if isinstance(error, ModuleNotFoundError) and error.name and text.startswith("No module named"):
        text = f"{text}: pip install {error.name.partition('.')[0]}"
    if isinstance(error, (ValueError, TypeError, OSError, ImportError)) and text:
        return text  # the others' texts are no sentences
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def printable(text: object) -> str:
    """Text from outside, whose control characters would steer the terminal, and whose line ends a reader of lines."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)
# What is printed is text: a path or a prompt may look like markup. Piped output is for other programs: never fold it to
# a guessed width.
PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
console = Console(**PLAIN, width=None if sys.stdout.isatty() else 200)
errors = Console(**PLAIN, stderr=True)

Source = Annotated[str, typer.Argument(help="A checkpoint: a folder or a Hub id.")]
Attention = Annotated[Literal["sdpa", "eager"], typer.Option(help="For both sides.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the weights; the checkpoint's own without.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Folder = Annotated[Path, typer.Argument(help="A new folder.")]
Prompts = Annotated[list[str], typer.Option(help="A text to compare on; may be repeated.")]
TokenFiles = Annotated[
    list[str], typer.Option(help="A JSON file of token ids, a list or a list of rows; may be repeated.")
]
Keep = Annotated[Path | None, typer.Option(help="Leave the checkpoints there, in a new folder.")]
MARKS = {True: Text("yes", style="green"), False: Text("no", style="red")}


@app.callback()
def main(debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False) -> None:
    """Open language models up, exactly."""
    # transformers is imported where it is needed, and not before.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@app.command()
def demo(keep: Keep = None) -> None:
    """Make a tiny checkpoint of every family; load, compare, cache, intervene."""
    from converters.demo import demonstrate

    if keep is not None:
        check_new(keep)
    table = Table(
        "family", "logits = transformers' (sdpa)", "(eager)", "values cached", "intervention", "outcome", "holds"
    )
    good = True
    with console.status("working") as status:
        for found in demonstrate(keep):
            status.update(f"{found.family} done")
            equal = [MARKS[found.bit_equal[attn]] for attn in ("sdpa", "eager")]
            values = f"{found.values} ({found.megabytes:.2f} MB)"
            table.add_row(found.family, *equal, values, found.intervention, found.outcome, MARKS[found.holds])
            good = good and found.holds and all(found.bit_equal.values())
    console.print(table)
    raise typer.Exit(0 if good else 1)


@app.command()
def verify(
    source: Source,
    prompt: Prompts = [],  # noqa: B006
    tokens: TokenFiles = [],  # noqa: B006
    dtype: Dtype = None,
    attn_implementation: Attention = "sdpa",
    layers: Annotated[bool, typer.Option("--layers", help="Compare every value of every block too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    revision: Revision = None,
) -> None:
    """Compare a checkpoint with transformers' reading of it: tensors, logits, values; status 1 where a bit differs."""
    if json_file is not None:
        check_writable(json_file)
    report = converters.verify(
        source,
        prompts=prompt,
        token_files=tokens,
        layers=layers,
        dtype=torch_dtype(dtype),
        attn_implementation=attn_implementation,
        revision=revision,
    )
    table = Table("prompt", "tokens", "bit-equal", "max difference", "top-1 agreement", "values", "first that departs")
    for each in report.comparisons:
        gone = each.first_departure
        departure = "" if gone is None else f"{gone.name} (by {gone.max_difference:.3g})"
        table.add_row(
            printable(each.prompt[:40]),
            str(each.tokens),
            MARKS[each.bit_equal],
            f"{each.max_difference:.3g}",
            f"{each.top1_agreement:.1%}",
            str(each.values or ""),
            departure,
        )
    console.print(table)
    for name in report.unlike_tensors:
        console.print(Text("tensor read otherwise: ", style="red") + Text(printable(name)), soft_wrap=True)
    console.print(printable(report.summary), soft_wrap=True)
    if json_file is not None:
        write_report(json_file, report.to_dict())
    raise typer.Exit(0 if report.bit_equal else 1)


@app.command()
def diff(
    a: Source,
    b: Source,
    prompt: Prompts = [],  # noqa: B006
    tokens: TokenFiles = [],  # noqa: B006
    dtype: Dtype = None,
    attn_implementation: Attention = "sdpa",
    layers: Annotated[bool, typer.Option("--layers", help="A row for every layer.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
) -> None:
    """Compare two checkpoints: settings, parameters, logits, every value by its name; status 1 where a bit differs."""
    if json_file is not None:
        check_writable(json_file)
    found = converters.diff(
        a, b, prompts=prompt, token_files=tokens, dtype=torch_dtype(dtype), attn_implementation=attn_implementation
    )
    for name, (one, other) in found.settings.items():
        console.print(printable(f"setting: {name}: {str(one)[:60]} in A, {str(other)[:60]} in B"), soft_wrap=True)
    for title, changes in (("parameters that differ", found.parameters), ("values that differ", found.values)):
        if changes:
            console.print(changes_by_layer(title, changes) if layers else changes_by_kind(title, changes))
    for reason, names in by_reason(found.uncompared).items():
        console.print(printable(f"not compared: {names}: {reason}"), soft_wrap=True)
    table = Table("prompt", "tokens", "logits bit-equal", "max difference", "top-1 agreement", "KL mean", "KL max")
    for each in found.readings:
        told = [each.max_difference, each.mean_kl, each.max_kl]
        difference, *kl = ("" if number is None else f"{number:.3g}" for number in told)
        agreement = "" if each.top1_agreement is None else f"{each.top1_agreement:.1%}"
        table.add_row(printable(each.prompt[:40]), str(each.tokens), MARKS[each.bit_equal], difference, agreement, *kl)
    console.print(table)
    console.print(printable(found.summary), soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if found.bit_equal else 1)


def changes_by_kind(title: str, changes: Sequence[Change]) -> Table:
    """A row for each kind: where it differs, by how much in the first layer that does and in the one that does most."""
    kinds: dict[str, list[Change]] = {}
    for change in changes:
        kinds.setdefault(change.kind, []).append(change)
    table = Table("name", "layers", "first", "difference", "relative", "most", "difference", "relative", title=title)
    for kind, each in kinds.items():
        most = max(each, key=lambda change: (change.max_difference or 0, change.changed))
        found = [number for change in (each[0], most) for number in (at(change.layer), *by_how_much(change))]
        table.add_row(kind, spans([change.layer for change in each if change.layer is not None]), *found)
    return table


def changes_by_layer(title: str, changes: Sequence[Change]) -> Table:
    table = Table("name", "layer", "difference", "relative", "entries that differ", title=title)
    for change in sorted(changes, key=lambda change: -1 if change.layer is None else change.layer):
        table.add_row(change.kind, at(change.layer), *by_how_much(change), f"{change.changed:.1%}")
    return table


def at(layer: int | None) -> str:
    return "" if layer is None else str(layer)


def by_how_much(change: Change) -> list[str]:
    """The largest difference, and that over the largest magnitude; of integers, how many differ."""
    if change.max_difference is None:
        return [f"{change.changed:.1%} differ", ""]
    return [f"{change.max_difference:.3g}", "" if change.relative is None else f"{change.relative:.3g}"]


def by_reason(uncompared: dict[str, str]) -> dict[str, str]:
    """Why names could not be compared -> the names, those of several blocks in one."""
    found: dict[str, dict[str, None]] = {}
    for name, reason in uncompared.items():
        found.setdefault(reason, {})[re.sub(r"^layers\.\d+\.", "layers.i.", name)] = None
    return {reason: ", ".join(names) for reason, names in found.items()}


@app.command()
def export(source: Source, folder: Folder, dtype: Dtype = None, revision: Revision = None) -> None:
    """Write a checkpoint as a folder that transformers loads: our own format, or another dtype."""
    model = HookedTransformer.from_pretrained(source, dtype=torch_dtype(dtype), revision=revision)
    converters.export(model, folder)
    console.print(printable(f"exported {source} to {folder}"), soft_wrap=True)


@app.command()
def convert(source: Source, folder: Folder, dtype: Dtype = None, revision: Revision = None) -> None:
    """Write a checkpoint in our own format, which loads where transformers is absent."""
    check_new(folder)
    model = HookedTransformer.from_pretrained(source, dtype=torch_dtype(dtype), revision=revision)
    model.save_pretrained(folder)
    console.print(printable(f"converted {source} to {folder}"), soft_wrap=True)


def check_new(folder: Path) -> None:
    """Raises `FileExistsError` where something is in the way: found out before the work."""
    if in_use(folder):
        raise FileExistsError(f"{folder} is not empty: name a new folder")


def check_writable(file: Path) -> None:
    """Raises `OSError` where nothing can be written there: found out before the work."""
    there = file.exists()
    file.open("ab").close()
    if not there:
        file.unlink()


def write_report(file: Path, report: dict[str, Any]) -> None:
    """Writes a report whole, or leaves no file."""
    try:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError:
        if file.is_file():  # and no device
            file.unlink()
        raise


def torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


@app.command()
def support(source: Source) -> None:
    """The standard values of a checkpoint, from its config alone."""
    with torch.device("meta"):
        model = HookedTransformer(converters.read_config(source))
    title = printable(f"{source}: {model.num_layers} blocks")
    table = Table("host", "value", "layout", "what it is", "unavailable", title=title)
    for value, entries in model.names.by_value.items():
        points = [entry for entry in entries.values() if isinstance(entry, HookPoint)]
        reasons: dict[str, list[int]] = {}
        for layer, entry in entries.items():
            if isinstance(entry, str) and layer is not None:
                reasons.setdefault(entry, []).append(layer)
        why = "; ".join(f"{spans(layers, model.num_layers)}: {reason}" for reason, layers in reasons.items())
        if not points:
            table.add_row("", value, "", "", why)
            continue
        host = points[0].name.removesuffix(value).rstrip(".") or "model"
        host = host.replace(f"layers.{points[0].layer}", "layers.i")
        sizes = {axis: size for axis in axes(points[0].layout) if (size := size_of(model, points[0], axis))}
        table.add_row(host, value, describe(points[0].layout, sizes), points[0].description, why)
    console.print(table)


def size_of(model: HookedTransformer, point: HookPoint, axis: str) -> int | None:
    """What the axis measures on the point's host, or else on the model."""
    host = model.get_submodule(point.name.rpartition(".")[0])
    return getattr(host, axis, None) or getattr(model, axis, None)


def spans(layers: list[int], num_layers: int | None = None) -> str:
    """Layer numbers in short: `0-1, 4`."""
    if len(layers) == num_layers:
        return "all layers"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)


if __name__ == "__main__":
    app()
