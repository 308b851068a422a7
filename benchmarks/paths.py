"""Paths and gradients: `python -m benchmarks.paths`.

`model.path_patching` from a head of block 0 to the queries of each head of every later block (1 x 16 tokens at the tiny
size, 1 x 32 at the middle one), against the same two passes by hand in TransformerLens' bridge: one that shows what all
queries would be, and one a cell in which one of them is that. And `model.attribution_patching` over all heads, against
our own forward. One call of the paths at the middle size, the median of three otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import bridge, medians, pairs, tokens
from benchmarks.patching import metric
from benchmarks.plots import bars
from benchmarks.rows import Row, run

draw = bars
SHAPES = {"tiny": (1, 16), "middle": (1, 32)}
RUNS = {"tiny": 3, "middle": 1}
DENSE = ("phi", "phi3")
HEAD = 0


def by_hand(lens: Any, corrupted: Tensor, clean: Any, num_layers: int, num_heads: int) -> Tensor:
    """The metric of each cell, [later blocks, heads], in the bridge."""
    _, plain = lens.run_with_cache(corrupted)
    later = range(1, num_layers)
    heard: dict[int, Tensor] = {}

    def send(value: Tensor, hook: Any) -> Tensor:
        value[:, :, HEAD] = clean[hook.name][:, :, HEAD]
        return value

    def hold(value: Tensor, hook: Any) -> Tensor:
        return plain[hook.name]

    def hear(value: Tensor, hook: Any) -> None:
        heard[hook.layer()] = value.clone()

    held = [f"blocks.{layer}.hook_attn_out" for layer in later]
    held += [f"blocks.{layer}.hook_mlp_out" for layer in range(num_layers)]
    hooks = [("blocks.0.attn.hook_z", send), *[(name, hold) for name in held]]
    lens.run_with_hooks(corrupted, fwd_hooks=[*hooks, *[(f"blocks.{layer}.attn.hook_q", hear) for layer in later]])

    def tell(layer: int, head: int) -> Any:
        def write(value: Tensor, hook: Any) -> Tensor:
            value[:, :, head] = heard[layer][:, :, head]
            return value

        return (f"blocks.{layer}.attn.hook_q", write)

    found = [
        metric(lens.run_with_hooks(corrupted, fwd_hooks=[tell(layer, head)]))
        for layer in later
        for head in range(num_heads)
    ]
    return torch.stack(found).view(len(later), num_heads)


def measure() -> Iterator[Row]:
    for family, size, ours, theirs in pairs(*SHAPES):
        if family not in DENSE:
            continue
        shape = SHAPES[size]
        corrupted, clean_tokens = tokens(shape), tokens(shape).flip(1)
        _, clean = ours.run_with_cache(clean_tokens, names_filter="attention_premix")
        later = [("attention_query_inputs", layer) for layer in range(1, ours.num_layers)]
        at = {"num_heads": [HEAD]}

        def paths() -> Tensor:
            found = ours.path_patching(corrupted, clean, ("attention_premix", 0), later, metric, at=at, progress=False)  # noqa: B023
            return found.values.view(ours.num_layers - 1, ours.num_heads)  # noqa: B023

        def attribution() -> Tensor:
            return ours.attribution_patching(corrupted, clean, "attention_premix", metric, over="num_heads")  # noqa: B023

        def forward() -> Tensor:
            return ours(corrupted)  # noqa: B023

        taken, one = medians(3, attribution, forward)
        yield Row(
            family, size, f"attribution over {ours.num_layers} x {ours.num_heads} heads", taken, "our forward", one, 3.5
        )
        if (lens := bridge(theirs)) is None:
            continue
        with torch.no_grad():
            _, theirs_clean = lens.run_with_cache(clean_tokens)

            def hand() -> Tensor:
                return by_hand(lens, corrupted, theirs_clean, ours.num_layers, ours.num_heads)  # noqa: B023

            apart = float((paths() - hand()).abs().max())
            assert apart < 1e-3, apart
            fast, slow = medians(RUNS[size], paths, hand, warm=0)
        cells = f"paths to {ours.num_layers - 1} x {ours.num_heads} queries, {apart:.0e} apart"
        yield Row(family, size, cells, fast, "TransformerLens, by hand", slow, 0.25)


if __name__ == "__main__":
    run("paths", measure())
