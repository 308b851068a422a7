"""A model partly on disk, and compiled: the same numbers, hooks and generation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import converters
from tests.tiny import BASES, NAMED, Folders, Recipe, prompt
from transformer_std import HookedTransformer


def spread(model: HookedTransformer) -> dict[str, str]:
    """Every other block, and the head, on disk."""
    blocks = {f"layers.{i}": "disk" if i % 2 else "cpu" for i in range(model.num_layers)}
    positions = {} if model.config.positions is None else {"embed_positions": "cpu"}
    return {"embed_tokens": "cpu", **positions, **blocks, "norm": "cpu", "lm_head": "disk"}


@torch.no_grad()
def test_a_model_partly_on_disk(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    whole = HookedTransformer.from_pretrained(checkpoints(base))
    # Another file, other addresses, other last bits: a copy of the whole is the fair other side.
    spreaded = HookedTransformer.from_pretrained(
        checkpoints(base), device_map=spread(whole), offload_folder=tmp_path / "offload"
    )
    assert spreaded.layers[1].self_attn.o.weight.is_meta
    expected, clean = whole.run_with_cache(prompt())
    logits, cache = spreaded.run_with_cache(prompt())
    assert list(cache) == list(clean)
    torch.testing.assert_close(logits, expected)
    for name, value in cache.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, clean[name], msg=name)

    def double(value: Tensor, hook: Any) -> Tensor:
        return value * 2

    for name in ("attention_result", "mlp_output"):
        ours = spreaded.run_with_hooks(prompt(), fwd_hooks=[((name, 1), double)])
        torch.testing.assert_close(ours, whole.run_with_hooks(prompt(), fwd_hooks=[((name, 1), double)]))
    assert torch.equal(spreaded.generate(prompt(), max_new_tokens=5), whole.generate(prompt(), max_new_tokens=5))
    assert spreaded.layers[1].self_attn.o.weight.is_meta
    for reading in (
        lambda: spreaded.save_pretrained(tmp_path / "saved"),
        lambda: converters.export(spreaded, tmp_path / "exported"),
        lambda: spreaded.bias_logits,
        lambda: cache.logit_attrs(cache.decompose_resid(), 3),
    ):
        with pytest.raises(RuntimeError, match="weights are not in memory"):
            reading()
    assert not (tmp_path / "saved").exists()


def test_device_maps(checkpoints: Folders, tmp_path: Path) -> None:
    folder = checkpoints(BASES[0])
    model = HookedTransformer.from_pretrained(folder, device_map="auto", max_memory={"cpu": "1GB"})
    assert torch.equal(model(prompt()), HookedTransformer.from_pretrained(folder)(prompt()))
    with pytest.raises(ValueError, match="device_map is 'balanced-ish'; give 'auto' or a dict"):
        HookedTransformer.from_pretrained(folder, device_map="balanced-ish")
    with pytest.raises(ValueError, match="say where with offload_folder"):
        HookedTransformer.from_pretrained(folder, device_map=spread(model))
    (tmp_path / "index.json").write_text("{}")  # as another model's offload has it
    with pytest.raises(ValueError, match="is not empty: its weights would be taken for this model's"):
        HookedTransformer.from_pretrained(folder, device_map=spread(model), offload_folder=tmp_path)


def test_torch_hooks_on_our_modules_are_called(checkpoints: Folders) -> None:
    """Calls go straight through modules, but not past what torch attaches to them."""
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    seen: list[str] = []
    for name in ("layers.1", "layers.1.self_attn", "layers.1.self_attn.o", "norm", "embed_tokens", ""):
        model.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    model(prompt())
    assert sorted(seen) == sorted(
        ["layers.1", "layers.1.self_attn", "layers.1.self_attn.o", "norm", "embed_tokens", ""]
    )
    everywhere: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: everywhere.append(type(module).__name__)
    )
    try:
        model(prompt())
    finally:
        handle.remove()
    assert everywhere.count("ParallelBlock") == 3


COMPILED = """
import sys, warnings, torch
from tests.tiny import prompt
from transformer_std import HookedTransformer
warnings.simplefilter("ignore")

def gradients(run, model):
    run(prompt()).square().sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found

torch.set_grad_enabled(False)
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = HookedTransformer.from_pretrained(folder)
    torch._dynamo.reset()
    compiled, plain = torch.compile(model, fullgraph=True, backend="eager"), model(prompt())
    torch.testing.assert_close(compiled(prompt()), plain)
    if folder == sys.argv[-1]:  # it has dense blocks and mixtures
        with model.hooks(fwd_hooks=[(("mlp_output", 1), lambda value, hook: value * 2)]):
            torch.testing.assert_close(compiled(prompt()), model(prompt()))
            assert not torch.allclose(compiled(prompt()), plain)
        torch.testing.assert_close(compiled(prompt()), plain)
        torch.testing.assert_close(compiled(prompt(7)[:1]), model(prompt(7)[:1]))
        with torch.enable_grad():
            expected, found = gradients(model, model), gradients(compiled, model)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
"""


def test_one_graph_and_hooks_added_later(checkpoints: Folders) -> None:
    """torch.compile takes the whole forward as one graph; a hook added afterwards is honoured, and so is its end. In a
    process of its own, since the tests' type checks are nothing to compile."""
    root = Path(__file__).parent.parent
    compiled = [*(base for base in BASES if base.family != "afmoe"), NAMED["afmoe-base"]]
    command = [sys.executable, "-c", COMPILED, *(str(checkpoints(base)) for base in compiled)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
