"""What one does with a model, on a tiny checkpoint of each family."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.families import names
from converters.tiny import make_checkpoint
from converters.verification.report import verify
from transformer_std.model import HookedTransformer

PROMPT = "the cat sat on the red mat"


@dataclass(frozen=True)
class Finding:
    """What the demonstration found on one family."""

    family: str
    bit_equal: dict[str, bool]  # by attention implementation
    values: int
    megabytes: float
    intervention: str
    outcome: str
    holds: bool


@torch.no_grad()
def demonstrate(keep: Path | None = None) -> Iterator[Finding]:
    """Makes, loads, compares, caches and intervenes, a family at a time. Each family's checkpoint stays in `keep`, in a
    folder of its name."""
    for family in names():
        with tempfile.TemporaryDirectory() as scratch:
            folder = (keep or Path(scratch)) / family
            make_checkpoint(family, folder)
            equal = {
                attn: verify(folder, attn_implementation=attn, prompts=[PROMPT]).bit_equal for attn in ("sdpa", "eager")
            }
            model = HookedTransformer.from_pretrained(folder)
            _, cache = model.run_with_cache(PROMPT)
            ablate = ablate_expert if model.support(-1)["router_logits"] is None else ablate_head
            yield Finding(family, equal, len(cache), cache.num_bytes / 1e6, *ablate(model))


def ablate_head(model: HookedTransformer, layer: int = 1, head: int = 2) -> tuple[str, str, bool]:
    """Takes one head's output away and looks where the stream changed."""

    def ablate(heads: torch.Tensor, hook: Any) -> None:
        heads[:, :, head] = 0

    logits, clean = model.run_with_cache(PROMPT, names_filter=["layer_input", "logits"])
    with model.hooks(fwd_hooks=[(("attention_premix", layer), ablate)]):
        ablated_logits, ablated = model.run_with_cache(PROMPT, names_filter=["layer_input", "logits"])
    before = torch.equal(clean["layer_input", layer], ablated["layer_input", layer])
    after = not torch.equal(clean["layer_input", layer + 1], ablated["layer_input", layer + 1])
    gone = torch.equal(model(PROMPT), logits)
    moved = float((ablated_logits - logits).abs().max())
    outcome = f"stream up to block {layer} same, after it changed, logits by {moved:.3f}; clean again after"
    return f"ablate head {head} of block {layer}", outcome, before and after and gone


def ablate_expert(model: HookedTransformer) -> tuple[str, str, bool]:
    """Takes the most used expert of the last block out wherever it was chosen, and looks which tokens changed."""
    layer = model.num_layers - 1
    names = [("expert_indices", layer), ("mlp_output", layer)]
    _, clean = model.run_with_cache(PROMPT, names_filter=names)
    indices = clean["expert_indices", layer]
    expert = int(indices.flatten().mode().values)

    def ablate(weights: torch.Tensor, hook: Any) -> torch.Tensor:
        return weights.masked_fill(indices == expert, 0)

    with model.hooks(fwd_hooks=[(("expert_weights", layer), ablate)]):
        _, ablated = model.run_with_cache(PROMPT, names_filter=names)
    changed = (clean["mlp_output", layer] != ablated["mlp_output", layer]).any(-1)
    routed = (indices == expert).any(-1)
    outcome = (
        f"{int(changed.sum())} of {changed.numel()} tokens changed: the {int(routed.sum())} routed to it, and no other"
    )
    return f"ablate expert {expert} of block {layer}", outcome, torch.equal(changed, routed)
