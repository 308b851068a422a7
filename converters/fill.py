"""Filling a model from tensors, with an exact account: each of ours once, each of theirs used."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from converters.checkpoint import FLOATS, MERGE, CheckpointError
from converters.progress import progress
from converters.rules import Copy, Ignore, Rule, Stack, lies_beyond, match, written_by
from transformer_std.config import Mixture, TransformerConfig
from transformer_std.saving import TRANSPOSED

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# In the names of a model that peft wrapped.
ADAPTED = (".lora_", ".base_layer.", ".modules_to_save.", ".ia3_", ".vera_", "prompt_encoder.", ".trainable_tokens_")
PARAMETRIZED = ".parametrizations."
SHOWN = 20  # of what does not fit


class Tensors(Protocol):
    """Named tensors, wherever they are."""

    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> list[int]: ...
    def kind(self, name: str) -> str: ...
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
    tensors = turned(tensors, rules)
    plan, tied = _fitting_plan(model, tensors, rules)
    if dtype is None:
        dtype = FLOATS[tensors.kind(next(iter(next(iter(plan.values())).values())))]
    head = plan.pop(HEAD) if tied and HEAD in plan else None
    size = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    for name in progress(plan, size, "loading"):
        path, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(path)
        held = module.held_dtype(attribute, dtype)
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
    tensors = turned(tensors, rules)
    plan, tied = _fitting_plan(model, tensors, rules)
    named = {name: model.get_parameter(name) for name in plan if not (tied and name == HEAD)}
    size = sum(parameter.nbytes for parameter in named.values())
    return [
        name
        for name in progress(named, size, "comparing tensors")
        if not same(_gather(named[name], plan[name], tensors, named[name].dtype), named[name])
    ]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values in the same dtype and shape; a NaN is the same as a NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def turned(tensors: Tensors, rules: list[Rule]) -> Tensors:
    return Turned(tensors, rules) if any(getattr(rule, "transposed", False) for rule in rules) else tensors


class Turned:
    """`tensors`, where a rule transposes one as it is in the model."""

    def __init__(self, tensors: Tensors, rules: list[Rule]):
        self._tensors, self.kind, self.origin = tensors, tensors.kind, tensors.origin
        found = {name: match(rules, name) for name in tensors}
        self._turned = {name for name, each in found.items() if each and getattr(each[0], "transposed", False)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> list[int]:
        shape = self._tensors.shape(name)
        return [*shape[:-2], *shape[:-3:-1]] if name in self._turned else shape

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors.tensor(name)
        return tensor.mT if name in self._turned else tensor


def _fitting_plan(model: nn.Module, tensors: Tensors, rules: list[Rule]) -> tuple[dict[str, Parts], bool]:
    """What fills each parameter, and whether the head is the embedding; raises as `fill` where the two do not fit."""
    tied = HEAD not in dict(model.named_parameters())
    plan, problems = _plan(model, tensors, rules, tied)
    _refuse(tensors, problems)
    return plan, tied


def check_counts(config: TransformerConfig, tensors: Tensors, rules: list[Rule]) -> None:
    """That there are tensors of as many blocks and experts as `config` speaks of: a config that lies is found out
    before anything of its size is built.

    Raises:
        CheckpointError: it speaks of more; whatever no rule takes is listed too.
    """
    found = {name: match(rules, name) for name in tensors}
    numbers = [each[2] for each in found.values() if each is not None]
    blocks, experts = (len({each[key] for each in numbers if key in each}) for key in "ie")
    wanted = max((each.mlp.num_experts for each in config.attending if isinstance(each.mlp, Mixture)), default=0)
    problems = []
    if blocks < config.num_layers:
        problems.append(f"missing: the config has {config.num_layers} blocks, the tensors are of {blocks}")
    if 0 < experts < wanted:
        problems.append(f"missing: the config has {wanted} experts a block, the tensors are of {experts}")
    if problems:
        _refuse(tensors, problems + [_left_over(tensors, name) for name, each in found.items() if each is None])


def _refuse(tensors: Tensors, problems: list[str]) -> None:
    """One error for all problems, if there are any."""
    if problems:
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        lines = ["the checkpoint does not fit:", *problems[:SHOWN], *more, *_hints(tensors, problems)]
        raise CheckpointError("\n  ".join(lines))


def _left_over(tensors: Tensors, name: str) -> str:
    return f"left over: {name} {tensors.shape(name)} in {tensors.origin(name)}"


def _plan(model: Any, tensors: Tensors, rules: list[Rule], tied: bool) -> tuple[dict[str, Parts], list[str]]:
    ours = dict(model.named_parameters(remove_duplicate=False))
    plan: dict[str, Parts] = defaultdict(dict)
    spelled: dict[str, Parts] = defaultdict(dict)  # the same, by the released names
    problems = []
    for name in tensors:
        found = match(rules, name)
        if found is None or (not isinstance(found[0], Ignore) and found[0].ours.format(**found[2]) not in ours):
            if lies_beyond(rules, name, len(model.layers)):
                continue
            problems.append(_left_over(tensors, name))
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
        if (kind := tensors.kind(name)) not in FLOATS:
            problems.append(f"not a weight: {name} is {kind}; weights are {', '.join(FLOATS)}, not quantised")
    for target, parameter in ours.items():
        if tied and target == HEAD:
            continue
        names, count = _missing(target, list(parameter.shape), spelled.get(target, {}), rules)
        problems += [f"missing: {name}" for name in names]
        if count > len(names):
            problems.append(f"missing: {count - len(names)} more of {target}")
    return plan, problems


def _hints(tensors: Tensors, problems: list[str]) -> list[str]:
    """What a reader may make of the problems."""
    if any(mark in name for name in tensors for mark in ADAPTED):
        return [f"it holds an adapter's tensors: {MERGE}"]
    if any(PARAMETRIZED in name for name in tensors):
        return ["it has parametrized weights: torch.nn.utils.parametrize.remove_parametrizations() first"]
    if set(problems) <= {f"missing: {HEAD}", "missing: lm_head.bias"}:
        return [
            "only the head is missing: this is a base model saved alone; save the model with its head, or set "
            "tie_word_embeddings in config.json if the head is the embedding"
        ]
    return []


def own_rules(tensors: Tensors) -> list[Rule]:
    """Our own format's: each name is ours as it is; what lies transposed in memory has a mark behind it."""
    patterns = dict.fromkeys(re.sub(r"^layers\.\d+\.", "layers.{i}.", name) for name in tensors if "{" not in name)
    return [Copy(each, each.removesuffix(TRANSPOSED), each.endswith(TRANSPOSED)) for each in patterns]


def part_shape(shape: list[int], rule: Rule) -> list[int]:
    """The shape of one source of `rule` for a tensor of ours of this `shape`."""
    if isinstance(rule, Copy):
        return shape
    return [shape[1] // len(rule.sources), *shape[2:]]


def _missing(target: str, shape: list[int], parts: Parts, rules: list[Rule]) -> tuple[list[str], int]:
    """What a checkpoint would have to hold, beside `parts`, to fill `target`: the first names, and how many."""
    ways = []
    for rule in rules:
        if not isinstance(rule, Ignore) and (found := written_by([rule], target)):
            numbers, wanted = found[1], len(rule.sources) * (1 if isinstance(rule, Copy) else shape[0])
            held = sum(
                source < len(rule.sources) and rule.sources[source].format(**numbers, e=e) == name
                for (e, source), name in parts.items()
            )
            if held == len(parts) == wanted:
                return [], 0
            ways.append((rule.sources, numbers, wanted, held))
    if not ways:
        return [target], 1
    sources, numbers, wanted, held = ways[0]
    names = (source.format(**numbers, e=e) for e in range(wanted // len(sources)) for source in sources)
    there = set(parts.values())
    return list(itertools.islice((name for name in names if name not in there), SHOWN)), wanted - held


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
