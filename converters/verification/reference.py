"""Where transformers' own forward computes each standard value: read and written there, never recomputed.

A family's `VALUES` says where its modules have them; the inside of attention is the same for all and is met by a
recording attention function.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.overrides import TorchFunctionMode

from converters.places import HALVES, At, Between, Gating, Place, View
from transformer_std.components.blocks import BLOCKS
from transformer_std.config import Block, TransformerConfig
from transformer_std.hooks.hook_point import laid_out_as
from transformer_std.hooks.hosts import own_values, vocabulary

Edit = Callable[[Tensor], Tensor | None]


def as_it_is(x: Tensor) -> Tensor:
    return x


def whole(x: Tensor, at: At) -> Tensor:
    return x


def into_view(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Writes what a view shows."""

    def put(tensor: Tensor, new: Tensor) -> Tensor:
        view(tensor).copy_(new)
        return tensor

    return put


@dataclass
class Run:
    """What one run of transformers saw. `bases` are its own tensors; `views` make the standard values of them."""

    edits: dict[str, Edit]
    bases: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    logits: Tensor | None = None

    def meet(
        self,
        name: str,
        tensor: Tensor,
        view: Callable[[Tensor], Tensor] = as_it_is,
        put: Callable[[Tensor, Tensor], Tensor] | None = None,
        stream: bool = False,
    ) -> Tensor:
        """Records a value where the forward has it, after any edit of it; `put` writes what `view` shows."""
        if (edit := self.edits.get(name)) is not None:
            tensor = tensor if stream else laid_out_as(tensor, tensor)
            with torch._C.DisableTorchFunction():  # an edit's own calls are not the forward's
                seen = view(tensor)
                new = edit(seen)
                tensor = (put or into_view(view))(tensor, seen if new is None else new)
        if tensor.requires_grad:
            tensor.retain_grad()
        self.bases[name], self.views[name] = tensor, view
        return tensor

    def value(self, name: str) -> Tensor:
        return self.views[name](self.bases[name]).detach()

    def grad(self, name: str) -> Tensor:
        found = self.bases[name].grad
        assert found is not None
        return self.views[name](found)


def attention_there_is(config: TransformerConfig, wanted: str) -> str:
    """`wanted`, or "eager" where we compute openly always, or the transformers at hand has no sdpa of the family."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    assert config.origin is not None
    theirs: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[config.origin.family]]
    return wanted if theirs._supports_sdpa and not config.attention.open_always else "eager"


class Reference:
    """transformers' model as a source of standard values.

    Args:
        model: a live transformers model, on sdpa or eager attention.
        config: our config of it.
        family: its module, whose `VALUES` say where its modules have them, and `GATING` where its experts do.
    """

    def __init__(self, model: Any, config: TransformerConfig, family: ModuleType):
        self.model, self.config, self._values = model, config, family.VALUES
        self._gating = getattr(family, "GATING", HALVES)

    def run(self, tokens: Tensor, *, edits: dict[str, Edit] | None = None, **inputs: Any) -> Run:
        """One forward of transformers' model, with `edits` of values at their places: full name -> a function that
        returns the new value or edits in place."""
        run = Run(dict(edits or {}))
        with contextlib.ExitStack() as stack:
            self._hook_modules(run, (tokens.shape[0], tokens.shape[1]), stack)
            stack.enter_context(self._hook_attention(run))
            run.logits = self.model(tokens, **inputs).logits
        return run

    def _hook_modules(self, run: Run, size: tuple[int, int], stack: contextlib.ExitStack) -> None:
        modules = dict(self.model.named_modules())
        for pattern, places in self._values.items():
            for i in range(self.config.num_layers) if "{i}" in pattern else [0]:
                options = places if isinstance(places, list) else [places]
                there = [place for place in options if place.module.format(i=i) in modules]
                if there:
                    at = At(self.config.attending[i], size)
                    if not _has(at.layer, pattern):
                        continue
                    _hook(run, pattern.format(i=i), there[0], modules[there[0].module.format(i=i)], at, stack)
        for i in range(self.config.num_layers):
            if (experts := modules.get(f"model.layers.{i}.mlp.experts")) is not None:
                at = At(self.config.attending[i], size)
                _hook_experts(run, f"layers.{i}.mlp.", experts, self._gating, at, stack)

    @contextlib.contextmanager
    def _hook_attention(self, run: Run) -> Iterator[None]:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask

        kept = self.model.config._attn_implementation
        AttentionInterface.register("recording", functools.partial(_recording_attention, run, kept))
        AttentionMaskInterface.register("recording", eager_mask if kept == "eager" else sdpa_mask)
        self.model.config._attn_implementation = "recording"
        try:
            yield
        finally:
            self.model.config._attn_implementation = kept


def _has(layer: Block, pattern: str) -> bool:
    """Whether a block of this wiring has the value; those further in are where their modules are."""
    value = pattern.removeprefix("layers.{i}.")
    block = BLOCKS[layer.kind]
    return value not in vocabulary("block") or (isinstance(block, type) and value in own_values(block))


def _hook(run: Run, name: str, place: Place | Between, module: Any, at: At, stack: contextlib.ExitStack) -> None:
    seen = place.view

    def view(x: Tensor) -> Tensor:
        return x if seen is None else seen(x, at)

    def meet(x: Tensor) -> Tensor:
        if getattr(place, "each_row", False):
            x = x.expand(at.size[0], -1, -1).clone()
        return run.meet(name, x, view, stream=getattr(place, "stream", False))

    if isinstance(place, Between):
        _intercept(module, {place.function: functools.partial(_meet_call, meet, place.side)}, stack)
    elif place.side == "input":
        hook = functools.partial(_meet_input, meet)
        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    else:
        stack.callback(module.register_forward_hook(functools.partial(_meet_output, meet)).remove)


def _meet_input(meet: Callable[[Tensor], Tensor], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (meet(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": meet(kwargs["hidden_states"])}


def _meet_output(meet: Callable[[Tensor], Tensor], module: Any, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return (meet(output[0]), *output[1:])
    if isinstance(output, Tensor):
        return meet(output)
    output.logits = meet(output.logits)
    return output


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Intercepting(TorchFunctionMode):
    """Hands the calls of some torch functions, by name, to functions of ours."""

    def __init__(self, calls: dict[str, Call]):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.calls.get(func.__name__)
        return func(*args, **(kwargs or {})) if call is None else call(func, args, kwargs or {})


def _meet_call(
    meet: Callable[[Tensor], Tensor], side: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if side == "second":
        return func(args[0], meet(args[1]), *args[2:], **kwargs)
    return meet(func(*args, **kwargs))


def _intercept(module: Any, calls: dict[str, Call], stack: contextlib.ExitStack) -> None:
    """Puts `calls` around the module's own forward, until the stack unwinds."""
    forward = module.forward

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        with _Intercepting(calls):
            return forward(*args, **kwargs)

    module.forward = intercepted
    stack.callback(setattr, module, "forward", forward)


def _hook_experts(run: Run, host: str, experts: Any, gating: Gating, at: At, stack: contextlib.ExitStack) -> None:
    """The inside of transformers' grouped_mm experts: rows sorted by expert, shown in slot order."""
    batch, seq = at.size
    order: list[Tensor] = []

    def in_slots(rows: Tensor) -> Tensor:
        back = torch.empty_like(order[0])
        back[order[0]] = torch.arange(len(back))
        return rearrange(rows[back], "(batch seq slot) width -> batch seq slot width", batch=batch, seq=seq)

    def meet(name: str, rows: Tensor, part: View = whole) -> Tensor:
        def put(rows: Tensor, slots: Tensor) -> Tensor:
            part(rows, at).copy_(slots.flatten(0, 2)[order[0]])
            return rows

        return run.meet(host + name, rows, lambda rows: in_slots(part(rows, at)), put)

    def by_token(x: Tensor) -> Tensor:
        return rearrange(x, "(batch seq) ... -> batch seq ...", batch=batch)

    def enter(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, indices, weights = args
        weights = run.meet(host + "expert_weights", weights, by_token)
        indices = run.meet(host + "expert_indices", indices, by_token)
        order[:] = [torch.sort(indices.reshape(-1)).indices]
        return hidden, indices, weights

    apply_gate = experts._apply_gate

    def gate(rows: Tensor) -> Tensor:
        rows = meet("mlp_up", meet("mlp_preactivation", rows, gating.gate), gating.up)
        counted = itertools.count(1)

        def activation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            out = func(*args, **kwargs)
            return meet("mlp_activation", out) if next(counted) == gating.call else out

        with _Intercepting({gating.function: activation} if gating.function else {}):
            return meet("mlp_neurons", apply_gate(rows))

    def total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return func(run.meet(host + "expert_outputs", args[0], by_token), *args[1:], **kwargs)

    def leave(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return run.meet(host + "routed_output", output, by_token)

    def activated(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return meet("mlp_activation", output)

    _intercept(experts, {"sum": total}, stack)
    experts._apply_gate = gate
    stack.callback(delattr, experts, "_apply_gate")
    stack.callback(experts.register_forward_pre_hook(enter).remove)
    stack.callback(experts.register_forward_hook(leave).remove)
    if gating.function is None:
        stack.callback(experts.act_fn.register_forward_hook(activated).remove)


def _recording_attention(
    run: Run,
    implementation: str,
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """transformers' own attention function, with its arguments, its softmax and its result recorded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    host = f"layers.{module.layer_idx}.self_attn."
    q = run.meet(host + "attention_queries", q)
    k = run.meet(host + "attention_keys", k)
    v = run.meet(host + "attention_values", v)
    if implementation == "sdpa":
        heads, _ = sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)
        return run.meet(host + "attention_head_outputs", heads), None

    def softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return func(run.meet(host + "attention_scores", args[0]), *args[1:], **kwargs)

    def dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return func(run.meet(host + "attention_probabilities", args[0]), *args[1:], **kwargs)

    def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores, sinks = args[0]
        scores = run.meet(host + "attention_scores", scores)
        return func((scores, run.meet(host + "attention_sinks", sinks.clone())), *args[1:], **kwargs)

    eager = sys.modules[type(module).__module__].eager_attention_forward
    before = {"cat": cat} if getattr(module, "sinks", None) is not None else {"softmax": softmax}
    with _Intercepting({**before, "dropout": dropout}):
        heads, pattern = eager(module, q, k, v, attention_mask, **kwargs)
    return run.meet(host + "attention_head_outputs", heads), pattern
