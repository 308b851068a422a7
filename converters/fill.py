"""Filling a model from tensors, with an exact account: each of ours once, each of theirs used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from converters.checkpoint import MERGE, CheckpointError
from converters.progress import progress
from converters.rules import Copy, Ignore, Rule, Stack, match, written_by

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
ADAPTED = (".lora_", ".base_layer.", ".modules_to_save.")  # in the names of a model that peft wrapped


class Tensors(Protocol):
    """Named tensors, wherever they are."""

    def __iter__(self) -> Iterable[str]: ...  # type: ignore[override]
    def shape(self, name: str) -> list[int]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def tensor(self, name: str) -> Tensor: ...
    def origin(self, name: str) -> str: ...


# For a tensor of ours: the expert (0 where there are none) and the source of each tensor that fills a part of it.
Parts = dict[tuple[int, int], str]


def fill(model: nn.Module, tensors: Tensors, rules: list[Rule], dtype: torch.dtype | None) -> None:
    """Gives `model` (on the meta device) its parameters from `tensors`.

    Copied tensors are taken as they are, memory-mapped or shared, unless they must be cast to `dtype`; stacked ones are
    filled in place, one expert at a time. `dtype` None is that of the first floating tensor.

    Raises:
        CheckpointError: lists what is missing, left over, misshapen or not floating; the model is unchanged then.
    """
    plan, tied = _fitting_plan(model, tensors, rules)
    if dtype is None:
        dtype = tensors.dtype(next(iter(next(iter(plan.values())).values())))
    head = plan.pop(HEAD) if tied and HEAD in plan else None
    size = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    for name in progress(plan, size, "loading"):
        path, _, attribute = name.rpartition(".")
        held = model.get_submodule(path).held_dtype(attribute, dtype)  # type: ignore[operator]
        _assign(model, name, _gather(model.get_parameter(name), plan[name], tensors, held))
    if tied:
        _assign(model, HEAD, model.get_parameter(EMBEDDING))
    if head is not None:
        _check_tied(tensors.tensor(head[0, 0]), tensors, plan[EMBEDDING][0, 0], head[0, 0])


def unlike(model: nn.Module, tensors: Tensors, rules: list[Rule]) -> list[str]:
    """The parameters of `model` that `tensors` would fill with other values, read one at a time.

    Raises:
        CheckpointError: as `fill`.
    """
    plan, tied = _fitting_plan(model, tensors, rules)
    named = {name: model.get_parameter(name) for name in plan if not (tied and name == HEAD)}
    size = sum(parameter.nbytes for parameter in named.values())
    return [
        name
        for name in progress(named, size, "comparing tensors")
        if not torch.equal(_gather(named[name], plan[name], tensors, named[name].dtype), named[name])
    ]


def _fitting_plan(model: nn.Module, tensors: Tensors, rules: list[Rule]) -> tuple[dict[str, Parts], bool]:
    """What fills each parameter, and whether the head is the embedding; raises as `fill` where the two do not fit."""
    tied = HEAD not in dict(model.named_parameters())
    plan, problems = _plan(model, tensors, rules, tied)
    if problems:
        more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = ["the checkpoint does not fit:", *problems[:20], *more, *_hints(tensors, problems)]
        raise CheckpointError("\n  ".join(lines))
    return plan, tied


def _plan(model: nn.Module, tensors: Tensors, rules: list[Rule], tied: bool) -> tuple[dict[str, Parts], list[str]]:
    ours = dict(model.named_parameters(remove_duplicate=False))
    plan: dict[str, Parts] = defaultdict(dict)
    spelled: dict[str, Parts] = defaultdict(dict)  # the same, by the released names
    problems = []
    for name in tensors:
        found = match(rules, name)
        if found is None or (not isinstance(found[0], Ignore) and found[0].ours.format(**found[2]) not in ours):
            problems.append(f"left over: {name} {tensors.shape(name)} in {tensors.origin(name)}")
            continue
        rule, source, numbers = found
        if isinstance(rule, Ignore):
            continue
        if isinstance(rule, Stack) and numbers["e"] >= len(ours[rule.ours.format(**numbers)]):
            problems.append(f"left over: {name}, an expert more than the config has, in {tensors.origin(name)}")
            continue
        target, part = rule.ours.format(**numbers), (numbers.get("e", 0), source)
        if part in plan[target]:
            problems.append(f"twice: {name} and {plan[target][part]} are both {target}")
        plan[target][part], spelled[target][part] = name, rule.sources[source].format(**numbers)
        wanted = part_shape(list(ours[target].shape), rule)
        if tensors.shape(name) != wanted:
            problems.append(f"misshapen: {name} is {tensors.shape(name)}, the config makes it {wanted}")
        if not tensors.dtype(name).is_floating_point:
            problems.append(f"not floating: {name} is {tensors.dtype(name)}; quantised weights are not supported")
    for target, parameter in ours.items():
        if tied and target == HEAD:
            continue
        problems += [
            f"missing: {name}" for name in _missing(target, list(parameter.shape), spelled.get(target, {}), rules)
        ]
    return plan, problems


def _hints(tensors: Tensors, problems: list[str]) -> list[str]:
    """What a reader may make of the problems."""
    if any(mark in name for name in tensors for mark in ADAPTED):
        return [f"it holds an adapter's tensors: {MERGE}"]
    if set(problems) <= {f"missing: {HEAD}", "missing: lm_head.bias"}:
        return [
            "only the head is missing: this is a base model saved alone; save the model with its head, or set "
            "tie_word_embeddings in config.json if the head is the embedding"
        ]
    return []


def part_shape(shape: list[int], rule: Rule) -> list[int]:
    """The shape of one source of `rule` for a tensor of ours of this `shape`."""
    if isinstance(rule, Copy):
        return shape
    return [shape[1] // len(rule.sources), *shape[2:]]


def _missing(target: str, shape: list[int], parts: Parts, rules: list[Rule]) -> list[str]:
    """What a checkpoint would have to hold, beside `parts`, to fill `target`."""
    ways = [written_by([rule], target) for rule in rules if not isinstance(rule, Ignore)]
    needs = []
    for rule, numbers in filter(None, ways):
        experts = [0] if isinstance(rule, Copy) else range(shape[0])
        need = {(e, s): name.format(**numbers, e=e) for e in experts for s, name in enumerate(rule.sources)}
        needs.append(need)
    if any(need.items() == parts.items() for need in needs):
        return []
    return [name for part, name in needs[0].items() if parts.get(part) != name] if needs else [target]


def _gather(parameter: nn.Parameter, parts: Parts, tensors: Tensors, dtype: torch.dtype) -> nn.Parameter:
    name = parts[0, 0]
    if tensors.shape(name) == list(parameter.shape):
        value = tensors.tensor(name).detach().to(dtype)
        return nn.Parameter(value.view(parameter.shape), requires_grad=parameter.requires_grad)
    sources = 1 + max(source for _, source in parts)
    value = torch.empty(parameter.shape, dtype=dtype)
    rows = value.shape[1] // sources
    for (expert, source), name in parts.items():
        value[expert, source * rows : (source + 1) * rows] = tensors.tensor(name).detach()
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, parameter)


def _check_tied(head: Tensor, tensors: Tensors, embedding_name: str, head_name: str) -> None:
    embedding = tensors.tensor(embedding_name)
    if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
        raise CheckpointError(
            f"the config says tie_word_embeddings, but {head_name} and {embedding_name} differ; set it to false"
        )
