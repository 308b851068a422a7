"""Greedy generation against transformers', 64 tokens from 32, with caches: `python -m benchmarks.generate`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.pairs import medians, pairs, tokens
from benchmarks.plots import bars
from benchmarks.rows import Row, run

draw = bars
NEW, PROMPT = 64, (1, 32)
RUNS = {"tiny": 5, "middle": 3}


def measure() -> Iterator[Row]:
    for family, size, ours, theirs in pairs(*RUNS):
        prompt = tokens(PROMPT)

        def mine() -> Tensor:
            return ours.generate(prompt, max_new_tokens=NEW, stop_at_eos=False)  # noqa: B023

        def plain() -> Tensor:
            settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}  # noqa: B023
            return theirs.generate(prompt, max_new_tokens=NEW, **settings)  # noqa: B023

        assert torch.equal(mine(), plain())
        fast, slow = medians(RUNS[size], mine, plain)
        yield Row(family, size, f"{NEW} tokens", fast, "transformers", slow)


if __name__ == "__main__":
    run("generate", measure())
