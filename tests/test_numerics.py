"""Arithmetic that is never silently other: the same bits under autocast and in float64, whatever ran before; and a
forward that asks the device for no number."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import (
    BASES,
    FULL,
    LENGTH,
    MIXTURES,
    NAMED,
    ONE,
    SLIDING,
    VOCAB,
    Folders,
    Recipe,
    edit_config,
    load_reference,
    prompt,
)
from transformer_std import HookedTransformer
from transformer_std.components import mixture as mixtures
from transformer_std.components import tracing
from transformer_std.components.reuse import filled, plus, times
from transformer_std.config import Mixture, SoftmaxTopK, SparseMixer
from transformer_std.kv_cache import KVCache

TWO = Recipe("afmoe", "two", {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": [FULL, SLIDING]})
MANY = Recipe("qwen2_moe", "many_experts", {"num_experts": 40})
LONGROPE = NAMED["phi3-longrope"]

every_mixture = pytest.mark.parametrize("base", MIXTURES, ids=lambda base: base.id)


# -- nothing that ran before is heard of again ---------------------------------------------------------------------


def exported(model: HookedTransformer, tokens: Tensor) -> None:
    torch.export.export(model, (tokens,), strict=False)


def faked(model: HookedTransformer, tokens: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(tokens))


def faked_without_a_fake_input(model: HookedTransformer, tokens: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(tokens)
        model(tokens, attention_mask=torch.ones_like(tokens))


def traced_fake(model: HookedTransformer, tokens: Tensor) -> None:
    weights = {name: each.detach() for name, each in model.named_parameters()}
    make_fx(lambda held, each: torch.func.functional_call(model, held, (each,)), tracing_mode="fake")(weights, tokens)


def traced_real(model: HookedTransformer, tokens: Tensor) -> None:
    make_fx(model)(tokens)


def traced_with_a_mask(model: HookedTransformer, tokens: Tensor) -> None:
    make_fx(lambda tokens, mask: model(tokens, attention_mask=mask))(tokens, torch.ones_like(tokens))


def on_meta(model: HookedTransformer, tokens: Tensor) -> None:
    with torch.device("meta"):
        model(tokens)
        HookedTransformer(model.config)(tokens)


def without_autograd(model: HookedTransformer, tokens: Tensor) -> None:
    with torch.inference_mode():
        model(tokens)
        model(tokens, attention_mask=padded(tokens))


def batched(model: HookedTransformer, tokens: Tensor) -> None:
    torch.func.vmap(model)(tokens[:, None])


def differentiated(model: HookedTransformer, tokens: Tensor) -> None:
    weights = {name: each.detach() for name, each in model.named_parameters()}
    torch.func.grad(lambda held: torch.func.functional_call(model, held, (tokens,)).sum())(weights)


def under(dtype: torch.dtype) -> Callable[[HookedTransformer, Tensor], None]:
    def run(model: HookedTransformer, tokens: Tensor) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model(tokens)
        finally:
            torch.set_default_dtype(before)

    run.__name__ = f"default_{dtype}"
    return run


def under_autocast(model: HookedTransformer, tokens: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)


def with_strange_tensors(model: HookedTransformer, tokens: Tensor) -> None:
    class Strange(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2 if func is torch.Tensor.cos else func(*args, **(kwargs or {}))

    with Strange():
        model(tokens)


WAYS = [
    exported, faked, faked_without_a_fake_input, traced_fake, traced_real, traced_with_a_mask, on_meta,
    without_autograd, batched, differentiated, under(torch.float64), under(torch.bfloat16), under_autocast,
    with_strange_tensors,
]  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize("number", range(len(WAYS)), ids=lambda number: WAYS[number].__name__)
def test_what_ran_before_leaves_no_trace(own_copy: Folders, number: int) -> None:
    """After each way to run a model that has no numbers, or others, the model and fresh loads of it are as ever. With
    a rotary of its own, so that nothing that is kept of it was made before."""
    folder = own_copy(NAMED["phimoe-longrope"])
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_config(folder, rope_parameters={**rope, "rope_theta": 5000.0 + number})
    model, tokens = HookedTransformer.from_pretrained(folder), prompt()
    WAYS[number](model, tokens)
    reference = load_reference(folder, attn="sdpa")
    for each in (model, HookedTransformer.from_pretrained(folder)):
        for length in (LENGTH, 7):
            logits = each(tokens[:, :length])
            assert type(logits) is Tensor
            assert torch.equal(logits, reference(tokens[:, :length]).logits)
        cache = KVCache(each)
        each(tokens[:, :5], kv_cache=cache)
        torch.testing.assert_close(each(tokens[:, 5:], kv_cache=cache), reference(tokens).logits[:, 5:])
        each(tokens, return_type="loss").backward()
        assert type(each.generate(tokens, max_new_tokens=2)) is Tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_default_dtype_changes_no_bit(checkpoints: Folders, dtype: torch.dtype) -> None:
    for recipe in (*BASES, NAMED["phimoe-longrope"]):  # whose two scales are told apart in the forward
        tokens = prompt(recipe.lengths[0])
        reference = load_reference(checkpoints(recipe), attn="sdpa")
        expected = reference(tokens).logits
        model = HookedTransformer.from_pretrained(checkpoints(recipe))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            logits = model(tokens), model(tokens, position_ids=torch.arange(tokens.shape[1])[None])
        finally:
            torch.set_default_dtype(before)
        assert all(torch.equal(each, expected) for each in logits), recipe.id


def padded(tokens: Tensor, by: int = 3) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :by] = 0
    return mask


# -- autocast and float64 ------------------------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_transformers_with_and_without_gradients(
    checkpoints: Folders, base: Recipe, attn: str, dtype: torch.dtype
) -> None:
    reference = load_reference(checkpoints(base), attn=attn)
    model = HookedTransformer.from_pretrained(checkpoints(base), attn_implementation=attn)
    for length in (LENGTH, 1):
        for gradients in (False, True):
            with torch.autocast("cpu", dtype), torch.set_grad_enabled(gradients):
                expected = reference(prompt(length)).logits
                assert expected.isfinite().all()
                assert torch.equal(model(prompt(length)), expected), (length, gradients)
                assert torch.equal(model.run_with_cache(prompt(length), names_filter="mlp_output")[0], expected)


@pytest.mark.parametrize("base", [BASES[1], *MIXTURES[1:]], ids=lambda base: base.id)
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_over_the_other_half_precision(checkpoints: Folders, base: Recipe, held: torch.dtype) -> None:
    """Nearly every sum and product then has two dtypes. torch's LayerNorm, which two families have, refuses that."""
    other = torch.bfloat16 if held == torch.float16 else torch.float16
    reference = load_reference(checkpoints(base), held, attn="sdpa")
    model = HookedTransformer.from_pretrained(checkpoints(base), dtype=held)
    for gradients in (False, True):
        with torch.autocast("cpu", other), torch.set_grad_enabled(gradients):
            assert torch.equal(model(prompt()), reference(prompt()).logits), gradients


def test_autocast_leaves_the_experts_products_alone_one_by_one_too(checkpoints: Folders) -> None:
    many = checkpoints(MANY)
    model, reference = HookedTransformer.from_pretrained(many), load_reference(many, attn="sdpa")
    for tokens in (prompt(1), prompt()):  # an expert at a time, and all at once
        for gradients in (False, True):
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
                assert torch.equal(model(tokens), reference(tokens).logits)


@every_mixture
def test_float64_mixtures_are_transformers_with_its_eager_experts(checkpoints: Folders, base: Recipe) -> None:
    reference = load_reference(checkpoints(base), torch.float64, attn="sdpa")
    reference.set_experts_implementation("eager")
    model = HookedTransformer.from_pretrained(checkpoints(base), dtype=torch.float64)
    for tokens in (prompt(), prompt(1)):
        # transformers adds a token's experts in their order, we in slot order: a last bit, where there are over two.
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-12, atol=1e-12)
        model.zero_grad()
        reference.zero_grad()
        model(tokens).square().sum().backward()
        reference(tokens).logits.square().sum().backward()
    for ours, theirs in ((model.embed_tokens, reference.model.embed_tokens), (model.lm_head, reference.lm_head)):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-10, atol=1e-10)
    assert model.to("meta")(prompt().to("meta")).shape == (*prompt().shape, VOCAB)


def tiny_mixture(router: Any, num_experts: int) -> mixtures.Mixture:
    torch.manual_seed(0)
    cfg = Mixture(num_experts=num_experts, top_k=2, intermediate_size=2, activation="silu", router=router)
    mixture = mixtures.Mixture(cfg, 4).double().eval()
    for parameter in mixture.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        mixture.router.weight.mul_(20)  # choices that a step does not change
    return mixture


@pytest.mark.parametrize("num_experts", [4, 40])
@pytest.mark.parametrize(
    ("router", "step"), [(SoftmaxTopK(True), 1e-3), (SparseMixer(0.2), 1e-6)], ids=["top_k", "mixer"]
)
def test_a_float64_mixtures_gradients_are_its_slopes(router: Any, step: float, num_experts: int) -> None:
    """A softmax router's softmax is float32 in every dtype, as transformers': a finer step would be lost in it."""
    mixture = tiny_mixture(router, num_experts)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    inputs = (x, mixture.experts.gate_up.detach().requires_grad_(), mixture.experts.down.detach().requires_grad_())

    def run(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return torch.func.functional_call(mixture, {"experts.gate_up": gate_up, "experts.down": down}, (x,))

    assert torch.autograd.gradcheck(run, inputs, eps=step, atol=1e-3, rtol=1e-3, fast_mode=True)


# -- what a device is asked for ------------------------------------------------------------------------------------

NUMBERS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero"}
READS = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_assert_async",
    "_unique2",
    "unique",
)


class NoNumberAsked(TorchFunctionMode):
    """Stops whatever makes a host wait for its device: a tensor's numbers asked for, or a size that hangs on them."""

    def __init__(self) -> None:
        super().__init__()
        self.below = _NoNumberBelow()

    def __enter__(self) -> NoNumberAsked:
        self.below.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.below.__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in NUMBERS, f"{func.__name__} was called"
        return func(*args, **(kwargs or {}))


class _NoNumberBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{func} was called"
        if name.startswith("index"):
            indices = [each for each in torch.utils._pytree.tree_leaves(args[1:]) if isinstance(each, Tensor)]
            assert not any(each.dtype in (torch.bool, torch.uint8) for each in indices), f"{func} by a mask"
        return func(*args, **(kwargs or {}))


def passes(model: HookedTransformer) -> Iterator[Callable[[], Tensor]]:
    """A plain pass, a masked one, steps of a cache with no mask, one of the new positions and one of all, and the same
    with a cache of values; each without what a user does before."""
    tokens, step, mask = prompt(), prompt(1), padded(prompt())
    longer = torch.cat((mask, torch.ones_like(step)), dim=1)
    yield lambda: model(tokens)
    yield lambda: model(tokens, attention_mask=mask)
    yield lambda: model(tokens, attention_mask=torch.ones_like(mask))
    yield lambda: model(tokens, attention_mask=mask, return_type="loss")
    yield lambda: model.run_with_cache(tokens)[0]
    yield lambda: model.run_with_cache(tokens, attention_mask=mask)[0]
    for first, then in ((None, None), (mask, None), (mask, longer), (mask, torch.ones_like(step))):
        cache = KVCache(model)
        yield lambda cache=cache, first=first: model(tokens, attention_mask=first, kv_cache=cache)
        yield lambda cache=cache, then=then: model(step, attention_mask=then, kv_cache=cache)
        yield lambda cache=cache: model.run_with_cache(step, kv_cache=cache)[0]


@pytest.mark.unchecked
@pytest.mark.parametrize("recipe", [*BASES, MANY, LONGROPE], ids=lambda recipe: recipe.id)
def test_no_number_is_asked_of_a_device(checkpoints: Folders, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a look is free and saves work, so it is taken there; where the memory is another's, it is not."""
    for attn, gradients in (("sdpa", False), ("eager", True)):
        model = HookedTransformer.from_pretrained(checkpoints(recipe), attn_implementation=attn)
        with torch.set_grad_enabled(gradients):
            expected = [run() for run in passes(model)]
            with monkeypatch.context() as patch:
                patch.setattr(tracing, "LOCAL", "here")
                found = []
                for run in passes(model):
                    with NoNumberAsked():
                        found.append(run())
        for ours, same in zip(found, expected, strict=True):
            # A mask that is all ones goes through the masked kernel, which rounds otherwise than the one without.
            torch.testing.assert_close(ours, same, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[0], expected[0])


def test_a_number_asked_for_is_noticed() -> None:
    """The mode above sees each way to ask."""
    x = torch.ones(2, 2)
    asks: list[Callable[[], Any]] = [
        lambda: x.sum().item(), lambda: x.tolist(), lambda: bool(x.all()), lambda: int(x.sum()), lambda: x.nonzero(),
        lambda: torch.equal(x, x), lambda: x[x > 0], lambda: torch.where(x > 0), lambda: x.unique(), lambda: x.cpu(),
        lambda: x.masked_select(x > 0), lambda: [1, 2][x.sum().long() - 4], lambda: x.numpy(), lambda: 1.0 in x,
    ]  # fmt: skip
    for ask in asks:
        with pytest.raises(AssertionError, match=r"called|by a mask"), NoNumberAsked():
            ask()


def test_a_device_without_numbers_runs_it_all(checkpoints: Folders, base: Recipe) -> None:
    """The meta device has no numbers to ask for, and refuses to."""
    tokens, mask = prompt().to("meta"), padded(prompt()).to("meta")
    for dtype, attn in ((torch.float32, "sdpa"), (torch.float16, "eager")):
        model = HookedTransformer.from_pretrained(checkpoints(base), dtype=dtype, attn_implementation=attn).to("meta")
        with torch.no_grad():
            assert model.run_with_cache(tokens)[0].is_meta
            cache = KVCache(model)
            model(tokens, attention_mask=mask, kv_cache=cache)
            assert model(tokens[:, :1], attention_mask=torch.cat((mask, mask[:, -1:]), dim=1), kv_cache=cache).is_meta


# -- in the memory of what is no longer needed ---------------------------------------------------------------------


def test_arithmetic_in_place_is_the_same_arithmetic() -> None:
    x, y, mask = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([True, False, True, False])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                other = y.to(dtype).requires_grad_(gradients)
                for mine, theirs in ((times, torch.mul), (plus, torch.add)):
                    for operand in (other, other[0], *((0.3,) if mine is times else ())):
                        expected = theirs(x, operand)
                        assert torch.equal(mine(x.clone(), operand), expected)
                        assert mine(x.clone(), operand).dtype == expected.dtype
                assert torch.equal(filled(x.clone(), mask, -2.0), x.masked_fill(mask, -2.0))


def test_arithmetic_in_place_allocates_nothing_where_nobody_records() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        for done in (times(x, y), plus(x, y), times(x, 2.0), filled(x, y > 0, 0.0)):
            assert done is x
    assert times(x, y.requires_grad_()) is not x
    assert times(x.requires_grad_(), 2.0) is not x


@pytest.mark.parametrize("base", [BASES[0], MIXTURES[0]], ids=lambda base: base.id)
def test_vmap_takes_masks(checkpoints: Folders, base: Recipe) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base))
    masks = torch.stack([padded(prompt(LENGTH, 1), by) for by in (0, 2, 5)])
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # slow where torch has no rule for a batch
            logits = torch.func.vmap(lambda mask: model(prompt(LENGTH, 1), attention_mask=mask))(masks)
            for mask, ours in zip(masks, logits, strict=True):
                torch.testing.assert_close(ours, model(prompt(LENGTH, 1), attention_mask=mask))


def test_vmap_takes_few_rows_of_many_experts(checkpoints: Folders) -> None:
    for dtype in (torch.float32, torch.float64):
        model = HookedTransformer.from_pretrained(checkpoints(MANY), dtype=dtype)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = torch.func.vmap(model)(prompt(1)[:, None])
            torch.testing.assert_close(logits[:, 0], model(prompt(1)))


# -- compiled ------------------------------------------------------------------------------------------------------

COMPILED = """
import sys, warnings, torch
from tests.tiny import prompt
from transformer_std import HookedTransformer
from transformer_std.kv_cache import KVCache
warnings.simplefilter("ignore")

def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="eager")

def close(ours, theirs):  # a mask of ones goes through the masked kernel
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

torch.set_grad_enabled(False)
tokens = prompt()
ones, left, right = (torch.ones_like(tokens) for _ in range(3))
left[0, :3], right[1, -2:] = 0, 0
for folder in sys.argv[1:]:
    model = HookedTransformer.from_pretrained(folder)
    run = compiled(model)
    for mask in (ones, left, right):
        close(run(tokens, attention_mask=mask), model(tokens, attention_mask=mask))
    run, answers, longer = compiled(model), [], torch.cat((left, ones[:, :1]), dim=1)
    for each in (run, model):
        cache = KVCache(model)
        each(tokens, attention_mask=left, kv_cache=cache)
        answers.append(each(tokens[:, :1], attention_mask=longer, kv_cache=cache))
    close(*answers)

model = HookedTransformer.from_pretrained(sys.argv[1])
close(compiled(model)(tokens, attention_mask=left, return_type="loss"),
      model(tokens, attention_mask=left, return_type="loss"))
half = HookedTransformer.from_pretrained(sys.argv[1], dtype=torch.float16, attn_implementation="eager")
close(compiled(half)(tokens), half(tokens))
"""

SWEPT = """
import sys, warnings, torch
from tests.tiny import prompt
from transformer_std import HookedTransformer
warnings.simplefilter("ignore")
torch.set_grad_enabled(False)
model, tokens = HookedTransformer.from_pretrained(sys.argv[1]), prompt()
graphs = torch._dynamo.utils.counters["stats"]
compiled = torch.compile(model, fullgraph=True, backend="eager")
compiled(tokens)
with torch.compiler.set_stance("eager_on_recompile"):
    for layer in range(model.num_layers):
        for value in ("layer_input", "attention_output", "attention_queries", "attention_probabilities", "mlp_output"):
            for double in (lambda value, hook: value * 2, lambda value, hook: value + 1):
                with model.hooks(fwd_hooks=[((value, layer), double)]):
                    assert torch.equal(compiled(tokens), model(tokens)), (value, layer)
    torch.testing.assert_close(compiled(tokens), model(tokens))
assert graphs["unique_graphs"] == 1, graphs
"""


def run_apart(script: str, *arguments: str) -> None:
    """In a process of its own, since the tests' type checks are nothing to compile."""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_compiled_as_one_graph_it_takes_masks(checkpoints: Folders) -> None:
    """On a parallel block, and on a dense one below a mixture with a window: with masks, with a cache and masks, once
    each for the loss, and on the open path in float16, which looks where it can. Every family is compiled in
    test_placing.py."""
    run_apart(COMPILED, str(checkpoints(ONE)), str(checkpoints(TWO)))


def test_compiled_a_sweep_of_hooks_needs_one_graph(checkpoints: Folders) -> None:
    """More hooks in turn than torch compiles graphs for: in the stance that the README names they run as without a
    compiler, and plain passes stay compiled."""
    run_apart(SWEPT, str(checkpoints(BASES[0])))
