"""The settings of a generation: the checkpoint's and the call's, and what they make of the scores. transformers' own
code follows them; greedy generation without any needs no transformers."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std.config import Origin
from transformer_std.optional import transformers_for

Processors = Callable[[Tensor, Tensor], Tensor]  # of tokens [batch seq] and scores [batch vocab_size]

# Each with the value that changes nothing.
ALWAYS = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [], "sequence_bias": {}, "min_length": 0, "min_new_tokens": 0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "suppress_tokens": [], "begin_suppress_tokens": [],
    "renormalize_logits": False,
}  # fmt: skip
WHEN_SAMPLING = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}  # fmt: skip
OTHERS = ("do_sample", "num_return_sequences", "eos_token_id", "pad_token_id", "stop_strings")
FOLLOWED = (*OTHERS, *ALWAYS, *WHEN_SAMPLING)
# Other ways to generate, each with the value that leaves it alone.
REFUSED = {
    "num_beams": 1, "num_beam_groups": 1, "constraints": None, "force_words_ids": None, "penalty_alpha": 0.0,
    "dola_layers": None, "prompt_lookup_num_tokens": None, "assistant_early_exit": None, "use_mtp": False,
    "guidance_scale": 1.0, "token_healing": False, "watermarking_config": None, "max_time": None,
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the next token comes from the scores: `processors` shape them; the largest is taken, or one is drawn."""

    processors: Processors
    do_sample: bool
    generator: torch.Generator | None

    def choose(self, scores: Float[Tensor, "batch vocab_size"]) -> Int[Tensor, " batch"]:
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]


def read_settings(function: Callable[..., Any], origin: Origin | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call: what it was `given`, else the checkpoint's. These are in its generation config, or where
    it has none in its config, as for transformers. None switches a setting off.

    Raises:
        TypeError: a setting that neither `function` nor transformers has.
        ValueError: one that asks for a way of generating that is not here.
    """
    own = (origin.generation or origin.config) if origin else {}
    own = {key: own[key] for key in (*FOLLOWED, *REFUSED) if own.get(key) is not None}
    for key in given:
        if key not in FOLLOWED and key not in REFUSED:
            known = [*inspect.signature(function).parameters, *FOLLOWED]
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {key!r}{hint}")
    settings = {**own, **given}
    for key, neutral in REFUSED.items():
        if _differs(settings.get(key), neutral):
            where = "" if key in given else " in the checkpoint's generation config"
            raise ValueError(f"{key}={settings[key]!r}{where} is nothing that generate does: pass {key}={neutral!r}")
    samples = settings.get("num_return_sequences") or 1
    if not isinstance(samples, numbers.Integral) or int(samples) < 1:
        raise ValueError(f"num_return_sequences is {samples!r}; give a whole number of at least 1")
    if int(samples) > 1 and not settings.get("do_sample"):
        raise ValueError(f"num_return_sequences={samples} would be the same row {samples} times: pass do_sample=True")
    return settings


def ids_of(settings: dict[str, Any], key: str) -> list[int]:
    """Token ids that a setting names: none, one or a list. Negative ones name none, as in transformers."""
    value = settings.get(key)
    ids = [] if value is None else value.tolist() if isinstance(value, Tensor) else value
    ids = list(ids) if isinstance(ids, (list, tuple)) else [ids]
    if not all(isinstance(each, numbers.Integral) and each < 2**31 for each in ids):
        raise ValueError(f"{key} is {value!r}: give a token's id, or a list of them")
    return [int(each) for each in ids if each >= 0]


def processors(
    settings: dict[str, Any], tokens: Tensor, mask: Tensor | None, max_new_tokens: int, eos: Tensor
) -> Processors:
    """What the settings make of the scores of the next token, in transformers' order."""
    counts = {**ALWAYS, **(WHEN_SAMPLING if settings.get("do_sample") else {})}
    if not settings.get("do_sample") and not any(_differs(settings.get(key), counts[key]) for key in counts):
        return lambda tokens, scores: scores
    asked = ", ".join(f"{key}={value!r}" for key, value in settings.items() if key in (*counts, "do_sample"))
    transformers = transformers_for(f"generation with {asked} (the checkpoint's settings are among them)")
    config, seq = transformers.GenerationConfig(), tokens.shape[1]
    # transformers' defaults stand where neither the checkpoint nor the call says: top_k=50 when sampling.
    unsaid = {key: value for key, value in config._get_default_generation_params().items() if key not in settings}
    followed = {key: settings[key] for key in (*counts, "do_sample") if key in settings}
    config.update(**{**unsaid, **followed, "max_length": seq + max_new_tokens})
    config._eos_token_tensor = eos if len(eos) else None
    # Its method needs no more of a model than this.
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False), _merge_criteria_processor_list=lambda ours, given: ours
    )
    return transformers.GenerationMixin._get_logits_processor(
        model,
        generation_config=config,
        input_ids_seq_length=seq,
        encoder_input_ids=tokens,
        device=tokens.device,
        model_kwargs={"attention_mask": mask},
    )


def _differs(value: Any, neutral: Any) -> bool:
    return value is not None and value != neutral and not (neutral in ([], {}) and len(value) == 0)
