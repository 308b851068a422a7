"""Hook points that nothing watches, against the same model with every one taken out: `python -m benchmarks.idle`.

The bare model is ours with other forwards: their source, less the calls of hook points and the questions whether one is
watched.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.pairs import families, medians, pair, tokens
from benchmarks.rows import Row, run
from benchmarks.sizes import SIZES
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.hosts import Host, own_values

QUESTIONS = {"watched", "writes"}


class Bare(ast.NodeTransformer):
    """`self.value(x)` and `route.show(host.value, x)` become `x`, `normed(norm, x, self.value)` becomes `norm(x)`;
    `self.value.watched` becomes False."""

    def __init__(self, values: set[str]):
        self.values = values

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._is_value(node.func):
            return node.args[0]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "show":
            return node.args[1]
        if isinstance(node.func, ast.Name) and node.func.id == "normed":
            return ast.Call(node.args[0], [node.args[1]], [])
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return ast.Constant(False) if node.attr in QUESTIONS and self._is_value(node.value) else node

    def _is_value(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in self.values


def bare(model: torch.nn.Module) -> Any:
    """A copy of the model, on the same weights, whose forwards know no hook points."""
    copied = copy.deepcopy(model, {id(each): each for each in model.parameters()})
    values = {name for module in model.modules() if isinstance(module, Host) for name in own_values(type(module))}
    changed: dict[type, type] = {}
    for module in copied.modules():
        cls = type(module)
        if cls not in changed and cls.__module__.startswith("transformer_std"):
            changed[cls] = type("Bare" + cls.__name__, (cls,), _methods(cls, values))
        module.__class__ = changed.get(cls, cls)
    return copied


def _methods(cls: type, values: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("transformer_std") or base is Host:
            continue
        for name, method in vars(base).items():
            if isinstance(method, types.FunctionType) and name != "__init__":
                source = textwrap.dedent(inspect.getsource(method))
                tree = Bare(values).visit(ast.parse(source))
                if ast.unparse(tree) != ast.unparse(ast.parse(source)):
                    scope: dict[str, Any] = {}
                    exec(
                        compile(ast.fix_missing_locations(tree), name, "exec"),
                        vars(sys.modules[base.__module__]),
                        scope,
                    )
                    found[name] = scope[name]
    return found


@torch.no_grad()
def measure() -> Iterator[Row]:
    names = families()
    for family in names:
        ours, _ = pair(family, "tiny")
        stripped, prompt = bare(ours), tokens("tiny")
        assert torch.equal(stripped(prompt), ours(prompt))
        for name in ("layer_output", "attention_queries", "mlp_neurons"):
            seen: list[HookPoint] = []
            with stripped.hooks(fwd_hooks=[(name, lambda value, hook: seen.append(hook))]):  # noqa: B023
                stripped(prompt)
            assert not seen, f"{name} was not taken out"
        mine, theirs = medians(3 * SIZES["tiny"]["runs"], lambda: ours(prompt), lambda: stripped(prompt))  # noqa: B023
        yield Row(family, "tiny", "forward", mine, "no hook points", theirs, 1.03)


if __name__ == "__main__":
    run("idle", measure())
