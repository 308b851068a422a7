"""Weights that are read: what stands in a module's place is counted or refused, and heads are paired with their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

import converters
from tests.tiny import NAMED, Folders, Recipe, prompt
from transformer_std import HookedTransformer
from transformer_std.components.experts import Experts
from transformer_std.weights import UnreadableWeight

PROJECTIONS = ("o", "q", "k", "v", "qkv", "gate", "up", "gate_up", "down", "lm_head", "embed_tokens")
READ = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "W_gate", "W_in", "W_out", "b_gate", "b_in", "b_out")


class Hidden(nn.Module):
    """An adapter around `base`, which it does not show."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, (out, width) = base, base.weight.shape
        self.reads = nn.Parameter(torch.randn(2, width) / 4)
        self.writes = nn.Parameter(torch.randn(out, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, nn.Embedding):
            return self.base(x) + F.embedding(x, self.writes) @ self.reads
        return self.base(x) + F.linear(F.linear(x, self.reads), self.writes)


class Shown(Hidden):
    """An adapter that shows its base's weight as its own, as peft's do."""

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


class Plus(nn.Module):
    """A parametrization: the weight and a low-rank product."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.reads, self.writes = nn.Parameter(torch.randn(2, shape[-1]) / 4), nn.Parameter(torch.randn(shape[-2], 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.writes @ self.reads


def put(model: HookedTransformer, name: str, module: nn.Module) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, module)


def adapted(model: HookedTransformer, kind: str) -> HookedTransformer:
    """Puts adapters of one kind everywhere, and returns what the model is once they are merged by hand."""
    if model.lm_head.weight is model.embed_tokens.weight:  # two adapters there are two changes of it
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    merged = copy.deepcopy(model)
    torch.manual_seed(0)
    for name, module in list(model.named_modules()):
        into = merged.get_submodule(name)
        if isinstance(module, Experts) and kind == "parametrized":
            for each in ("gate_up", "down"):
                plus = Plus(getattr(module, each).shape)
                getattr(into, each).data += plus.writes @ plus.reads
                parametrize.register_parametrization(module, each, plus)
        if name.rpartition(".")[2] not in PROJECTIONS:
            continue
        if kind == "parametrized":
            plus = Plus(module.weight.shape)
            into.weight.data += plus.writes @ plus.reads
            parametrize.register_parametrization(module, "weight", plus)
        else:
            adapter = {"hidden": Hidden, "shown": Shown}[kind](module)
            into.weight.data += adapter.writes @ adapter.reads
            put(model, name, adapter)
    return merged


def close(ours: Tensor, expected: Tensor) -> None:
    """An adapter's product is added before or after the base's is summed up, which rounds differently."""
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["shown", "hidden", "parametrized"])
@torch.no_grad()
def test_adapters_count_wherever_weights_are_read(model: HookedTransformer, kind: str) -> None:
    merged = adapted(model, kind)
    logits, cache = model.run_with_cache(prompt())
    expected, clean = merged.run_with_cache(prompt())
    close(logits, expected)
    assert list(cache) == list(clean)
    for layer in range(model.num_layers):
        close(cache["attention_result", layer], clean["attention_result", layer])
    for name in ("W_E", "W_U", "b_U", "bias_logits"):
        close(getattr(model, name), getattr(merged, name))
    read = set()
    for ours, theirs in zip(model.layers, merged.layers, strict=True):
        hosts = [(ours.self_attn, theirs.self_attn), (ours.mlp, theirs.mlp)]
        if ours.mlp.shared_experts.hook_points():
            hosts.append((ours.mlp.shared_experts, theirs.mlp.shared_experts))
        for host, other in hosts:
            for name in (each for each in READ if hasattr(type(host), each)):
                close(getattr(host, name), getattr(other, name))
                read.add(name)
    assert read >= {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "W_in", "W_out"}
    close(
        cache.logit_attrs(cache.stack_head_results(), torch.tensor([3, 5]), 7),
        clean.logit_attrs(clean.stack_head_results(), torch.tensor([3, 5]), 7),
    )
    close(cache.logit_lens_frozen(), clean.logit_lens_frozen())


@pytest.mark.parametrize("kind", ["shown", "hidden", "parametrized"])
def test_what_is_written_to_one_head_goes_through_its_adapter(model: HookedTransformer, kind: str) -> None:
    merged = adapted(model, kind)

    def double(value: Tensor, hook: Any) -> Tensor:
        return value * torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0, 1.0])[:, None]

    with torch.no_grad():
        hooks = [(("attention_result", 1), double)]
        close(model.run_with_hooks(prompt(), fwd_hooks=hooks), merged.run_with_hooks(prompt(), fwd_hooks=hooks))
    plain = [name for name, each in model.named_parameters() if each.requires_grad]
    gradients = []
    for watched in ("layer_input", "attention_result"):
        model.zero_grad()
        model.run_with_cache(prompt(), names_filter=watched, incl_bwd=True, return_type="loss")
        gradients.append({name: model.get_parameter(name).grad for name in plain})
    first, second = gradients
    assert any(each is not None for each in first.values())
    for name in plain:  # through the heads one by one, or all at once
        assert (first[name] is None) == (second[name] is None), name
        if first[name] is not None:
            torch.testing.assert_close(second[name], first[name], atol=1e-5, rtol=1e-3, msg=name)


@torch.no_grad()
def test_torchs_own_reparametrizations_count(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi-base"]))
    attention = model.layers[1].self_attn
    weight_norm(attention.o)
    attention.o.parametrizations.weight.original0.data *= 2
    prune.l1_unstructured(attention.projections.q, "weight", amount=0.5)
    _, cache = model.run_with_cache(prompt(), names_filter=["attention_result", "attention_output", "attention_input"])
    heads = cache["attention_result", 1].sum(2) + attention.b_O
    torch.testing.assert_close(heads, cache["attention_output", 1])
    assert float((attention.W_Q == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


@torch.no_grad()
def test_a_large_bias_rounds_nothing_of_an_adapted_weight_away(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi-base"]), dtype=torch.bfloat16)
    o = model.layers[1].self_attn.o
    o.bias += 5
    expected = o.weight.T.unflatten(0, (6, 16))
    model.layers[1].self_attn.o = Hidden(o).bfloat16()
    model.layers[1].self_attn.o.writes.zero_()
    # At the unit vectors alone the answers would be 5 and a little, to the next 1/32. A bfloat16 has 8 bits.
    torch.testing.assert_close(model.layers[1].self_attn.W_O, expected, rtol=2**-7, atol=5 * 2**-7 / 256)
    assert torch.equal(model.layers[1].self_attn.b_O, o.bias)


class Bent(Hidden):
    """An adapter that is no linear map."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.reads).relu(), self.writes)


class Dropped(Hidden):
    def __init__(self, base: nn.Module):
        super().__init__(base)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


def test_what_has_no_weight_is_refused_by_name(checkpoints: Folders) -> None:
    """And the run whose cache would have it among others goes on."""
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["qwen2_moe-base"]))
    clean = model(prompt())
    torch.manual_seed(0)
    for name in ("layers.1.self_attn.o", "lm_head"):
        put(model, name, Bent(model.get_submodule(name)))
    for layer in (0, 2):
        o = model.layers[layer].self_attn.o
        model.layers[layer].self_attn.o = Dropped(o)
    model.train()
    torch.manual_seed(0)
    logits, state = model(prompt()), torch.random.get_rng_state()
    torch.manual_seed(0)
    watched, cache = model.run_with_cache(
        prompt(), names_filter=lambda name: "scores" not in name and "prob" not in name
    )
    assert torch.equal(watched, logits)
    assert torch.equal(torch.random.get_rng_state(), state)
    linear = r"layers.1.self_attn.o is Bent, no linear map, so it has no weight to read"
    drops = r"layers.0.self_attn.o drops out in training, and has no weight of its own then: call eval\(\) first"
    for reading, message in (
        (lambda: cache["attention_result", 1], linear),
        (lambda: model.layers[1].self_attn.W_O, linear),
        (lambda: model.layers[1].self_attn.b_O, linear),
        (lambda: model.run_with_hooks(prompt(), fwd_hooks=[("attention_result", lambda v, hook: v)]), drops),
        (lambda: cache["attention_result", 0], drops),
        (lambda: model.W_U, "lm_head is Bent"),
        (lambda: model.bias_logits, "lm_head is Bent"),
        (lambda: cache.logit_attrs(cache.decompose_resid(), 3), "lm_head is Bent"),
    ):
        with pytest.raises(UnreadableWeight, match=message):
            reading()
    assert torch.equal(cache.logit_lens()[-1], model.project_on_vocab(cache["layer_output", -1]))  # calls the head
    model.eval()
    assert model.layers[0].self_attn.W_O.shape == (6, 16, 96)
    assert clean.shape == model(prompt()).shape


class Wrapped(nn.Module):
    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.weight, self.eps = base, getattr(base, "weight", None), getattr(base, "eps", None)

    def forward(self, *args: Any) -> Tensor:
        return self.base(*args) * 1.5


def test_norms_and_experts_in_other_clothes_are_refused(model: HookedTransformer) -> None:
    sandwich = model.config.layers[1].post_norm is not None
    for name in ("norm", "layers.1.attention_norm", *(["layers.1.self_attn.post_norm"] if sandwich else [])):
        put(model, name, Wrapped(model.get_submodule(name)))
    is_mixture = hasattr(model.layers[1].mlp, "experts")
    if is_mixture:
        put(model, "layers.1.mlp.experts", Wrapped(model.layers[1].mlp.experts))
    _, cache = model.run_with_cache(prompt())
    stack = cache.decompose_resid()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: cache.apply_ln_to_stack(stack), "^norm is Wrapped"),
        (lambda: cache.logit_lens_frozen(), "^norm is Wrapped"),
        (lambda: cache.logit_attrs(stack, 3), "^norm is Wrapped"),
        (lambda: model.bias_logits, "^norm is Wrapped"),
        (lambda: cache.apply_ln_to_stack(stack, 1), "^layers.1.attention_norm is Wrapped"),
    ]
    if sandwich:
        refused.append((lambda: cache.stack_head_results(), "^layers.1.self_attn.post_norm is Wrapped"))
    if is_mixture:
        refused += [(lambda: model.layers[1].mlp.W_in, "^layers.1.mlp.experts is Wrapped, which does not say")]
        refused += [(lambda: model.layers[1].mlp.W_out, "^layers.1.mlp.experts is Wrapped")]
    for reading, message in refused:
        with pytest.raises(UnreadableWeight, match=message):
            reading()


def test_an_embedding_without_a_weight_is_the_models_all_the_same(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi-base"]), dtype=torch.bfloat16)
    model.embed_tokens = Hidden(model.embed_tokens).bfloat16()
    assert model.dtype == torch.bfloat16
    stream = model(prompt(), stop_at_layer=1)
    assert torch.equal(model(stream, start_at_layer=1), model(prompt()))


@torch.no_grad()
def test_weights_on_disk_are_refused_by_name(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    learned = converters.read_config(checkpoints(base)).positions is not None
    parts = dict.fromkeys(("embed_tokens", *["embed_positions"] * learned, "layers", "norm", "lm_head"), "disk")
    model = HookedTransformer.from_pretrained(checkpoints(base), device_map=parts, offload_folder=tmp_path / "off")
    _, cache = model.run_with_cache(prompt())
    assert cache["attention_result", 1].shape == (2, 13, 6, 96)
    stack = cache.decompose_resid()
    reading: dict[str, Callable[[], Any]] = {
        "embed_tokens": lambda: model.W_E,
        "lm_head": lambda: model.W_U,
        "layers.1.self_attn.o": lambda: model.layers[1].self_attn.W_O,
        "layers.2.self_attn.o": lambda: model.layers[2].self_attn.b_O,
        "layers.1.self_attn.projections": lambda: model.layers[1].self_attn.W_Q,
        "layers.2.self_attn.projections": lambda: model.layers[2].self_attn.b_V,
        "layers.1.mlp": lambda: model.layers[1].mlp.W_in,
        "layers.2.mlp": lambda: model.layers[2].mlp.W_out,
        "norm": lambda: cache.apply_ln_to_stack(stack),
        "layers.1.attention_norm": lambda: cache.decompose_resid(1, apply_ln=True),
    }
    for path, read in reading.items():
        with pytest.raises(UnreadableWeight, match=rf"^{path}.*'s weights are not in memory: this reads them directly"):
            read()
    for read in (
        lambda: model.b_U,
        lambda: model.bias_logits,
        lambda: cache.logit_lens_frozen(),
        lambda: cache.logit_attrs(stack, 3),
        *([lambda: cache.stack_head_results()] if model.config.layers[0].post_norm else []),
    ):
        with pytest.raises(UnreadableWeight, match="weights are not in memory"):
            read()


@torch.no_grad()
def test_placed_weights_that_are_in_memory_are_read(checkpoints: Folders) -> None:
    """accelerate wraps every forward, also where nothing is elsewhere."""
    folder = checkpoints(NAMED["afmoe-base"])
    placed = HookedTransformer.from_pretrained(folder, device_map={"": "cpu"})
    plain = HookedTransformer.from_pretrained(folder)
    assert "forward" in vars(placed.layers[1].self_attn.o)
    assert torch.equal(placed.W_U, plain.W_U)
    assert torch.equal(placed.layers[1].self_attn.W_O, plain.layers[1].self_attn.W_O)
    assert torch.equal(placed.layers[1].mlp.W_in, plain.layers[1].mlp.W_in)
    _, cache = placed.run_with_cache(prompt())
    assert cache.stack_head_results().shape[0] == 6 * placed.num_layers


def test_sharded_weights_are_refused_by_name(checkpoints: Folders) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = HookedTransformer.from_pretrained(checkpoints(NAMED["phi-base"]))
    expected, clean = model.run_with_cache(prompt())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        logits, cache = model.run_with_cache(prompt())
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(cache["attention_result", 1], clean["attention_result", 1])
        with pytest.raises(UnreadableWeight, match=r"layers.1.self_attn.o's weights are sharded: .* gather the model"):
            model.layers[1].self_attn.W_O  # noqa: B018
    finally:
        distributed.destroy_process_group()


# -- heads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["phi-grouped", "phi3-base", "phi3-tied", "phimoe-base", "qwen2_moe-base", "afmoe-base"]
)
@torch.no_grad()
def test_a_query_head_reads_and_writes_by_its_own_matrices(name: str, checkpoints: Folders) -> None:
    """What a change of the normed stream moves in one head's output while its pattern stays."""
    model = HookedTransformer.from_pretrained(checkpoints(NAMED[name]))
    attention = model.layers[1].self_attn
    heads, groups = model.num_heads, model.num_heads // model.num_kv_heads
    assert groups > 1
    opened: list[Any] = []
    if attention.has("attention_gate"):  # sigmoid(50) is 1 in float32
        opened = [(("attention_gate", 1), lambda gate, hook: torch.full_like(gate, 50.0))]
    with model.hooks(fwd_hooks=opened):
        _, clean = model.run_with_cache(prompt())
    change = torch.randn_like(clean["attention_input", 1])
    _, _, values = attention.projections(clean["attention_input", 1] + change)
    with model.hooks(fwd_hooks=[*opened, (("attention_values", 1), lambda value, hook: values)]):
        _, moved = model.run_with_cache(prompt())
    assert torch.equal(moved["attention_probabilities", 1], clean["attention_probabilities", 1])
    difference = moved["attention_result", 1] - clean["attention_result", 1]
    seen = clean["attention_probabilities", 1] @ change[:, None]
    readers, writers = attention.by_query_head(attention.W_V), attention.W_O
    wrong = attention.W_V
    assert readers.shape[0] == heads
    for head in range(heads):
        # Two products in another order; the entries are some tens.
        torch.testing.assert_close(
            difference[:, :, head], seen[:, head] @ readers[head] @ writers[head], atol=2e-3, rtol=1e-3
        )
    if groups < heads:
        assert not torch.allclose(difference[:, :, 1], seen[:, 1] @ wrong[1] @ writers[1], atol=0.1)


@torch.no_grad()
def test_a_query_heads_key_matrix_is_that_of_its_scores(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED["qwen2_moe-base"]))
    attention = model.layers[1].self_attn
    _, cache = model.run_with_cache(prompt())
    stream = cache["attention_input", 1]
    keys = cache["attention_keys_before_rotary", 1].repeat_interleave(3, dim=1)
    readers, biases = attention.by_query_head(attention.W_K), attention.by_query_head(attention.b_K)
    torch.testing.assert_close(stream[:, None] @ readers + biases[:, None], keys)
    with pytest.raises(ValueError, match="6 heads: give one of the 2 key/value heads' own"):
        attention.by_query_head(attention.W_Q)
