"""A block of another kind than the library has: what a model asks of its blocks is all that it needs to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_std import HookedTransformer, HookPoint, KVCache, TransformerConfig, Unavailable
from transformer_std import config as configs
from transformer_std.components.blocks import BLOCKS, Block
from transformer_std.components.norms import build_norm
from transformer_std.components.sharing import Need, Pass
from transformer_std.components.states import State
from transformer_std.hooks.hosts import Missing
from transformer_std.hooks.runs import of_its_run
from transformer_std.layouts import Residual
from transformer_std.modules import Linear

NORM = configs.Norm("rms", 1e-6)


@dataclass(frozen=True)
class Recurrent(configs.Block):
    kind: str = "recurrent"


@dataclass(frozen=True)
class Real(Need):
    """Which of the new positions are no padding."""

    def of(self, this: Pass) -> Tensor | None:
        return None if this.real is None else this.real[:, this.past :, None]


class Memory(State):
    def __init__(self, held: Tensor | None = None):
        self.held = held

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(None if self.held is None else fn(self.held))

    def snapshot(self) -> tuple[Any, ...]:
        return (self.held,)

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        (self.held,) = snapshot


class RecurrentBlock(Block):
    """h_t = f_t h_{t-1} + (1 - f_t) v_t;  out = x + o(h), where padding changes nothing."""

    lacks = "a recurrent block has no such value"
    layer_output = HookPoint(Residual, "The residual stream leaving the block")

    def __init__(self, cfg: Recurrent, hidden_size: int, eager: bool = False):
        super().__init__()
        self.norm = build_norm(NORM, hidden_size)
        self.forget, self.v, self.o = (Linear(hidden_size, hidden_size) for _ in range(3))
        self.self_attn, self.mlp = Missing("self_attn", "it does not attend"), Missing("mlp", "it has no MLP")

    def needs(self) -> tuple[Need, ...]:
        return (Real(),)

    def new_state(self, room: int) -> Memory:
        return Memory()

    @of_its_run
    def forward(self, x: Tensor, real: Tensor | None, state: Memory | None = None) -> Tensor:
        x = self.layer_input(x)
        normed = self.norm(x)
        keep, new = self.forget(normed).sigmoid(), self.v(normed)
        if real is not None:
            keep, new = keep.masked_fill(~real, 1), new.masked_fill(~real, 0)
        h = torch.zeros_like(x[:, 0]) if state is None or state.held is None else state.held
        steps = []
        for f, v in zip(keep.unbind(1), new.unbind(1), strict=True):
            steps.append(h := f * h + (1 - f) * v)
        if state is not None:
            state.held = h
        return self.layer_output(x + self.o(torch.stack(steps, 1)))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> HookedTransformer:
    monkeypatch.setitem(BLOCKS, "recurrent", RecurrentBlock)
    attention = configs.Attention(2, 2, 8, rotary=configs.Rotary(8, 10_000.0))
    attends = configs.Layer("sequential", NORM, attention, configs.Mlp(24, "silu", "gated"))
    layers = (Recurrent(), attends, Recurrent())
    return HookedTransformer(TransformerConfig(31, 16, 24, 64, layers, NORM, initializer_range=0.5), seed=0)


TOKENS = torch.arange(3, 17).view(2, 7)


@torch.no_grad()
def test_it_goes_on_from_a_cache_and_generates(model: HookedTransformer) -> None:
    whole, cache = model(TOKENS), KVCache(model)
    parts = [model(part, kv_cache=cache) for part in (TOKENS[:, :3], TOKENS[:, 3:6])]
    copy = cache.expand(2)
    last = model(TOKENS[:, 6:], kv_cache=cache)
    # A product of one row rounds otherwise than one of seven.
    torch.testing.assert_close(torch.cat([*parts, last], 1), whole)
    twice = model(TOKENS[:, 6:].repeat_interleave(2, 0), kv_cache=copy)
    torch.testing.assert_close(twice, last.repeat_interleave(2, 0))
    cached = model.generate(TOKENS, max_new_tokens=6)
    assert torch.equal(cached, model.generate(TOKENS, max_new_tokens=6, use_kv_cache=False))


@torch.no_grad()
def test_a_pass_that_fails_leaves_its_state(model: HookedTransformer) -> None:
    def fail(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError("half-way")

    cache = KVCache(model)
    model(TOKENS[:, :3], kv_cache=cache)
    held = cache.layers[0].held
    with pytest.raises(RuntimeError, match="half-way"):
        model.run_with_hooks(TOKENS[:, 3:], kv_cache=cache, fwd_hooks=[(("layer_output", 2), fail)])
    assert cache.layers[0].held is held


@torch.no_grad()
def test_a_padded_row_computes_what_it_computes_alone(model: HookedTransformer) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    torch.testing.assert_close(model(TOKENS, attention_mask=mask)[0, 3:], model(TOKENS[:1, 3:])[0])
    padded = model.generate(TOKENS, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(padded[0, 7:], model.generate(TOKENS[:1, 3:], max_new_tokens=4)[0, 4:])


def test_its_values_are_read_written_and_missed_by_name(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(TOKENS, incl_bwd=True, return_type="loss")
    assert cache.stack("layer_output").shape == (3, 2, 7, 16)
    assert cache["layer_output_grad", 0].abs().sum() > 0
    assert cache.stack("attention_queries").shape == (1, 2, 2, 7, 8)
    with pytest.raises(Unavailable, match="it does not attend"):
        cache["attention_queries", 0]
    with pytest.raises(Unavailable, match="a recurrent block has no such value"):
        cache["layer_mid", 2]
    zeroed = model.run_with_hooks(TOKENS, fwd_hooks=[(("layer_output", 2), lambda value, hook: value * 0)])
    assert torch.equal(zeroed, zeroed[:1, :1].expand_as(zeroed))
    assert model.num_heads == 2
