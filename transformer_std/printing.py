"""`print(model)`: modules with their sizes, and under each host its values; equal neighbours folded into one entry."""

from __future__ import annotations

import textwrap

from torch import nn

from transformer_std.hooks.hosts import Host, Missing
from transformer_std.layouts import describe


def printout(module: nn.Module) -> str:
    """A module, its children and its values, as a tree."""
    if isinstance(module, nn.ModuleList):
        lines = _folded([printout(child) for child in module])
    else:
        children = [(name, child) for name, child in module.named_children() if not isinstance(child, Missing)]
        lines = [f"({name}): {printout(child)}" for name, child in children]
    if isinstance(module, Host):
        points = module.hook_points()
        lines += [f"({name}) -> {describe(point.layout)}: {point.description}" for name, point in points.items()]
    extra = module.extra_repr()
    if not lines:
        return f"{type(module).__name__}({extra})"
    body = textwrap.indent("\n".join(lines), "  ")
    return f"{type(module).__name__}(\n{body}\n)"


def _folded(entries: list[str]) -> list[str]:
    starts = [i for i, entry in enumerate(entries) if i == 0 or entry != entries[i - 1]]
    lines = []
    for start, end in zip(starts, [*starts[1:], len(entries)], strict=True):
        count = end - start
        lines.append(
            f"({start}): {entries[start]}" if count == 1 else f"({start}-{end - 1}): {count} x {entries[start]}"
        )
    return lines
