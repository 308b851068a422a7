"""A native, hooked transformer library for people who open language models up."""

from transformer_std.analysis.decomposition import ActivationCache
from transformer_std.analysis.labels import Sweep
from transformer_std.config import TransformerConfig
from transformer_std.generation import Generated
from transformer_std.hooks.hook_point import HookPoint
from transformer_std.hooks.hosts import Unavailable
from transformer_std.hooks.names import UnknownName
from transformer_std.kv_cache import KVCache
from transformer_std.model import HookedTransformer
from transformer_std.padded import PaddedTokens

__version__ = "0.1.0"

__all__ = [
    "ActivationCache",
    "Generated",
    "HookPoint",
    "HookedTransformer",
    "KVCache",
    "PaddedTokens",
    "Sweep",
    "TransformerConfig",
    "Unavailable",
    "UnknownName",
]
