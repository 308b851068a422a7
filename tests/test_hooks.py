"""Names, filters, hooks and the cache: what a user leans on, and every way to hold it wrong."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import BASES, LENGTH, Folders, Recipe, prompt
from transformer_std import HookedTransformer, Unavailable, UnknownName
from transformer_std.hooks.hook_point import HookPoint

PHI, PHI3 = BASES[0], next(recipe for recipe in BASES if recipe.family == "phi3")


@pytest.fixture
def model(checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(PHI3))


@pytest.fixture
def parallel(checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(PHI))


def handles(model: HookedTransformer) -> int:
    return sum(len(point._handles) for point in model.names.points.values())


# -- names_filter ------------------------------------------------------------------------------------------------

FILTERS: list[tuple[Any, list[str]]] = [
    ("layers.1.mlp.mlp_output", ["layers.1.mlp.mlp_output"]),
    ("mlp_output", [f"layers.{i}.mlp.mlp_output" for i in range(3)]),
    ("logits", ["logits"]),
    (("layer_mid", 2), ["layers.2.layer_mid"]),
    (("layer_mid", -1), ["layers.2.layer_mid"]),
    ("layers.0.*norm_output", ["layers.0.attention_norm_output", "layers.0.mlp_norm_output"]),
    (["logits", ("layer_mid", 0), "layers.0.layer_mid"], ["layers.0.layer_mid", "logits"]),
    (lambda name: name.endswith("layer_mid"), [f"layers.{i}.layer_mid" for i in range(3)]),
]


@pytest.mark.parametrize(("names_filter", "expected"), FILTERS, ids=range(len(FILTERS)))
@torch.no_grad()
def test_names_filter(names_filter: Any, expected: list[str], model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt(), names_filter=names_filter)
    assert list(cache) == expected
    seen: list[str] = []
    model.run_with_hooks(prompt(), fwd_hooks=[(names_filter, lambda value, hook: seen.append(hook.name))])
    assert sorted(seen) == sorted(expected)


ENTRANCES: list[Callable[[HookedTransformer, Any], Any]] = [
    lambda model, name: model.run_with_cache(prompt(), names_filter=name),
    lambda model, name: model.run_with_hooks(prompt(), fwd_hooks=[(name, print)]),
    lambda model, name: model.run_with_hooks(prompt(), bwd_hooks=[("logits", print), (name, print)]),
    lambda model, name: model.add_hook(name, print),
    lambda model, name: model.run_with_cache(prompt())[1][name],
]

BAD: list[tuple[Any, type[Exception], str]] = [
    ("layers.1.layer_mid", Unavailable, "layers.1.layer_mid is unavailable: the block is parallel"),
    (("layer_mid", 1), Unavailable, "layer_mid is unavailable on layer 1: the block is parallel"),
    ("mlp_outptu", UnknownName, "no value 'mlp_outptu'; did you mean mlp_output"),
    (("mlp_outptu", 0), UnknownName, "did you mean mlp_output"),
    (("mlp_output", 3), UnknownName, "layer 3 is out of range: the model has layers 0 to 2"),
    (("logits", 1), UnknownName, "logits is a value of the model, not of a block"),
    (("mlp_up", 0), Unavailable, "not gated"),
]


@pytest.mark.parametrize("enter", ENTRANCES, ids=["cache", "hooks", "backward", "add", "look-up"])
@pytest.mark.parametrize(("name", "error", "message"), BAD, ids=str)
def test_bad_names(enter: Any, name: Any, error: Any, message: str, parallel: HookedTransformer) -> None:
    with pytest.raises(error, match=message):
        enter(parallel, name)
    assert handles(parallel) == 0, "a refused name left hooks behind"


def test_bad_filters(model: HookedTransformer) -> None:
    with pytest.raises(UnknownName, match=r"no value of this model matches 'layers\.9\.\*'"):
        model.add_hook("layers.9.*", print)
    with pytest.raises(TypeError, match="names_filter is 3; give a name"):
        model.run_with_cache(prompt(), names_filter=3)
    with pytest.raises(ValueError, match="input_ids holds integers"):
        model.add_hook("input_ids", print, backward=True)
    for nothing in ([], lambda name: False):
        with pytest.raises(UnknownName, match="means no value"):
            model.add_hook(nothing, print)
    with pytest.raises(UnknownName, match="is true of no name of this model"):
        model.run_with_cache(prompt(), names_filter=lambda name: False)
    assert len(model.run_with_cache(prompt(), names_filter=[])[1]) == 0
    for pair in (("logits", print), {"logits": print}, [("logits", print, 1)]):
        with pytest.raises(TypeError, match="fwd_hooks is a list of pairs"):
            model.run_with_hooks(prompt(), fwd_hooks=pair)
    with pytest.raises(TypeError, match="unexpected keyword argument 'prepend_bos'"):
        model.run_with_cache(prompt(), prepend_bos=True)
    assert handles(model) == 0


def test_support(parallel: HookedTransformer, model: HookedTransformer) -> None:
    for each in (parallel, model):
        of_blocks = {value: why for value, why in each.support().items() if None not in each.names.by_value[value]}
        assert len(of_blocks) > 20
        for value, reasons in of_blocks.items():
            for layer in range(each.num_layers):
                if reasons and layer in reasons:
                    assert each.support(layer)[value] == reasons[layer]
                    with pytest.raises(Unavailable, match="unavailable"):
                        each.add_hook((value, layer), print)
                else:
                    assert each.support(layer)[value] is None
                    assert isinstance(each.names.at(value, layer).point, HookPoint)
    assert parallel.support()["layer_mid"] == dict.fromkeys(range(3), parallel.layers[0].lacks)
    assert model.support()["layer_mid"] is None


# -- hooks -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop(*_: Any) -> None:
    raise Stop


@pytest.mark.parametrize("where", ["input_ids", "layers.1.self_attn.attention_scores", "logits"])
def test_hooks_vanish_whatever_is_raised(where: str, model: HookedTransformer) -> None:
    clean = model(prompt())
    for run in (
        lambda: model.run_with_hooks(prompt(), fwd_hooks=[("mlp_output", lambda v, hook: v * 2), (where, stop)]),
        lambda: model.run_with_cache(prompt(), names_filter=stop),
        lambda: model.run_with_hooks(prompt(), bwd_hooks=[("mlp_output", stop)]).sum().backward(),
    ):
        with pytest.raises(Stop):
            run()
        assert handles(model) == 0
        assert torch.equal(model(prompt()), clean)
    with pytest.raises(Stop), model.hooks(fwd_hooks=[(where, stop)]):
        model.run_with_cache(prompt())
    assert handles(model) == 0


def double(value: Tensor, hook: HookPoint) -> Tensor:
    return value * 2


def test_contexts_remove_their_own(model: HookedTransformer) -> None:
    name = ("mlp_output", 1)
    with torch.no_grad():
        clean, one, two = (model.run_with_hooks(prompt(), fwd_hooks=[(name, double)] * n) for n in range(3))
        with model.hooks(fwd_hooks=[(name, double)]):
            with model.hooks(fwd_hooks=[(name, double)]):
                assert torch.equal(model(prompt()), two)
            assert torch.equal(model(prompt()), one)
            model.run_with_cache(prompt())
            assert torch.equal(model(prompt()), one)
        assert torch.equal(model(prompt()), clean)
        with model.hooks(fwd_hooks=[(name, double)]):
            handle = model.add_hook(name, double)
        assert torch.equal(model(prompt()), one), "a hook added inside outlives the context"
        handle.remove()
        handle.remove()
        assert torch.equal(model(prompt()), clean)


@torch.no_grad()
def test_permanent_hooks(model: HookedTransformer) -> None:
    clean = model(prompt())
    permanent = model.add_hook("mlp_output", double, permanent=True)
    changed = model(prompt())
    model.add_hook("mlp_output", double)
    model.reset_hooks()
    assert torch.equal(model(prompt()), changed)
    assert not torch.equal(changed, clean)
    assert "double at layers.0.mlp.mlp_output" in repr(permanent)
    with permanent:
        pass
    assert torch.equal(model(prompt()), clean)
    model.add_hook("mlp_output", double, permanent=True)
    model.reset_hooks(including_permanent=True)
    assert torch.equal(model(prompt()), clean)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            lambda v, hook: v[:, :-1],
            ValueError,
            r"layers.1.layer_mid returned \[2, 12, 96\] .* the value is \[2, 13, 96\]",
        ),
        (lambda v, hook: v.half(), ValueError, r"returned \[2, 13, 96\] float16 .* Residual \[batch seq hidden_size\]"),
        (lambda v, hook: v.tolist(), TypeError, "returned list; return a tensor"),
        (lambda v, hook: v.to("meta"), ValueError, "on meta; the value is"),
    ],
)
def test_bad_returns(bad: Any, error: Any, message: str, model: HookedTransformer) -> None:
    with pytest.raises(error, match=message):
        model.run_with_hooks(prompt(), fwd_hooks=[(("layer_mid", 1), bad)])
    assert handles(model) == 0


def test_bad_gradients(model: HookedTransformer) -> None:
    out = model.run_with_hooks(prompt(), bwd_hooks=[(("layer_mid", 1), lambda grad, hook: grad[:1])])
    with pytest.raises(ValueError, match=r"layers.1.layer_mid returned \[1, 13, 96\]"):
        out.sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="needs autograd"):
        model.run_with_hooks(prompt(), bwd_hooks=[("layer_mid", print)])


def test_hook_point_attributes(model: HookedTransformer) -> None:
    seen = {}

    def look(value: Tensor, hook: HookPoint) -> None:
        hook.ctx["count"] = hook.ctx.get("count", 0) + 1
        seen[hook.name] = (hook.layer, hook.value, hook.step, hook.ctx["count"], hook.description)

    with model.hooks(fwd_hooks=[(("attention_queries", 2), look)]):
        model(prompt())
        model(prompt())
    expected = (2, "attention_queries", 0, 2, "The queries entering attention")
    assert seen == {"layers.2.self_attn.attention_queries": expected}
    assert model.layers[2].self_attn.attention_queries.ctx == {}
    assert "attention_queries: Queries [batch num_heads seq qk_head_dim]" in repr(
        model.layers[2].self_attn.attention_queries
    )


def test_the_tensor_a_hook_gets_is_the_one_the_model_uses(model: HookedTransformer) -> None:
    kept: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: HookPoint) -> None:
        value.retain_grad()
        kept[hook.name] = value

    model.run_with_hooks(prompt(), fwd_hooks=[("layer_mid", keep)]).sum().backward()
    _, cache = model.run_with_cache(prompt(), names_filter="layer_mid", incl_bwd=True)
    model.run_with_cache(prompt(), names_filter="layer_mid", incl_bwd=True)
    out, cache = model.run_with_cache(prompt(), names_filter="layer_mid", incl_bwd=True)
    out.sum().backward()
    assert len(kept) == model.num_layers
    for name, value in kept.items():
        assert torch.equal(value.grad, cache[name + "_grad"])
        assert torch.equal(value, cache[name])


def test_values_that_wait_are_what_they_were(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    """Head results and an expert's values are computed when they are looked at: of the weights and tensors of the run,
    whatever became of them since."""
    model = HookedTransformer.from_pretrained(checkpoints(base))
    tokens = prompt().repeat(2, 1)  # as many positions as a head has dimensions, and more
    assert tokens.numel() >= model.head_dim
    _, at_once = model.run_with_cache(tokens, keep_graph=True)
    _, cache = model.run_with_cache(tokens)
    _, saved = model.run_with_cache(tokens)
    _, moved = model.run_with_cache(tokens)
    before = cache.num_bytes
    assert "attention_result: computed when it is looked at x" in repr(cache)
    for parameter in model.parameters():
        parameter.data.zero_()
    torch.save(saved, tmp_path / "cache.pt")
    read = torch.load(tmp_path / "cache.pt", weights_only=False)
    moved = moved.to(torch.float64)
    for name, value in at_once.items():
        if isinstance(value, Tensor):
            assert torch.equal(cache[name], value), name
            assert torch.equal(read[name], value), name
            assert torch.equal(moved[name].to(value.dtype), value), name
            assert not cache[name].requires_grad
    assert cache.num_bytes > before
    assert cache["attention_result", 0] is cache["attention_result", 0]


@torch.no_grad()
def test_what_waits_does_not_follow_what_it_is_made_of(model: HookedTransformer) -> None:
    tokens = prompt().repeat(2, 1)
    _, at_once = model.run_with_cache(tokens, keep_graph=True)
    with torch.inference_mode():
        _, cache = model.run_with_cache(tokens)
        cache["attention_premix", 0].zero_()
        assert torch.equal(cache["attention_result", 0], at_once["attention_result", 0])
    with torch.enable_grad():
        weight = torch.ones((), requires_grad=True)
        (cache["attention_result", 0] * weight).sum().backward()
    for copied in (copy.copy(cache), copy.deepcopy(cache)):
        assert torch.equal(copied["attention_result", 1], at_once["attention_result", 1])
        assert copied.model is model
    copy.deepcopy(cache)["mlp_output", 0].zero_()
    assert torch.equal(cache["mlp_output", 0], at_once["mlp_output", 0])
    with pytest.raises(ValueError, match="remove_batch_dim is for a batch of one"):
        model.run_with_cache(tokens, names_filter="attention_result", remove_batch_dim=True)


@torch.no_grad()
def test_a_filtered_cache_holds_what_was_asked_for(base: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(base))
    names = ["layer_output", "attention_output", "mlp_output"]
    _, cache = model.run_with_cache(prompt(), names_filter=names)
    assert sorted(cache) == sorted(point.name for point in model.names.resolve(names))
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in cache.values()}
    assert sum(held.values()) == cache.num_bytes == len(cache) * prompt().numel() * model.hidden_size * 4


def test_gradients_come_to_the_first_hook_first(model: HookedTransformer) -> None:
    order: list[str] = []

    def halve(grad: Tensor, hook: HookPoint) -> Tensor:
        order.append("halve")
        return grad / 2

    with model.hooks(bwd_hooks=[("layer_mid", halve), ("layer_mid", lambda grad, hook: order.append("look"))]):
        _, cache = model.run_with_cache(prompt(), names_filter="layer_mid", incl_bwd=True, return_type="loss")
    _, plain = model.run_with_cache(prompt(), names_filter="layer_mid", incl_bwd=True, return_type="loss")
    assert order == ["halve", "look"] * model.num_layers
    last = model.num_layers - 1
    assert torch.equal(cache["layer_mid_grad", last], plain["layer_mid_grad", last] / 2)


def test_a_hook_beside_a_reader_leaves_nothing_waiting(model: HookedTransformer) -> None:
    tokens = prompt().repeat(2, 1)
    with model.hooks(fwd_hooks=[("attention_result", lambda value, hook: value * 2)]):
        _, cache = model.run_with_cache(tokens, names_filter=["attention_result", "attention_output"])
        assert cache.num_bytes == sum(value.nbytes for value in cache.values())
    summed = cache["attention_result", 0].sum(2) + model.layers[0].self_attn.b_O
    torch.testing.assert_close(summed, cache["attention_output", 0])  # a sum over heads rounds otherwise than a product


@pytest.mark.parametrize("name", ["input_ids", "layer_input"])
def test_a_hook_on_an_input_whose_rows_share_memory(name: str, model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt()[:1], names_filter=["layer_input", "input_ids"])
    shared = cache["input_ids"].expand(3, -1) if name == "input_ids" else cache["layer_input", 1].expand(3, -1, -1)
    options = {} if name == "input_ids" else {"start_at_layer": 1}
    at = name if name == "input_ids" else (name, 1)

    def change_one_row(value: Tensor, hook: HookPoint) -> None:
        value[1] = 0

    changed = model.run_with_hooks(shared, fwd_hooks=[(at, change_one_row)], **options)
    plain = model(shared, **options)
    assert torch.equal(changed[0], plain[0])
    assert torch.equal(changed[2], plain[2])
    assert not torch.equal(changed[1], plain[1])
    windows = prompt().flatten().unfold(0, 8, 3)  # overlapping rows
    assert torch.equal(model.run_with_hooks(windows, fwd_hooks=[("input_ids", change_one_row)])[2], model(windows)[2])


def test_backward_hooks(model: HookedTransformer) -> None:
    name = ("layer_mid", 1)

    def weight_grad(hook: Any) -> Tensor:
        model.zero_grad()
        model.run_with_hooks(prompt(), bwd_hooks=[] if hook is None else [(name, hook)]).square().sum().backward()
        assert handles(model) == 0
        return model.layers[0].mlp.down.weight.grad.clone()

    clean = weight_grad(None)
    assert torch.equal(weight_grad(lambda grad, hook: None), clean)
    assert torch.equal(weight_grad(lambda grad, hook: grad), clean)
    assert torch.equal(weight_grad(lambda grad, hook: grad * 2), clean * 2)
    assert torch.equal(weight_grad(lambda grad, hook: torch.zeros_like(grad)), clean * 0)
    model.zero_grad()
    with model.hooks(bwd_hooks=[(name, lambda grad, hook: grad * 2)]):
        out = model(prompt())
    out.square().sum().backward()
    assert torch.equal(model.layers[0].mlp.down.weight.grad, clean), "a context's backward hook outlived it"


def test_a_name_that_cannot_fire_is_refused(model: HookedTransformer) -> None:
    for name in (("mlp_output", 2), "layers.2.mlp.mlp_output", ["logits", ("layer_mid", -1)]):
        for run in (
            lambda: model.run_with_hooks(prompt(), fwd_hooks=[(name, double)], stop_at_layer=2),  # noqa: B023
            lambda: model.run_with_cache(prompt(), names_filter=name, stop_at_layer=2),  # noqa: B023
        ):
            with pytest.raises(UnknownName, match=r"layers.2.* is not reached: this pass runs layers 0 to 1"):
                run()
    assert len(model.run_with_cache(prompt(), names_filter="mlp_output", stop_at_layer=2)[1]) == 2
    assert handles(model) == 0


def test_an_index_error_in_a_hook_is_the_hooks_own(model: HookedTransformer) -> None:
    def beyond(value: Tensor, hook: HookPoint) -> Tensor:
        return value[:, 99]

    with pytest.raises(IndexError, match="index 99 is out of bounds"):
        model.run_with_hooks(prompt(), fwd_hooks=[("token_embeddings", beyond)])


# -- the cache ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_cached_values_are_not_edited_later(model: HookedTransformer) -> None:
    """Neighbouring values can be one tensor; an edit in place at one is no edit of what was cached at the other."""
    _, clean = model.run_with_cache(prompt())

    def zero(value: Tensor, hook: HookPoint) -> None:
        value.zero_()

    compared = 0
    inputs = {"input_ids", "attention_mask", "input_size", "next_token_probs"}
    for target in [name for name in clean if name not in inputs and not name.startswith(("layers.0", "layers.1"))]:
        with model.hooks(fwd_hooks=[(target, zero)]):
            _, edited = model.run_with_cache(prompt())
        before = list(clean)[: list(clean).index(target)]
        for name in before:
            if name.startswith("layers") and not name.startswith(target[:8]):
                assert torch.equal(edited[name], clean[name]), (target, name)
                compared += 1
        assert not edited[target].any()
    assert compared > 1000


def test_cache_is_a_mapping(model: HookedTransformer) -> None:
    logits, cache = model.run_with_cache(prompt(), names_filter=["logits", "mlp_output", "attention_queries"])
    assert cache["logits"].data_ptr() == logits.data_ptr()
    assert cache["mlp_output", 1] is cache["layers.1.mlp.mlp_output"]
    assert cache["mlp_output", -1] is cache["mlp_output", 2]
    assert torch.equal(cache.stack("mlp_output"), torch.stack([cache["mlp_output", i] for i in range(3)]))
    assert len(cache) == 7
    assert ("mlp_output", 1) in cache
    assert "layers.1.layer_mid" not in cache
    assert cache.get("nonsense") is None
    assert dict(cache).keys() == cache.keys()
    assert cache.num_bytes == sum(value.nbytes for value in cache.values())
    assert all(value.dtype == torch.float16 for value in cache.to(torch.float16).values())
    assert cache.to("meta")["logits"].device.type == "meta"
    assert model.lm_head.weight.device.type == "cpu"
    with pytest.raises(UnknownName, match="layer_mid is not in this cache: names_filter left it out"):
        cache["layer_mid", 1]
    with pytest.raises(UnknownName, match=r"mlp_output is a value of every block: ask for \('mlp_output', layer\)"):
        cache["mlp_output"]
    with pytest.raises(UnknownName, match="run with incl_bwd=True"):
        cache["mlp_output_grad", 0]
    assert not any(value.requires_grad for value in cache.values())
    _, kept = model.run_with_cache(prompt(), names_filter="mlp_output", keep_graph=True)
    assert all(value.requires_grad for value in kept.values())
    _, moved = model.run_with_cache(prompt(), names_filter="mlp_output", device="meta")
    assert moved["mlp_output", 0].device.type == "meta"


def test_remove_batch_dim(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(prompt()[:1], remove_batch_dim=True)
    assert cache["attention_queries", 0].shape == (6, LENGTH, 16)
    assert cache["logits"].shape == (LENGTH, model.vocab_size)
    with pytest.raises(ValueError, match="remove_batch_dim is for a batch of one; this one has 2 rows"):
        model.run_with_cache(prompt(), remove_batch_dim=True)
    assert handles(model) == 0


def test_deleting_frees_without_the_garbage_collector(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(PHI3))
    _, cache = model.run_with_cache(prompt(), incl_bwd=True, return_type="loss", keep_graph=True)
    watched = [weakref.ref(cache["layer_mid", 1]), weakref.ref(cache), weakref.ref(model)]
    model.run_with_hooks(prompt(), fwd_hooks=[("mlp_output", double)])
    gc.disable()
    try:
        del cache
        assert watched[0]() is None
        assert watched[1]() is None
        del model
        assert watched[2]() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_copies_are_models_of_their_own(model: HookedTransformer) -> None:
    other = copy.deepcopy(model)
    clean = model(prompt())
    other.add_hook("mlp_output", double)
    assert torch.equal(model(prompt()), clean)
    assert not torch.equal(other(prompt()), clean)


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.randn(2, 3, 96)), "a stream .* goes with start_at_layer"),
        (lambda m: m(torch.tensor(3)), r"token ids \[batch seq\]"),
        (lambda m: m(torch.empty(1, 0, dtype=torch.long)), "no tokens"),
        (lambda m: m(torch.tensor([[5, 131]])), "token ids run from 5 to 131; the vocabulary has 131"),
        (
            lambda m: m(prompt(), attention_mask=torch.ones(2, 12)),
            r"attention_mask is \[2, 12\]; the input is \[2, 13\]",
        ),
        (lambda m: m(prompt(), position_ids=torch.arange(13)), r"position_ids are \[13\]"),
        (lambda m: m(prompt(), return_type="logit"), "return_type is 'logit'; give 'logits', 'loss', 'both' or None"),
        (lambda m: m(prompt(), stop_at_layer=4), "stop_at_layer is 4; the model has 3 layers"),
        (lambda m: m(torch.randn(2, 13, 96), start_at_layer=2, stop_at_layer=1), "start_at_layer 2 is past"),
        (lambda m: m(prompt(), start_at_layer=1), r"the input is the stream \[batch seq 96\], not \[2, 13\]"),
        (lambda m: m(torch.randn(2, 13, 96), start_at_layer=1, return_type="loss"), "the loss needs the tokens"),
        (lambda m: m("text"), "no tokenizer"),
        (lambda m: m(torch.ones(1, 2, dtype=torch.bool)), "token ids"),
        (lambda m: m(prompt()[:0]), r"no tokens: it is \[0, 13\]"),
        (lambda m: m(torch.randn(2, 13, 96).double(), start_at_layer=1), "the model reads .* of torch.float32"),
        (lambda m: m(prompt(1), return_type="loss"), "the loss needs two real tokens in a row"),
        (
            lambda m: m(prompt(), return_type="loss", last_logits_only=True),
            "the loss needs the logits of every position",
        ),
        (lambda m: m(prompt(), attention_mask=torch.zeros(2, 13), return_type="loss"), "two real tokens in a row"),
    ],
)
def test_bad_input(call: Any, message: str, model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match=message):
        call(model)
    assert model(prompt(), return_type=None) is None


# -- values that are one tensor ----------------------------------------------------------------------------------


def gradients(model: HookedTransformer, **hooks: Any) -> dict[str, Tensor]:
    model.zero_grad()
    with model.hooks(**hooks):
        _, cache = model.run_with_cache(prompt(), incl_bwd=True, return_type="loss")
    return {name: value for name, value in cache.items() if name.endswith("_grad")} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("value", ["mlp_output", "attention_output", "layer_mid", "attention_result", "mlp_input"])
def test_a_gradient_edited_in_place_is_one_returned(value: str, model: HookedTransformer) -> None:
    def zero(grad: Tensor, hook: HookPoint) -> None:
        grad.zero_()

    in_place = gradients(model, bwd_hooks=[((value, 1), zero)])
    returned = gradients(model, bwd_hooks=[((value, 1), lambda grad, hook: grad * 0)])
    for name, gradient in returned.items():
        torch.testing.assert_close(in_place[name], gradient, msg=name)


def test_a_gradient_reaches_its_sublayer_only(parallel: HookedTransformer) -> None:
    looked_at = gradients(parallel, fwd_hooks=[(("mlp_input", 1), lambda value, hook: None)])
    plain = gradients(parallel)
    for name, gradient in looked_at.items():
        torch.testing.assert_close(plain[name], gradient, msg=name)
    parts = [plain[f"layers.1.{name}_grad"] for name in ("attention_input", "mlp_input", "mlp_norm_output")]
    torch.testing.assert_close(parts[0] + parts[1], parts[2])
    cut = gradients(parallel, bwd_hooks=[(("mlp_input", 1), lambda grad, hook: grad * 0)])
    assert cut["layers.1.self_attn.projections.q.weight"].any()
    torch.testing.assert_close(cut["layers.1.mlp_norm_output_grad"], plain["layers.1.attention_input_grad"])


def test_gradients_meet_hooks_in_order(model: HookedTransformer) -> None:
    seen: list[float] = []
    hooks = [
        ("logits", lambda grad, hook: grad * 0),
        ("lm_head_output", lambda grad, hook: seen.append(float(grad.abs().sum()))),
    ]
    model.run_with_hooks(prompt(), bwd_hooks=hooks, return_type="loss").backward()
    assert seen == [0.0]


@torch.no_grad()
def test_a_tensor_that_a_hook_returns_is_not_edited(model: HookedTransformer) -> None:
    _, clean = model.run_with_cache(prompt())
    kept = clean["layer_output", 0].clone()

    def zero(value: Tensor, hook: HookPoint) -> None:
        value.zero_()

    hooks = [(("layer_output", 0), lambda value, hook: clean["layer_output", 0]), (("layer_output", 0), zero)]
    model.run_with_hooks(prompt(), fwd_hooks=hooks)
    assert torch.equal(clean["layer_output", 0], kept)


def test_a_users_own_leaf_keeps_no_hook(model: HookedTransformer) -> None:
    stream = torch.randn(1, 5, model.hidden_size, requires_grad=True)
    model.run_with_hooks(stream, start_at_layer=1, bwd_hooks=[(("layer_input", 1), stop)])
    (stream * 2).sum().backward()
