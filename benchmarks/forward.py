"""A plain forward against transformers': `python -m benchmarks.forward`.

transformers keeps keys and values in a plain call, too; the second ratio is against a call that is told not to.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import SIZES, families, medians, pair, tokens


@torch.no_grad()
def main() -> None:
    table = Table("family", "size", "ours, ms", "transformers, ms", "ratio", "use_cache=False, ms", "ratio")
    for size in SIZES:
        for family in families():
            ours, theirs = pair(family, size)
            prompt = tokens(size)
            assert torch.equal(ours(prompt), theirs(prompt).logits)
            mine, plain, lean = medians(
                SIZES[size]["runs"],
                lambda: ours(prompt),  # noqa: B023
                lambda: theirs(prompt),  # noqa: B023
                lambda: theirs(prompt, use_cache=False),  # noqa: B023
            )
            times = [f"{1000 * seconds:.2f}" for seconds in (mine, plain, lean)]
            table.add_row(family, size, times[0], times[1], f"{mine / plain:.2f}", times[2], f"{mine / lean:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
