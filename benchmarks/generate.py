"""Greedy generation against transformers', 64 tokens from 32, with caches: `python -m benchmarks.generate`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import VOCAB, families, medians, pair

NEW, PROMPT = 64, 32
RUNS = {"tiny": 5, "middle": 3}


def main() -> None:
    table = Table("family", "size", "ours, tokens/s", "transformers, tokens/s", "ratio of time")
    prompt = torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    for size, runs in RUNS.items():
        for family in families():
            ours, theirs = pair(family, size)

            def mine() -> torch.Tensor:
                return ours.generate(prompt, max_new_tokens=NEW, stop_at_eos=False)  # noqa: B023

            def plain() -> torch.Tensor:
                settings = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
                return theirs.generate(prompt, **settings)  # noqa: B023

            assert torch.equal(mine(), plain())
            seconds = medians(runs, mine, plain)
            rates = [f"{NEW / each:.0f}" for each in seconds]
            table.add_row(family, size, *rates, f"{seconds[0] / seconds[1]:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
