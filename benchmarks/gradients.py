"""Forward and backward, each layer's output and its gradient kept: `python -m benchmarks.gradients`.

Against transformers with a hook on every layer that keeps its output and registers a hook for its gradient. The loss is
the logits' sum; parameters get gradients on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import medians, pairs, tokens
from benchmarks.plots import bars
from benchmarks.rows import Row, run
from benchmarks.sizes import SIZES
from transformer_std import HookedTransformer

draw = bars


def measure() -> Iterator[Row]:
    for each in pairs("tiny", "middle"):
        yield compare(*each)


def compare(family: str, size: str, ours: HookedTransformer, theirs: Any) -> Row:
    prompt = tokens(size)

    def mine() -> dict[str, Tensor]:
        logits, cache = ours.run_with_cache(prompt, names_filter="layer_output", incl_bwd=True)
        logits.sum().backward()
        ours.zero_grad()
        return {name: cache[name] for name in cache}

    def plain() -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            kept.append(output.detach())
            output.register_hook(lambda grad: kept.append(grad))

        handles = [layer.register_forward_hook(keep) for layer in theirs.model.layers]
        theirs(prompt).logits.sum().backward()
        theirs.zero_grad()
        for handle in handles:
            handle.remove()
        return kept

    cache, kept = mine(), plain()
    for i in range(ours.num_layers):
        assert torch.equal(cache[f"layers.{i}.layer_output"], kept[i])
        # On two threads transformers' own gradients of 512 tokens' mixtures differ from run to run in their last bits.
        torch.testing.assert_close(cache[f"layers.{i}.layer_output_grad"], kept[-1 - i], rtol=1e-3, atol=1e-3)
    fast, slow = medians(max(5, SIZES[size]["runs"] // 2), mine, plain)
    return Row(family, size, "forward and backward", fast, "transformers", slow, 1.0)


if __name__ == "__main__":
    run("gradients", measure())
