"""Activation patching over all layers and positions: `python -m benchmarks.patching`.

`model.activation_patching` of the stream that enters each block (1 x 16 tokens at the tiny size, 1 x 32 at the middle
one), which runs up to 64 cells of a layer as one batch, from that layer on. Against `transformer_lens.patching`, which
runs the whole model for every cell; and against a layer's cells batched by hand in the bridge.
One call of each at the middle size, the median of three at the tiny one.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import bridge, medians, pairs, tokens
from benchmarks.plots import bars
from benchmarks.rows import Row, run

draw = bars
SHAPES = {"tiny": (1, 16), "middle": (1, 32)}
RUNS = {"tiny": 3, "middle": 1}


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - logits[0, -1, 5]


def by_hand(lens: Any, corrupted: Tensor, clean: Any, layer: int) -> Tensor:
    """A layer's cells as rows of a batch, in the bridge."""
    seq = corrupted.shape[1]
    name, at = f"blocks.{layer}.hook_resid_pre", torch.arange(seq)

    def patch(stream: Tensor, hook: Any) -> Tensor:
        stream[at, at] = clean[name][0]
        return stream

    logits = lens.run_with_hooks(corrupted.repeat(seq, 1), fwd_hooks=[(name, patch)])
    return torch.stack([metric(run[None]) for run in logits])


@torch.no_grad()
def measure() -> Iterator[Row]:
    for family, size, ours, theirs in pairs(*SHAPES):
        shape = SHAPES[size]
        if (lens := bridge(theirs)) is None:
            return
        from transformer_lens import patching

        corrupted, clean_tokens = tokens(shape), tokens(shape).flip(1)
        _, clean = ours.run_with_cache(clean_tokens, names_filter="layer_input")
        _, theirs_clean = lens.run_with_cache(clean_tokens)

        def mine() -> Tensor:
            return ours.activation_patching(corrupted, clean, "layer_input", metric, progress=False)  # noqa: B023

        def bridged() -> Tensor:
            with contextlib.redirect_stderr(io.StringIO()):
                return patching.get_act_patch_resid_pre(lens, corrupted, theirs_clean, metric)  # noqa: B023

        def batched() -> list[Tensor]:
            return [by_hand(lens, corrupted, theirs_clean, layer) for layer in range(ours.num_layers)]  # noqa: B023

        # The median: where a router's scores nearly tie, the bridge's rounding may send a token to another expert.
        assert (mine() - bridged()).abs().median() < 1e-3
        fast, slow, hand = medians(RUNS[size], mine, bridged, batched, warm=0)
        cells = f"{ours.num_layers} x {shape[1]} cells"
        yield Row(family, size, cells, fast, "TransformerLens", slow, 0.5)
        yield Row(family, size, cells, fast, "TransformerLens, a layer a batch", hand)


if __name__ == "__main__":
    run("patching", measure())
