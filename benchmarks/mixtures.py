"""Many small experts, 128 of width 256, 8 a token, at width 512: `python -m benchmarks.mixtures`.

The mixture alone (router, experts, shared expert where there is one), and a model of four such blocks; 2 x 256 tokens,
and one token, as in a decode step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.pairs import families, medians, pair, tokens
from benchmarks.rows import Row, run

SETTINGS = {
    "qwen2_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "num_hidden_layers": 4},
    "afmoe": {"num_hidden_layers": 4, "num_dense_layers": 0},
}
TARGETS = {(2, 256): 0.9, (1, 1): 0.6}


@torch.no_grad()
def measure() -> Iterator[Row]:
    families()
    for family, settings in SETTINGS.items():
        ours, theirs = pair(family, "middle", **settings)
        for shape, target in TARGETS.items():
            prompt, runs, size = tokens(shape), 9 if shape[1] > 1 else 200, "x".join(map(str, shape))
            stream = torch.randn(*shape, ours.hidden_size, generator=torch.Generator().manual_seed(0))
            mine, block = ours.layers[1].mlp, theirs.model.layers[1]

            def there(stream: Tensor) -> Tensor:  # with the norm that is the mixture's own, here
                out = block.mlp(stream)  # noqa: B023
                return block.post_mlp_layernorm(out) if mine.post_norm is not None else out  # noqa: B023

            assert torch.equal(mine(stream), there(stream))
            fast, slow = medians(runs, lambda: mine(stream), lambda: there(stream))  # noqa: B023
            yield Row(family, size, "mixture", fast, "transformers", slow, target)
            assert torch.equal(ours(prompt), theirs(prompt).logits)
            fast, slow = medians(runs, lambda: ours(prompt), lambda: theirs(prompt))  # noqa: B023
            yield Row(family, size, "forward", fast, "transformers", slow, target)


if __name__ == "__main__":
    run("mixtures", measure())
