"""The hooked model: one page of what it can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transformer_std import generation, saving
from transformer_std.analysis import (
    attribution,
    circuits,
    decomposition,
    edges,
    heads,
    interventions,
    mixtures,
    patching,
    paths,
    readout,
    steering,
)
from transformer_std.hooking import Hooked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class HookedTransformer(Hooked):
    """A decoder-only transformer whose every standard value is read and written by name.

    `HookedTransformer(config, seed=0)` has fresh weights, see `init_weights`; `HookedTransformer.from_pretrained` loads
    a checkpoint. Models start in eval mode.
    """

    generate = generation.generate
    stream = generation.stream
    activation_patching, ablate = patching.activation_patching, patching.ablate
    attribution_patching, head_scores = attribution.attribution_patching, heads.head_scores
    path_patching, edge_attribution = paths.path_patching, edges.edge_attribution
    skip_layers, steer, make_vector = interventions.skip_layers, steering.steer, steering.make_vector
    ablate_expert, reroute, ban, force = mixtures.ablate_expert, mixtures.reroute, mixtures.ban, mixtures.force
    expert_attribution, expert_sweep = mixtures.expert_attribution, mixtures.expert_sweep
    routing, compare = mixtures.routing, mixtures.compare
    get_topk_closest_tokens, probs_to_dict = readout.get_topk_closest_tokens, readout.probs_to_dict
    OV, QK, composition_scores = circuits.OV, circuits.QK, circuits.composition_scores
    singular_tokens, stacked = circuits.singular_tokens, circuits.stacked
    W_Q, W_K, W_V, W_O = map(circuits.weight_of_blocks, ("W_Q", "W_K", "W_V", "W_O"))
    b_Q, b_K, b_V, b_O = map(circuits.weight_of_blocks, ("b_Q", "b_K", "b_V", "b_O"))
    W_in, W_gate, W_out = map(circuits.weight_of_blocks, ("W_in", "W_gate", "W_out"))
    b_in, b_gate, b_out = map(circuits.weight_of_blocks, ("b_in", "b_gate", "b_out"))
    bias_logits = property(decomposition.bias_logits)

    @classmethod
    def from_pretrained(
        cls,
        source: Any,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: str | dict[str, Any] | None = None,
        max_memory: dict[Any, Any] | None = None,
        offload_folder: str | Path | None = None,
        revision: str | None = None,
        attn_implementation: str = "sdpa",
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    ) -> HookedTransformer:
        """Loads a checkpoint.

        Args:
            source: a folder (a Hugging Face checkpoint's or one that `save_pretrained` wrote), a weights file in one, a
                Hub id, or a live transformers model, whose tensors are then shared.
            dtype: torch's or its name, "bfloat16"; None or "auto" keeps the config's, or else the tensors' own.
            device: None keeps the weights memory-mapped on the CPU.
            device_map: "auto", or a dict from parts of the tree (`layers.3`) to devices, "cpu" or "disk": the model is
                spread over them by accelerate (extra `big`). `max_memory` limits each device, as accelerate takes it;
                what is put on "disk" goes to `offload_folder`.
            revision: branch, tag or commit of a Hub id.
            attn_implementation: "sdpa", or "eager" for the open path everywhere, as transformers' eager attention.
            tokenizer: one to use in place of the checkpoint's own, or where to find it.

        Raises:
            converters.CheckpointError: a file or tensor that is missing, left over, or not what the family has.
            converters.ConfigError: a config that no converter understands.
        """
        from converters import loading

        return loading.load(
            source,
            cls,
            dtype=dtype,
            device=device,
            device_map=device_map,
            max_memory=max_memory,
            offload_folder=offload_folder,
            revision=revision,
            attn_implementation=attn_implementation,
            tokenizer=tokenizer,
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config, weights and tokenizer in our own format; `from_pretrained` reads it back, without
        transformers.

        Whole or not at all: however it is stopped, and whoever else saves there, `folder` holds this model or what it
        held before. An earlier save of ours there is replaced, with its tokenizer; other files are left alone.

        Raises:
            RuntimeError: weights that are not in memory.
            ValueError: weights that are not plain tensors, as the config describes them (adapters, parametrisations,
                shards), or a folder that holds a checkpoint in another format.
        """
        saving.save(self, folder)
