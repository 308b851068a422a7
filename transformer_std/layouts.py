"""The layout of every standard value, as jaxtyping aliases. An axis name means one size everywhere:

batch, seq         rows and positions of the call
query, key         positions as attention pairs them (under a key/value cache there are more keys than queries)
num_heads          query heads; num_kv_heads: the heads that keys and values have
qk_head_dim        width of a query or key head; head_dim: of a value head
latent_size        width of what the keys and values of all heads come of, where they do
rotary_dims        how many dimensions of a head the rotary turns
top_k              routing slots of a token; num_experts: experts it can be routed to
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

Tokens = Int[Tensor, "batch seq"]
Residual = Float[Tensor, "batch seq hidden_size"]
Logits = Float[Tensor, "batch seq vocab_size"]
NextTokenProbs = Float[Tensor, "batch vocab_size"]
Queries = Float[Tensor, "batch num_heads seq qk_head_dim"]
Keys = Float[Tensor, "batch num_kv_heads seq qk_head_dim"]
Values = Float[Tensor, "batch num_kv_heads seq head_dim"]
Pattern = Float[Tensor, "batch num_heads query key"]
Latent = Float[Tensor, "batch seq latent_size"]
SharedKeys = Float[Tensor, "batch seq rotary_dims"]
Sinks = Float[Tensor, "batch num_heads query 1"]
HeadOutputs = Float[Tensor, "batch seq num_heads head_dim"]
HeadResults = Float[Tensor, "batch seq num_heads hidden_size"]
KvHeadInputs = Float[Tensor, "batch seq num_kv_heads hidden_size"]
Neurons = Float[Tensor, "batch seq intermediate_size"]
SlotNeurons = Float[Tensor, "batch seq top_k intermediate_size"]
RouterLogits = Float[Tensor, "batch seq num_experts"]
ExpertWeights = Float[Tensor, "batch seq top_k"]
ExpertIndices = Int[Tensor, "batch seq top_k"]
ExpertOutputs = Float[Tensor, "batch seq top_k hidden_size"]
PerToken = Float[Tensor, "batch seq 1"]
SharedGate = PerToken  # its name in the caches of earlier versions
Size = tuple[int, int]


def axes(layout: Any) -> list[str]:
    """The axis names of a layout, in order: `axes(Residual) == ["batch", "seq", "hidden_size"]`."""
    return ["batch", "seq"] if layout is Size else layout.dim_str.split()


def is_integer(layout: Any) -> bool:
    return layout is Size or "int64" in layout.dtypes


def describe(layout: Any, sizes: dict[str, int] | None = None) -> str:
    """`Residual [batch seq hidden_size]`, or with the sizes that are known: `Residual [batch seq 2560]`."""
    return f"{layout_name(layout)} [{' '.join(str((sizes or {}).get(axis, axis)) for axis in axes(layout))}]"


def layout_name(layout: Any) -> str:
    return next(name for name, alias in globals().items() if alias is layout)


def layout_named(name: str) -> Any:
    """The inverse; raises `ValueError` where there is none of that name."""
    if not hasattr(layout := globals().get(name), "dim_str") and layout is not Size:
        raise ValueError(f"there is no layout {name!r}")
    return layout
