"""Values that are made beside the forward: norms' scales, and a copy for each head of what its projections read."""

import pytest
import torch
from torch import Tensor

from tests.tiny import Folders, Recipe, prompt
from transformer_std import HookedTransformer
from transformer_std.components.norms import RMSNorm
from transformer_std.config import Mixture

SCALES = {  # with the value that the norm reads, and where the norm is
    "attention_norm_scale": ("layer_input", "attention_norm"),
    "mlp_norm_scale": (None, "mlp_norm"),
    "attention_post_norm_scale": ("attention_unnormed_output", "self_attn.post_norm"),
    "mlp_post_norm_scale": ("mlp_unnormed_output", "mlp.post_norm"),
}
INPUTS = {
    "attention_query_inputs": "attention_queries_before_rotary",
    "attention_key_inputs": "attention_keys_before_rotary",
    "attention_value_inputs": "attention_values",
}


def loaded(recipe: Recipe, checkpoints: Folders) -> HookedTransformer:
    return HookedTransformer.from_pretrained(checkpoints(recipe), attn_implementation="eager")


def root_mean_square(norm: torch.nn.Module, x: Tensor) -> Tensor:
    x = x.double()
    centred = x if isinstance(norm, RMSNorm) else x - x.mean(-1, keepdim=True)
    return (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def derived(model: HookedTransformer) -> list[str]:
    return [name for name, point in model.names.points.items() if point.derived]


@torch.no_grad()
def test_scales_are_what_norms_divide_by(family: Recipe, checkpoints: Folders) -> None:
    model = loaded(family, checkpoints)
    _, cache = model.run_with_cache(prompt())
    checked = 0
    for name in cache:
        point = model.names.points[name]
        value = point.value
        if value == "final_norm_scale":
            norm, whole = model.norm, cache["layer_output", model.num_layers - 1]
        elif value in SCALES:
            block = model.layers[point.layer]
            read, where = SCALES[value]
            norm = block.get_submodule(where)
            whole = cache[read or block.readers["mlp"][1], point.layer]
        else:
            continue
        torch.testing.assert_close(cache[name].double(), root_mean_square(norm, whole), rtol=1e-5, atol=1e-6)
        checked += 1
    assert checked == sum(name.endswith("_scale") for name in derived(model)) > 0


def edit(value: Tensor, hook: object) -> Tensor:
    """Differs between positions and between entries: a norm further on sees no common factor."""
    by_position = torch.linspace(0.5, 1.5, value.shape[1])[None, :, None].to(value)
    return value * by_position if value.ndim == 3 else value + value.roll(1, dims=-1)


def test_derived_values_are_free_to_look_at_and_written_alone(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints)
    plain = model(prompt())
    names = derived(model)
    out, _ = model.run_with_cache(prompt(), names_filter=names)
    assert torch.equal(out, plain)
    for name in names:
        assert torch.equal(model.run_with_hooks(prompt(), fwd_hooks=[(name, lambda v, hook: v.clone())]), plain), name
        written = model.run_with_hooks(prompt(), fwd_hooks=[(name, edit)])
        assert not torch.allclose(written, plain, atol=1e-4), name


@torch.no_grad()
def test_a_written_scale_is_divided_by(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints)
    _, cache = model.run_with_cache(prompt())
    with model.hooks(fwd_hooks=[("final_norm_scale", lambda v, hook: v * 2)]):
        _, wide = model.run_with_cache(prompt(), names_filter="final_norm_output")
    bias = getattr(model.norm, "bias", None)
    bias = 0 if bias is None else bias
    expected = (cache["final_norm_output"] - bias) / 2 + bias
    torch.testing.assert_close(wide["final_norm_output"], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_each_head_has_its_own_copy(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints)
    attention = model.layers[1].self_attn
    _, clean = model.run_with_cache(prompt())
    for name, projected in INPUTS.items():
        if not attention.has(name) or (attention.cfg.qk_norm_over == "heads" and projected != "attention_values"):
            continue  # one norm over all heads: none is alone
        copies = clean[name, 1]
        assert all(torch.equal(copies[:, :, head], clean["attention_input", 1]) for head in range(copies.shape[2]))

        def swapped(value: Tensor, hook: object) -> Tensor:
            value[:, :, 1] = value[:, :, 1].flip(1)
            return value

        with model.hooks(fwd_hooks=[((name, 1), swapped)]):
            _, written = model.run_with_cache(prompt(), names_filter=(projected, 1))
        with model.hooks(fwd_hooks=[(("attention_input", 1), lambda v, hook: v.flip(1))]):
            _, all_written = model.run_with_cache(prompt(), names_filter=(projected, 1))
        expected = clean[projected, 1].clone()
        if (
            attention.cfg.qk_norm is not None
            and attention.cfg.qk_norm_over == "heads"
            and name != "attention_value_inputs"
        ):
            continue  # one norm over all heads: none is alone
        expected[:, 1] = all_written[projected, 1][:, 1]
        torch.testing.assert_close(written[projected, 1], expected, rtol=1e-5, atol=1e-5)
        others = [head for head in range(expected.shape[1]) if head != 1]
        assert torch.equal(written[projected, 1][:, others], clean[projected, 1][:, others])


def test_gradients_of_copies_sum_to_what_attention_reads(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints)
    attention = model.layers[1].self_attn
    weights = [each for name, each in model.named_parameters() if "layers.1.self_attn.projections" in name]
    model(prompt(), return_type="loss").backward()
    plain = [each.grad.clone() for each in weights]
    model.zero_grad()
    _, cache = model.run_with_cache(
        prompt(), names_filter=[(each, 1) for each in [*INPUTS, "attention_input"]], incl_bwd=True, return_type="loss"
    )
    parts = sum(cache[f"{name}_grad", 1].sum(2) for name in INPUTS)
    if attention.gate is None:  # which reads the stream too
        torch.testing.assert_close(parts, cache["attention_input_grad", 1], rtol=1e-4, atol=1e-7)
    for weight, expected in zip(weights, plain, strict=True):  # they round as one product, and as one a head
        torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-7)


def test_a_scale_has_its_gradient(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints).double()
    mixtures = [i for i, layer in enumerate(model.config.layers) if isinstance(layer.mlp, Mixture)]
    smooth = max(mixtures, default=-1)  # no choice of experts comes after
    points = [model.names.points[name] for name in derived(model) if name.endswith("_scale")]
    values = [each.name for each in points if each.layer is None or each.layer > smooth]
    _, cache = model.run_with_cache(prompt(), names_filter=values, incl_bwd=True, return_type="loss")
    for name in values:

        def loss(step: float, name: str = name) -> float:
            hooks = [(name, lambda value, hook: value * (1 + step))]
            with torch.no_grad():
                return float(model.run_with_hooks(prompt(), fwd_hooks=hooks, return_type="loss"))

        # Float32 inside norms bounds the step from below, the curvature from above.
        slope = (loss(3e-3) - loss(-3e-3)) / 6e-3
        expected = float((cache[name + "_grad"] * cache[name]).sum())
        assert slope == pytest.approx(expected, rel=2e-2, abs=1e-4), name


@torch.no_grad()
def test_a_norm_that_does_not_say_is_refused_by_name(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints)

    class Other(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    plain = derived(model)
    model.norm = Other()
    _, cache = model.run_with_cache(prompt(), names_filter=plain)
    with pytest.raises(RuntimeError, match="final_norm_scale: the norm is Other"):
        cache["final_norm_scale"]
    with pytest.raises(RuntimeError, match="final_norm_scale"):
        model.run_with_hooks(prompt(), fwd_hooks=[("final_norm_scale", lambda v, hook: v)])


def test_all_gradients_are_those_of_the_forward(base: Recipe, checkpoints: Folders) -> None:
    model = loaded(base, checkpoints)
    _, cache = model.run_with_cache(prompt(), incl_bwd=True, return_type="loss")
    assert "final_norm_scale" in cache
    assert "final_norm_scale_grad" not in cache
    assert "final_norm_output_grad" in cache
