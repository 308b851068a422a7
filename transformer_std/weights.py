"""Weights as they are read rather than called: by name, for what they say of a run. What stands in a module's place, as
an adapter does, is counted or refused, never passed over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from transformer_std.hooks.hosts import Host
from transformer_std.modules import Linear

LARGE = 256.0  # of the unit vectors, so that a bias beside a small weight rounds little of it away
TF32 = 2.0**-10  # what a product of float32 matrices may be rounded to on a GPU


class UnreadableWeight(RuntimeError):
    """A weight that cannot be read; the message says which, why, and what to do."""


def refusal(message: str) -> Callable[..., Tensor]:
    """In the place of what computes a value from weights that cannot be read. It raises `UnreadableWeight` where it is
    called: a run whose cache has the value among others goes on."""

    def refuse(*_: Tensor) -> NoReturn:
        raise UnreadableWeight(message)

    return refuse


def linear_map(host: Host, name: str, width: int) -> tuple[Float[Tensor, "out width"], Float[Tensor, " out"]]:
    """The matrix that `host`'s module `name` multiplies by, and the bias it adds.

    A module in the place of ours is asked: what it makes of the unit vectors are the columns.

    Raises:
        UnreadableWeight: the weights are not in memory, or sharded; or the module is no linear map.
    """
    module: Any = host.get_submodule(name)
    if computes_as(module, Linear, nn.Linear):
        weight, bias = in_memory(module.weight, host, name), module.bias
        return weight, weight.new_zeros(len(weight)) if bias is None else bias
    if any(isinstance(each, _DropoutNd) and each.training and each.p > 0 for each in module.modules()):
        raise UnreadableWeight(
            f"{place(host, name)} drops out in training, and has no weight of its own then: call eval() first"
        )
    units = LARGE * torch.eye(width)
    mixed = LARGE * torch.sin(torch.arange(width))
    asked = torch.cat((units, torch.zeros(1, width), mixed[None])).to(in_memory(_some_tensor(module), host, name))
    answers = module.forward(asked[None])[0]
    bias = answers[width]
    columns = (answers[:width] - bias) / LARGE
    wrong = answers[-1] - bias - asked[-1] @ columns
    rounding = 6 * max(torch.finfo(answers.dtype).eps, TF32)
    if wrong.norm() > rounding * columns.norm() * mixed.norm() / math.sqrt(width):
        raise UnreadableWeight(
            f"{place(host, name)} is {type(module).__name__}, no linear map, so it has no weight to read"
        )
    return columns.mT, bias


def embedding_rows(host: Host, name: str, count: int) -> Float[Tensor, "count width"]:
    """What `host`'s embedding `name` makes of each of `count` ids. Raises `UnreadableWeight` as `linear_map`."""
    module: Any = host.get_submodule(name)
    if computes_as(module, nn.Embedding):
        return in_memory(module.weight, host, name)
    ids = torch.arange(count, device=in_memory(_some_tensor(module), host, name).device)
    return module.forward(ids[None])[0]


def own_weight(host: Host, name: str, attribute: str, *kinds: type[nn.Module]) -> Tensor:
    """The parameter `attribute` of `host`'s module `name`, of one of `kinds`, which computes with it in a way that only
    they know.

    Raises:
        UnreadableWeight: another module is in its place, or the weight is not in memory, or sharded.
    """
    module = host.get_submodule(name)
    if not computes_as(module, *kinds):
        raise UnreadableWeight(
            f"{place(host, name)} is {type(module).__name__}, which does not say how its {attribute} is used: merge an "
            "adapter first"
        )
    return in_memory(getattr(module, attribute), host, name)


def computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether `module` computes as one of `kinds` does: it is no other's, and accelerate alone wraps its forward."""
    own = vars(module)
    return type(module).forward in [kind.forward for kind in kinds] and ("forward" not in own or "_hf_hook" in own)


def place(host: Host, name: str) -> str:
    return f"{host.path}.{name}".lstrip(".")


def in_memory(weight: Tensor, host: Host, name: str) -> Tensor:
    if weight.is_meta:
        raise UnreadableWeight(
            f"{place(host, name)}'s weights are not in memory: this reads them directly, so load the model without "
            "putting parts on disk"
        )
    if hasattr(weight, "device_mesh"):
        raise UnreadableWeight(
            f"{place(host, name)}'s weights are sharded: this reads them directly, so gather the model first "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict)"
        )
    return weight


def _some_tensor(module: nn.Module) -> Tensor:
    """One that is where the module computes, and in what."""
    held = itertools.chain(module.parameters(), module.buffers())
    return next((each for each in held if each.is_floating_point()), torch.empty(()))
