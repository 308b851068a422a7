"""Where transformers' own forward computes each standard value: read and written there, never recomputed.

A family's `VALUES` says where its modules have them; the inside of attention is the same for all and is met by a
recording attention function.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from einops import rearrange
from torch import Tensor

from transformer_std.config import Layer, TransformerConfig

View = Callable[[Tensor, Layer], Tensor]
Edit = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Place:
    """A module's input or output, and the part of it, as a view, that is the value.

    `stream`: the module's caller keeps the very tensor too, so that a write must be in place to reach it.
    """

    module: str
    side: Literal["input", "output"]
    view: View | None = None
    stream: bool = False


# A list where blocks differ: the first whose module a block has.
Places = Place | list[Place]

Input = functools.partial(Place, side="input")
Output = functools.partial(Place, side="output")


def by_heads(x: Tensor, layer: Layer) -> Tensor:
    """[batch seq (head dim)] as queries are laid out."""
    return rearrange(x, "batch seq (head dim) -> batch head seq dim", dim=layer.attention.head_dim)


def fused_queries(x: Tensor, layer: Layer) -> Tensor:
    return by_heads(x, layer)[:, : layer.attention.num_heads]


def fused_keys(x: Tensor, layer: Layer) -> Tensor:
    return by_heads(x, layer)[:, layer.attention.num_heads :][:, : layer.attention.num_kv_heads]


def side_by_side(x: Tensor, layer: Layer) -> Tensor:
    """[batch seq (head dim)] as head outputs are laid out."""
    return rearrange(x, "batch seq (head dim) -> batch seq head dim", dim=layer.attention.head_dim)


def first_half(x: Tensor, layer: Layer) -> Tensor:
    return x[..., : x.shape[-1] // 2]


def second_half(x: Tensor, layer: Layer) -> Tensor:
    return x[..., x.shape[-1] // 2 :]


@dataclass
class Run:
    """What one run of transformers saw. `bases` are its own tensors; `views` make the standard values of them."""

    edits: dict[str, Edit]
    bases: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    logits: Tensor | None = None

    def meet(self, name: str, tensor: Tensor, view: Callable[[Tensor], Tensor], stream: bool = False) -> Tensor:
        """Records a value where the forward has it, after any edit of it."""
        if (edit := self.edits.get(name)) is not None:
            tensor = tensor if stream else tensor.clone()
            new = edit(view(tensor))
            if new is not None:
                view(tensor).copy_(new)
        if tensor.requires_grad:
            tensor.retain_grad()
        self.bases[name], self.views[name] = tensor, view
        return tensor

    def value(self, name: str) -> Tensor:
        return self.views[name](self.bases[name]).detach()

    def grad(self, name: str) -> Tensor:
        return self.views[name](self.bases[name].grad)


class Reference:
    """transformers' model as a source of standard values.

    Args:
        model: a live transformers model, on sdpa or eager attention.
        config: our config of it.
        values: the family's `VALUES`.
    """

    def __init__(self, model: Any, config: TransformerConfig, values: dict[str, Places]):
        self.model, self.config, self._values = model, config, values

    def run(self, tokens: Tensor, *, edits: dict[str, Edit] | None = None, **inputs: Any) -> Run:
        """One forward of transformers' model, with `edits` of values at their places: full name -> a function that
        returns the new value or edits in place."""
        run = Run(dict(edits or {}))
        with contextlib.ExitStack() as stack:
            self._hook_modules(run, stack)
            stack.enter_context(self._hook_attention(run))
            run.logits = self.model(tokens, use_cache=False, **inputs).logits
        return run

    def _hook_modules(self, run: Run, stack: contextlib.ExitStack) -> None:
        modules = dict(self.model.named_modules())
        for pattern, places in self._values.items():
            for i in range(self.config.num_layers) if "{i}" in pattern else [0]:
                there = [place for place in _as_list(places) if place.module.format(i=i) in modules]
                if not there:
                    continue  # this block has no such module, nor the value
                place, module = there[0], modules[there[0].module.format(i=i)]
                layer = self.config.layers[i]
                view = functools.partial(place.view, layer=layer) if place.view else _as_it_is
                meet = functools.partial(run.meet, pattern.format(i=i), view=view, stream=place.stream)
                if place.side == "input":
                    hook = functools.partial(_meet_input, meet)
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                else:
                    handle = module.register_forward_hook(functools.partial(_meet_output, meet))
                stack.callback(handle.remove)

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


def _as_list(places: Places) -> list[Place]:
    return places if isinstance(places, list) else [places]


def _as_it_is(x: Tensor) -> Tensor:
    return x


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


def _recording_attention(
    run: Run, implementation: str, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """transformers' own attention function, with its arguments, its softmax and its result recorded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    host = f"layers.{module.layer_idx}.self_attn."
    q = run.meet(host + "attention_queries", q, _as_it_is)
    k = run.meet(host + "attention_keys", k, _as_it_is)
    v = run.meet(host + "attention_values", v, _as_it_is)
    if implementation == "sdpa":
        heads, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        return run.meet(host + "attention_head_outputs", heads, _as_it_is), None
    softmax, dropout = torch.nn.functional.softmax, torch.nn.functional.dropout

    def recording_softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return softmax(run.meet(host + "attention_scores", scores, _as_it_is), *args, **kwargs)

    def recording_dropout(pattern: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return dropout(run.meet(host + "attention_probabilities", pattern, _as_it_is), *args, **kwargs)

    eager = sys.modules[type(module).__module__].eager_attention_forward
    functional = torch.nn.functional
    with (
        mock.patch.object(functional, "softmax", recording_softmax),
        mock.patch.object(functional, "dropout", recording_dropout),
    ):
        heads, pattern = eager(module, q, k, v, mask, **kwargs)
    return run.meet(host + "attention_head_outputs", heads, _as_it_is), pattern
