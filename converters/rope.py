"""A config's rotary settings, of every type that transformers has for all families."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from converters.hf_config import MOST_OF_ANYTHING, ConfigError, ConfigReader, is_number, is_whole, shown
from transformer_std.config import Dynamic, Linear, Llama3, LongRope, Rotary, Scaling, Yarn


class Settings:
    """The rotary settings in one place, wherever the config has them: `rope_parameters` (current) or `rope_scaling`
    with `rope_theta` and `partial_rotary_factor` beside it (released).

    Args:
        hf: the config's reader.
        kind: the kind of block, where kinds have settings of their own.
        theta: where the config has none.
    """

    def __init__(self, hf: ConfigReader, kind: str | None = None, theta: float | None = None):
        flat, nested = hf.take("rope_scaling"), hf.take("rope_parameters")
        if kind is None:
            inner = flat or nested or {}
        else:  # a released scaling is that of full attention
            inner = {**((nested or {}).get(kind) or {}), **((flat or {}) if kind == "full_attention" else {})}
        if not isinstance(inner, dict):
            raise ConfigError(f"the rope settings are {shown(inner)}; {hf.family} needs a dict of them")
        outer = hf.take("rope_theta", 10_000.0) if theta is None else theta
        found = {"rope_theta": outer, "partial_rotary_factor": hf.take("partial_rotary_factor")}
        found |= {key: value for key, value in inner.items() if value is not None}
        self.kind = found.pop("rope_type", found.pop("type", "default"))
        found.pop("type", None)
        self.hf, self._values, self._read = hf, found, {"rope_theta", "partial_rotary_factor"}

    def take(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.take(key, default)
        if not is_number(value) or value <= 0:
            raise ConfigError(f"{_named(key)} is {shown(value)}; {self.hf.family} needs a positive number")
        return float(value)

    def length(self) -> int:
        """The original length; the config's own, outside the settings, wins in transformers too."""
        key = "original_max_position_embeddings"
        inner, outer = self.take(key), self.hf.take(key)
        value = next((each for each in (outer, inner) if each is not None), self.hf.take("max_position_embeddings"))
        if not is_whole(value) or not 0 < value <= MOST_OF_ANYTHING:
            raise ConfigError(
                f"rope {key} is {shown(value)}; {self.hf.family} needs a whole number, {MOST_OF_ANYTHING} at most"
            )
        return value

    def factor(self) -> float:
        """How many times the original length the model is for."""
        if self.take("factor") is not None:
            return self.number("factor")
        return self.hf.whole("max_position_embeddings") / self.length()

    def factors(self, key: str, pairs: int) -> tuple[float, ...]:
        values = self.take(key)
        if not isinstance(values, (list, tuple)) or len(values) != pairs or not all(map(is_number, values)):
            size = len(values) if isinstance(values, (list, tuple)) else None
            raise ConfigError(f"rope {key} needs {pairs} numbers, half the {2 * pairs} rotated dimensions, not {size}")
        return tuple(float(value) for value in values)

    def dims(self, head_dim: int) -> int:
        """How many dimensions of a head turn; a family whose heads turn whole has no default share."""
        share = self.take("partial_rotary_factor")
        if share not in (None, 1) and "partial_rotary_factor" not in self.hf.defaults:
            raise ConfigError(f"partial_rotary_factor is {shown(share)}; {self.hf.family} turns whole heads")
        dims = int(head_dim * (1.0 if share is None else self.number("partial_rotary_factor")))
        if dims % 2 or not 0 < dims <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor {share} turns {dims} of {head_dim} dimensions; it needs an even number"
            )
        return dims

    def done(self) -> None:
        if unknown := sorted(set(self._values) - self._read):
            raise ConfigError(f"{self.hf.family} does not know the rope setting {', '.join(unknown)} ({self.kind})")


def _named(key: str) -> str:
    return key if key.startswith("rope_") else f"rope {key}"


def linear(rope: Settings, dims: int) -> Scaling:
    return Linear(rope.number("factor"))


def dynamic(rope: Settings, dims: int) -> Scaling:
    rope.take("original_max_position_embeddings")  # transformers reads max_position_embeddings
    if dims <= 2:
        raise ConfigError(f"rope type dynamic needs more than {dims} rotated dimensions")
    return Dynamic(rope.number("factor"), rope.hf.whole("max_position_embeddings"))


def llama3(rope: Settings, dims: int) -> Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low == high:
        raise ConfigError(f"rope low_freq_factor and high_freq_factor are both {low}: nothing lies between")
    return Llama3(rope.number("factor"), low, high, rope.length())


def yarn(rope: Settings, dims: int) -> Scaling:
    """The scale of cos and sin is `attention_factor`, or follows from the factor, by `mscale` where both are given
    (DeepSeek's)."""
    factor, length = rope.factor(), rope.length()
    over, under = rope.take("mscale"), rope.take("mscale_all_dim")
    scale = _grown(factor, over) / _grown(factor, under) if over and under else _grown(factor, 1)
    scale = rope.number("attention_factor", scale)
    fast, slow = rope.take("beta_fast") or 32, rope.take("beta_slow") or 1
    truncate = rope.take("truncate", True)
    return Yarn(factor, length, float(scale), float(fast), float(slow), bool(truncate))


def _grown(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def growth(hf: ConfigReader) -> float:
    """DeepSeek's `mscale_all_dim`: what queries and keys are multiplied by, each, under yarn."""
    rope = Settings(hf)
    share = rope.take("mscale_all_dim")
    return _grown(rope.number("factor"), share) if rope.kind == "yarn" and share else 1.0


def longrope(rope: Settings, dims: int) -> LongRope:
    short, long = rope.factors("short_factor", dims // 2), rope.factors("long_factor", dims // 2)
    factor, length = rope.factor(), rope.length()
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    scale = rope.number("attention_factor", scale)
    return LongRope(short, long, length, scale, scale)


SCALINGS: dict[str, Callable[[Settings, int], Scaling | None]] = {
    "default": lambda rope, dims: None,
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}


def rotary(
    hf: ConfigReader,
    head_dim: int,
    *,
    kind: str | None = None,
    theta: float | None = None,
    scalings: dict[str, Callable[[Settings, int], Scaling | None]] = SCALINGS,
    **more: Any,
) -> Rotary:
    """The rotary of a config's blocks, of those of one `kind` where kinds differ. `more`: fields of a `Rotary`.

    Raises:
        ConfigError: a type that is not among `scalings`, or a setting that is missing, wrong or unknown.
    """
    rope = Settings(hf, kind, theta)
    if rope.kind not in scalings:
        raise ConfigError(f"rope type is {rope.kind!r}; {hf.family} implements {', '.join(sorted(scalings))}")
    dims = rope.dims(head_dim)
    made = Rotary(dims, rope.number("rope_theta"), scalings[rope.kind](rope, dims), **more)
    rope.done()
    return made
