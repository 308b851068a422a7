"""Reading a released `config.json`, key by key, so that none goes unread."""

from __future__ import annotations

import fnmatch
import math
from typing import Any, TypeGuard

from converters.checkpoint import DEEPEST, FLOATS, too_deep
from transformer_std.config import Mixture, TransformerConfig

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}


class ConfigError(ValueError):
    """A config that says something we do not compute, or lacks something we need."""


# What every config may hold and no forward reads; `*` stands for anything.
NOTES = (
    "*_dropout", "*_loss_coef", "*_pdrop", "_*", "add_cross_attention", "architectures", "assistant_*",
    "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "eos_token_id", "epsilon_cutoff", "eta_cutoff", "experts_implementation", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing*", "id2label",
    "initializer_*", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "length_penalty",
    "loss_type", "max_length", "min_length", "model_name", "model_type", "name_or_path", "no_repeat_ngram_size",
    "num_assistant_tokens*", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "summary_*", "suppress_tokens", "target_lookbehind", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_*", "use_bfloat16",
    "use_cache",
)  # fmt: skip

# Switches of other families, and the position in which each changes nothing here.
OFF = {
    "alibi": False, "attention_bias": False, "is_causal": True, "lm_head_bias": False, "mlp_bias": False,
    "pretraining_tp": 1, "qk_layernorm": False, "qk_norm": False, "rope_interleaved": False, "use_mrope": False,
    "use_qk_norm": False, "use_sliding_window": False,
}  # fmt: skip

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

# No model is larger, and lists of more would be built before a tensor was looked at.
MOST = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
MOST_OF_ANYTHING = 2**31
MOST_WEIGHTS = 2**48  # of one matrix: torch counts its bytes in 63 bits


class ConfigReader:
    """A family's view of a config dict: `take` what it builds from, `require` what it only computes one way, `ignore`
    what changes nothing, then `done`.

    Args:
        values: the config, as `config.json` has it.
        family: for messages.
        defaults: what the family has where the config lacks a key or holds null.
        spelled: the family's own names of keys that others share.

    Raises:
        ConfigError: the config has a key under both names, and they differ.
    """

    def __init__(
        self, values: dict[str, Any], family: str, defaults: dict[str, Any], spelled: dict[str, str] | None = None
    ):
        self.family, self.defaults, self._spelled = family, defaults, spelled or {}
        self._values, self._read = dict(values), set[str]()
        for key, own in self._spelled.items():
            if own not in values:
                continue
            if values.get(key, values[own]) != values[own]:
                raise ConfigError(f"config.{own} is {shown(values[own])}, and config.{key}, its other name, differs")
            self._values[key] = self._values.pop(own)

    def name(self, key: str) -> str:
        """How the family spells `key`, for messages."""
        return f"config.{self._spelled.get(key, key)}"

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key`; where the config lacks it or holds null, `default`, or the family's."""
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        return self.defaults.get(key) if default is None else default

    def optional(self, key: str) -> Any:
        """The value of `key`, where null is none; the family's where the config lacks it."""
        self._read.add(key)
        return self._values.get(key, self.defaults.get(key))

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`, and of a size that a model can have."""
        value, most = self.take(key, default), MOST.get(key, MOST_OF_ANYTHING)
        if not is_whole(value) or value < least:
            raise ConfigError(
                f"{self.name(key)} is {shown(value)}; {self.family} needs a whole number of at least {least}"
            )
        if value > most:
            raise ConfigError(f"{self.name(key)} is {shown(value)}; {self.family} takes {most} at most")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token's id, or None where the config says null."""
        value = self.optional(key)
        if value is not None and not (is_whole(value) and -vocab_size <= value < vocab_size):
            told = "" if key in self._values else f", {self.family}'s own where the config has none"
            raise ConfigError(f"{self.name(key)} is {shown(value)}{told}; the vocabulary has {vocab_size}")
        return value

    def width(self, key: str) -> int:
        """A whole number that may be absent, but not null."""
        if key in self._values and self._values[key] is None:
            raise ConfigError(f"{self.name(key)} is null; {self.family} needs a whole number")
        return self.whole(key)

    def optional_whole(self, key: str) -> int | None:
        return None if self.optional(key) is None else self.whole(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.optional(key) is None else self.number(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.take(key, default)
        if not is_number(value):
            raise ConfigError(f"{self.name(key)} is {shown(value)}; {self.family} needs a number")
        return float(value)

    def initializer_range(self) -> float:
        """The standard deviation of a fresh model's matrices; none is transformers' own 0.02, as there."""
        return self.number("initializer_range", 0.02) or 0.02

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.name(key)} is {shown(value)}; {self.family} needs true or false")
        return value

    def one_of(self, key: str, options: Any) -> str:
        value = self.take(key)
        if not isinstance(value, str) or value not in options:
            options = ", ".join(map(repr, options))
            raise ConfigError(f"{self.name(key)} is {shown(value)}; {self.family} implements {options}")
        return value

    def require(self, key: str, *values: Any) -> None:
        """`key` may be absent, null, or one of `values`: anything else is another model."""
        value = self.take(key, values[0])
        if value not in values:
            options = ", ".join(map(repr, values))
            raise ConfigError(f"{self.name(key)} is {shown(value)}; {self.family} implements {options}")

    def ignore(self, *keys: str, because: str) -> None:
        """Keys that change nothing we compute; `because` stands in the code for its reader."""
        self._read.update(keys)

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and head_dim, which is hidden_size / heads where it is not its own number."""
        hidden_size, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        kv_heads = heads if self.optional("num_key_value_heads") is None else self.whole("num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(f"config: {heads} query heads do not divide among {kv_heads} key/value heads")
        if self.take("head_dim") is None and hidden_size % heads:
            raise ConfigError(f"config: hidden_size {hidden_size} does not divide among {heads} heads")
        return heads, kv_heads, self.whole("head_dim", self.defaults.get("head_dim", hidden_size // heads))

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return self.whole("num_hidden_layers")

    def layer_types(self, by_rule: list[str]) -> list[str]:
        """Each block's kind of attention: `layer_types`, which wins, or what the family's rule makes."""
        kinds, count = self.take("layer_types", by_rule), self.count
        if (
            not isinstance(kinds, list)
            or len(kinds) != count
            or not set(kinds) <= {"full_attention", "sliding_attention"}
        ):
            raise ConfigError(
                f"config.layer_types is {kinds!r}"[:200] + f"; {self.family} needs full_attention or sliding_attention "
                f"for each of its {count} layers"
            )
        return list(kinds)

    def done(self) -> None:
        """Raises `ConfigError` if the config holds a key that nobody read."""
        if (settings := self._values.get("quantization_config")) is not None:
            method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
            raise ConfigError(f"this checkpoint is quantised ({method}); only plain weights are supported")
        left = [
            key
            for key, value in self._values.items()
            if key not in self._read
            and value is not None
            and not (key in OFF and value == OFF[key])
            and not any(fnmatch.fnmatchcase(key, note) for note in NOTES)
        ]
        if left:
            told = ", ".join(f"{self._spelled.get(key, key)} = {shown(self._values[key])}" for key in sorted(left))
            raise ConfigError(
                f"{self.family} does not know the config key {told}; if it is only a note, take it out of config.json"
            )


def check(config: TransformerConfig) -> TransformerConfig:
    """The config itself, if a model can have its sizes and its special tokens are of its vocabulary.

    Raises:
        ConfigError: a size that is none or too large, a dtype that weights do not have, or a token that is none.
    """
    if len(config.layers) > MOST["num_hidden_layers"]:
        raise ConfigError(f"the config has {len(config.layers)} blocks; {MOST['num_hidden_layers']} are taken at most")
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "max_length": config.max_length}
    widest = config.vocab_size
    for layer in dict.fromkeys(config.attending):
        attention, mlp, experts = layer.attention, layer.mlp, 1
        sizes |= {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
        sizes |= {"head_dim": attention.head_dim, "intermediate_size": mlp.intermediate_size}
        if isinstance(mlp, Mixture):
            sizes |= {"num_experts": mlp.num_experts, "top_k": mlp.top_k}
            experts = mlp.num_experts
        for name, size in sizes.items():
            if not is_whole(size) or not 0 < size <= MOST.get(name, MOST_OF_ANYTHING):
                most = MOST.get(name, MOST_OF_ANYTHING)
                raise ConfigError(f"the config's {name} is {shown(size)}; it is a whole number up to {most}")
        shared = mlp.shared.intermediate_size if isinstance(mlp, Mixture) and mlp.shared else 0
        heads = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        widest = max(widest, heads, 2 * experts * mlp.intermediate_size, shared)
    if (weights := widest * config.hidden_size) > MOST_WEIGHTS:
        raise ConfigError(f"the config makes a matrix of {weights:.2g} weights; one has {MOST_WEIGHTS:.2g} at most")
    if config.dtype is not None and config.dtype not in DTYPES:
        raise ConfigError(f"config.dtype is {shown(config.dtype)}; weights are {', '.join(DTYPES)}")
    if config.origin is not None:
        check_special(config.origin.config, config.vocab_size, "config")
        check_special(config.origin.generation, config.vocab_size, "generation_config")
    return config


def check_special(values: dict[str, Any], vocab_size: int, file: str) -> None:
    """That the ids of special tokens are tokens, or none; of ends there may be a list, and -1 names none; a pad
    may count from the end of the vocabulary. Raises `ConfigError` with the key."""
    for key in SPECIAL:
        value = values.get(key)
        ids = value if key == "eos_token_id" and isinstance(value, list) and value else [value]
        least = -vocab_size if key == "pad_token_id" else -1
        if value is not None and not all(is_whole(each) and least <= each < vocab_size for each in ids):
            raise ConfigError(f"{file}.{key} is {shown(value)}, no token of a vocabulary of {vocab_size}")


def check_depth(values: dict[str, Any]) -> None:
    if too_deep(values):
        raise ConfigError(f"the config is nested deeper than {DEEPEST} levels")


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def shown(value: Any) -> str:
    """For a message: a hostile value can be long."""
    return repr(value)[:80]
