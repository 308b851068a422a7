"""Hooks, readers and steps belong to a run, or to the context that set them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.tiny import NAMED, Folders, Recipe, prompt
from transformer_std import HookedTransformer, HookPoint, KVCache
from transformer_std.hooks.runs import IDLE, RUN

PHI3 = NAMED["phi3-base"]


@pytest.fixture
def model(checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(PHI3))


@pytest.fixture(autouse=True)
def idle() -> Any:
    yield
    assert RUN.get() is IDLE


def zero(value: Tensor, hook: HookPoint) -> Tensor:
    return torch.zeros_like(value)


def at_once(*jobs: Callable[[], Any], times: int = 40) -> list[list[Any]]:
    """Every job `times` times, each on a thread of its own, begun together."""
    start = threading.Barrier(len(jobs))

    def work(job: Callable[[], Any]) -> list[Any]:
        start.wait()
        return [job() for _ in range(times)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result() for done in [pool.submit(work, job) for job in jobs]]


@torch.no_grad()
def test_a_plain_run_beside_a_thread_with_hooks_is_as_alone(model: HookedTransformer) -> None:
    tokens, alone = prompt(), model(prompt())
    hooked = model.run_with_hooks(tokens, fwd_hooks=[("mlp_output", zero)])
    assert not torch.equal(alone, hooked)

    def ablate() -> Tensor:
        return model.run_with_hooks(tokens, fwd_hooks=[("mlp_output", zero)])

    def within() -> Tensor:
        with model.hooks(fwd_hooks=[("mlp_output", zero)]):
            return model(tokens)

    plain, ablated, inside = at_once(lambda: model(tokens), ablate, within)
    assert all(torch.equal(each, alone) for each in plain)
    assert all(torch.equal(each, hooked) for each in (*ablated, *inside))
    assert not any(point._handles for point in model.names.points.values())


@torch.no_grad()
def test_caches_of_two_threads_hold_their_own_run(model: HookedTransformer) -> None:
    inputs = [prompt(rows=1), prompt(7, rows=1)]
    wanted = [model.run_with_cache(tokens)[1] for tokens in inputs]
    found = at_once(*[lambda tokens=tokens: model.run_with_cache(tokens)[1] for tokens in inputs], times=15)
    for alone, caches in zip(wanted, found, strict=True):
        for cache in caches:
            assert list(cache) == list(alone)
            assert all(torch.equal(cache[name], alone[name]) for name in alone if name != "input_size")


@torch.no_grad()
def test_a_pattern_that_another_thread_watches_leaves_the_bits_of_sdpa(model: HookedTransformer) -> None:
    alone = model(prompt())
    watch = lambda: model.run_with_cache(prompt(), names_filter="attention_probabilities")  # noqa: E731
    plain, _ = at_once(lambda: model(prompt()), watch)
    assert all(torch.equal(each, alone) for each in plain)


def test_generating_threads_have_their_own_steps(model: HookedTransformer) -> None:
    def generate(count: int) -> list[int]:
        steps: list[int] = []
        with model.hooks(fwd_hooks=[(("layer_input", 0), lambda value, hook: steps.append(hook.step))]):
            model.generate(prompt(), max_new_tokens=count, stop_at_eos=False)
        return steps

    for steps, count in zip(at_once(lambda: generate(3), lambda: generate(5), times=5), (3, 5), strict=True):
        assert steps == [list(range(count))] * 5


@torch.no_grad()
def test_a_run_inside_a_hook_leaves_the_outer_cache_alone(model: HookedTransformer) -> None:
    outer, inner = prompt(rows=1), prompt(3, rows=1)
    _, wanted = model.run_with_cache(outer, names_filter="layer_input")
    wanted_inner = model(inner)
    caches = []

    def baseline(value: Tensor, hook: HookPoint) -> None:
        if not hook.ctx.get("busy"):
            hook.ctx["busy"] = True
            assert torch.equal(model(inner), wanted_inner)
            caches.append(model.run_with_cache(inner, names_filter="layer_input")[1])
            hook.ctx["busy"] = False

    with model.hooks(fwd_hooks=[(("layer_output", 1), baseline)]):
        _, cache = model.run_with_cache(outer, names_filter="layer_input")
    for layer in range(model.num_layers):
        assert torch.equal(cache["layer_input", layer], wanted["layer_input", layer])
        assert caches[0]["layer_input", layer].shape[1] == 3


@torch.no_grad()
def test_a_run_inside_a_hook_hears_the_blocks_around_and_not_the_run(model: HookedTransformer) -> None:
    heard = []

    def inside(value: Tensor, hook: HookPoint) -> None:
        heard.append(("run", value.shape[1]))
        model(prompt(3))  # would go on for ever if it heard this hook

    around = [(("layer_input", 0), lambda value, hook: heard.append(("around", value.shape[1])))]
    with model.hooks(fwd_hooks=around):
        model.run_with_hooks(prompt(5), fwd_hooks=[(("layer_output", 0), inside)])
    assert heard == [("around", 5), ("run", 5), ("around", 3)]


@torch.no_grad()
def test_a_run_inside_a_step_is_no_step_itself(model: HookedTransformer) -> None:
    steps: list[tuple[int, int]] = []

    def look(value: Tensor, hook: HookPoint) -> None:
        steps.append((value.shape[1], hook.step))
        if hook.step == 1 and value.shape[1] == 1:
            model(prompt(7))

    with model.hooks(fwd_hooks=[(("layer_input", 0), look)]):
        model.generate(prompt(5), max_new_tokens=3, stop_at_eos=False)
    assert steps == [(5, 0), (1, 1), (7, 0), (1, 2)]


@torch.no_grad()
def test_add_hook_is_heard_on_every_thread_and_a_context_can_be_carried(model: HookedTransformer) -> None:
    alone, ablated = model(prompt()), model.run_with_hooks(prompt(), fwd_hooks=[("mlp_output", zero)])
    with model.add_hook("mlp_output", zero):
        assert torch.equal(at_once(lambda: model(prompt()), times=1)[0][0], ablated)
    with model.hooks(fwd_hooks=[("mlp_output", zero)]):
        assert torch.equal(at_once(lambda: model(prompt()), times=1)[0][0], alone)
        carried = contextvars.copy_context()
        assert torch.equal(at_once(lambda: carried.run(model, prompt()), times=1)[0][0], ablated)


@torch.no_grad()
def test_notes_of_two_scopes_are_apart(model: HookedTransformer) -> None:
    def count(value: Tensor, hook: HookPoint) -> None:
        hook.ctx["n"] = hook.ctx.get("n", 0) + 1
        seen.append(hook.ctx["n"])

    seen: list[int] = []
    with model.hooks(fwd_hooks=[(("layer_input", 0), count)]):
        model(prompt())
        model(prompt())
        model.run_with_hooks(prompt(), fwd_hooks=[(("layer_input", 0), count)])
    assert seen == [1, 2, 3, 1]


@torch.no_grad()
def test_reset_hooks_takes_no_reader_and_no_other_thread_off(model: HookedTransformer) -> None:
    def reset(value: Tensor, hook: HookPoint) -> None:
        model.reset_hooks()

    with model.hooks(fwd_hooks=[(("layer_output", 0), reset)]):
        _, cache = model.run_with_cache(prompt(), names_filter="layer_output")
    assert len(cache) == model.num_layers

    ablated = model.run_with_hooks(prompt(), fwd_hooks=[("mlp_output", zero)])
    hooked, _ = at_once(
        lambda: model.run_with_hooks(prompt(), fwd_hooks=[("mlp_output", zero)]), lambda: model.reset_hooks()
    )
    assert all(torch.equal(each, ablated) for each in hooked)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("value", ["attention_probabilities", "mlp_neurons"])
def test_gradients_under_activation_checkpointing_have_the_hook(
    base: Recipe, reentrant: bool, value: str, checkpoints: Folders
) -> None:
    def gradients(checkpointed: bool, scoped: bool) -> list[Tensor | None]:
        model = HookedTransformer.from_pretrained(checkpoints(base), dtype=torch.float32)
        for block in model.layers if checkpointed else ():
            block.forward = (lambda forward: lambda *args: checkpoint(forward, *args, use_reentrant=reentrant))(
                block.forward
            )
        hooks = [((value, 1), lambda value, hook: value * 0.5)]
        if scoped:
            with model.hooks(fwd_hooks=hooks):
                loss = model(prompt(), return_type="loss")
        else:
            loss = model.run_with_hooks(prompt(), fwd_hooks=hooks, return_type="loss")
        loss.backward()
        assert not any(point._handles for point in model.names.points.values())
        return [parameter.grad for parameter in model.parameters()]

    wanted = gradients(checkpointed=False, scoped=False)
    for scoped in (False, True):
        for found, plain in zip(gradients(True, scoped), wanted, strict=True):
            assert (found is None and plain is None) or torch.equal(found, plain)


def test_a_cache_under_activation_checkpointing_is_of_the_run_alone(model: HookedTransformer) -> None:
    _, wanted = model.run_with_cache(prompt())
    for block in model.layers:
        block.forward = (lambda forward: lambda *args: checkpoint(forward, *args, use_reentrant=False))(block.forward)
    loss, cache = model.run_with_cache(prompt(), return_type="loss")
    seen = {name: cache[name] for name in cache}
    loss.backward()
    assert all(cache[name] is seen[name] for name in cache)
    assert all(torch.equal(cache[name], wanted[name]) for name in cache if name != "input_size")


@pytest.mark.parametrize("value", ["final_norm_output", "lm_head_output", "logits", "next_token_probs"])
@torch.no_grad()
def test_a_step_that_fails_behind_the_blocks_was_not_read(value: str, model: HookedTransformer) -> None:
    class Boom(Exception):
        pass

    def boom(value: Tensor, hook: HookPoint) -> None:
        raise Boom

    kept, tokens = KVCache(model), prompt(rows=1)
    model(tokens[:, :8], kv_cache=kept)
    with pytest.raises(Boom):
        model.run_with_hooks(tokens[:, 8:10], kv_cache=kept, fwd_hooks=[(value, boom)])
    assert len(kept) == 8
    found, fresh = model(tokens[:, 8:10], kv_cache=kept), KVCache(model)
    model(tokens[:, :8], kv_cache=fresh)
    assert torch.equal(found, model(tokens[:, 8:10], kv_cache=fresh))


@pytest.mark.parametrize("grad", [False, True])
def test_changing_kept_keys_and_values_leaves_the_memory_of_the_model(
    base: Recipe, grad: bool, checkpoints: Folders
) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base), attn_implementation="eager")
    tokens = prompt(rows=1)
    with torch.set_grad_enabled(grad):
        for first in (1, 8):
            kept, untouched = KVCache(model), KVCache(model)
            model(tokens[:, :first], kv_cache=untouched)
            _, cache = model.run_with_cache(tokens[:, :first], kv_cache=kept)
            for name in cache:
                if name not in ("input_size", "input_ids", "attention_mask") and cache[name].is_floating_point():
                    cache[name].detach().mul_(0)
            found = model(tokens[:, first:], kv_cache=kept)
            assert torch.equal(found, model(tokens[:, first:], kv_cache=untouched))
