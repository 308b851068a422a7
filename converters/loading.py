"""Loading: a model built of a release's config and filled with its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch

from converters.fill import check_counts, fill
from converters.sources import as_dtype, open_source
from transformer_std.transformer import Transformer

Model = TypeVar("Model", bound=Transformer)


def load(
    source: Any,
    build: type[Model],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
    max_memory: dict[Any, Any] | None = None,
    offload_folder: str | Path | None = None,
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    tokenizer: Any = None,
) -> Model:
    """A `build` of what `source` holds; the arguments are `HookedTransformer.from_pretrained`'s."""
    wanted = as_dtype(dtype)
    release = open_source(source, revision)
    check_counts(release.config, release.tensors, release.rules)
    with torch.device("meta"):
        tokenizer = tokenizer or release.tokenizer
        model = build(release.config, attn_implementation=attn_implementation, tokenizer=tokenizer)
    fill(model, release.tensors, release.rules, wanted or release.dtype)
    if device_map is not None:
        from converters.placing import place

        return place(model, device_map, max_memory, offload_folder)
    return model if device is None else model.to(device)
