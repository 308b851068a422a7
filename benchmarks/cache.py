"""`run_with_cache` against TransformerLens' bridge, nnsight, and our own forward: `python -m benchmarks.cache`.

Everything: all values of ours against all of the bridge's, which are others: it has more norm scales, module inputs and
outputs (many of them one tensor under two names), and of a mixture neither the experts' activations nor the slots'
outputs, which are most of what we keep. So the second row is of what both have: streams, normed streams, queries, keys,
values, scores, patterns, mixed values and sublayers' outputs. Held memory is that of the distinct tensors of the cache,
before anything in it is looked at. The open-path forward is the same model with `attn_implementation="eager"`.

Every layer's output: also against nnsight saving the layers' outputs, and transformers' `output_hidden_states`.
`stop_at_layer`: half of the blocks, and no head, against the whole forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import bridge, medians, pairs, sight, tokens
from benchmarks.plots import bars
from benchmarks.rows import Row, run
from benchmarks.sizes import SIZES
from transformer_std import HookedTransformer

draw = bars
EVERYTHING = {"tiny": 0.3, "middle": 0.9}
BOTH_HAVE = {
    "layer_input": "hook_resid_pre",
    "layer_mid": "hook_resid_mid",
    "layer_output": "hook_resid_post",
    "attention_norm_output": "ln1.hook_out",
    "mlp_norm_output": "ln2.hook_out",
    "attention_queries_before_rotary": "attn.hook_q",
    "attention_keys_before_rotary": "attn.hook_k",
    "attention_values": "attn.hook_v",
    "attention_scores": "attn.hook_attn_scores",
    "attention_probabilities": "attn.hook_pattern",
    "attention_premix": "attn.hook_z",
    "attention_output": "hook_attn_out",
    "mlp_output": "hook_mlp_out",
}


@torch.no_grad()
def measure() -> Iterator[Row]:
    for family, size, ours, theirs in pairs(*EVERYTHING):
        yield from compare(family, size, EVERYTHING[size], ours, theirs)


def compare(family: str, size: str, target: float, ours: HookedTransformer, theirs: Any) -> Iterator[Row]:
    eager = HookedTransformer.from_pretrained(theirs, attn_implementation="eager")
    prompt, runs, half = tokens(size), SIZES[size]["runs"], ours.num_layers // 2
    mine, opened = medians(runs, lambda: ours.run_with_cache(prompt), lambda: eager(prompt))
    yield Row(family, size, "everything", mine, "our open-path forward", opened, 1.1)
    some, plain, stopped = medians(
        runs,
        lambda: ours.run_with_cache(prompt, names_filter="layer_output"),
        lambda: ours(prompt),
        lambda: ours(prompt, stop_at_layer=half),
    )
    yield Row(family, size, "layer_output", some, "our forward", plain, 1.03 if size == "middle" else None)
    yield Row(family, size, f"stop_at_layer={half}", stopped, "our forward", plain, 1.05 * half / ours.num_layers)
    if (lens := bridge(theirs)) is not None:
        assert (lens(prompt) - ours(prompt)).abs().max() < 1e-2
        mine, bridged = medians(runs, lambda: ours.run_with_cache(prompt), lambda: lens.run_with_cache(prompt))
        yield Row(family, size, "everything", mine, "TransformerLens", bridged, target)
        (_, cache), (_, bridged_cache) = ours.run_with_cache(prompt), lens.run_with_cache(prompt)
        held = _held(cache._values), _held(bridged_cache)
        yield Row(family, size, "everything, held", held[0], "TransformerLens", held[1], unit="MB")
        shared = [
            name
            for name, there in BOTH_HAVE.items()
            if f"blocks.1.{there}" in bridged_cache and ours.support(1)[name] is None
        ]
        there = {f"blocks.{i}.{BOTH_HAVE[name]}" for name in shared for i in range(ours.num_layers)}
        mine, bridged = medians(
            runs,
            lambda: ours.run_with_cache(prompt, names_filter=shared),
            lambda: lens.run_with_cache(prompt, names_filter=lambda name: name in there),
        )
        yield Row(family, size, f"what both have ({len(shared)} values)", mine, "TransformerLens", bridged, target)
    some, hidden = medians(
        runs,
        lambda: ours.run_with_cache(prompt, names_filter="layer_output"),
        lambda: theirs(prompt, output_hidden_states=True),
    )
    yield Row(family, size, "layer_output", some, "transformers, output_hidden_states", hidden)
    if (seen := sight(theirs)) is not None:
        import nnsight

        def trace() -> Any:
            with seen.trace(prompt):
                outputs = nnsight.save([layer.output for layer in seen.model.layers])
            return outputs  # noqa: RET504, as nnsight wants it

        _, kept = ours.run_with_cache(prompt, names_filter="layer_output")
        assert all(torch.equal(each, kept["layer_output", i]) for i, each in enumerate(trace()))
        some, traced = medians(runs, lambda: ours.run_with_cache(prompt, names_filter="layer_output"), trace)
        yield Row(family, size, "layer_output", some, "nnsight", traced)


def _held(values: Any) -> float:
    """Megabytes of the distinct memory behind a cache's tensors."""
    tensors = [each for value in values.values() for each in _behind(value)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values()) / 1e6


def _behind(value: Any, depth: int = 4) -> list[Tensor]:
    """A value's tensor, or those that it will be computed from when it is looked at."""
    if isinstance(value, Tensor):
        return [value]
    parts = [*getattr(value, "args", ()), *[cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]]
    parts += [value.compute] if hasattr(value, "compute") else []
    return [each for part in parts if depth for each in _behind(part, depth - 1)]


if __name__ == "__main__":
    run("cache", measure())
