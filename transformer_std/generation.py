"""Generation, token by token, with the model's hooks on every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std.activation_cache import ActivationCache
from transformer_std.kv_cache import KVCache
from transformer_std.layouts import Tokens, axes
from transformer_std.names import NamesFilter
from transformer_std.optional import transformers_for


class StepCaches(list[ActivationCache]):
    """One cache a step of a generation: the prompt pass first."""

    def cat(self) -> ActivationCache:
        """One cache over all positions, where a value's layout has them; else the last step's. A pattern's row has its
        step's keys in their places, and zero elsewhere."""
        first = self[0]
        values = {name: self._joined(name) for name in first}
        return ActivationCache(values, first._names, first.model)

    def _joined(self, name: str) -> Any:
        values = [cache[name] for cache in self]
        names = axes(self[0]._names.points[name].layout)
        along = next((names.index(each) for each in ("query", "seq") if each in names), None)
        if not isinstance(values[0], Tensor) or along is None or name == "attention_mask":
            return values[-1]
        prompt = values[0].shape[along]
        joined = values[0].new_empty(0)
        for step, value in enumerate(values):  # a pass covers the last positions up to its own
            end = prompt + step
            if "key" in names:
                before = end - value.shape[-1]
                value = torch.nn.functional.pad(value, (before, len(values) - 1 - step))
            start = end - value.shape[along]
            joined = value if start == 0 else torch.cat((joined.narrow(along, 0, start), value), dim=along)
        return joined


@dataclass
class Stopping:
    """When a row is done."""

    eos: Int[Tensor, " ids"]
    strings: Any
    pad: int

    def finished(self, tokens: Tokens) -> Tensor:
        done = torch.isin(tokens[:, -1], self.eos)
        return done | self.strings(tokens, None) if self.strings is not None else done


class Generation:
    """The part of a model that writes."""

    config: Any
    names: Any

    def generate(
        self,
        input: Any,
        *,
        max_new_tokens: Any,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        use_kv_cache: bool = True,
        attention_mask: Tensor | None = None,
        names_filter: NamesFilter = (),
        progress: bool = False,
    ) -> Any:
        """Writes on from `input`. Hooks that are set around the call run on the prompt pass and on every step after it,
        with the step's number in `hook.step`; there, queries are the new token's and keys and values the whole cache's.

        Args:
            input: text, a list of texts (padded on the left), or token ids [batch seq].
            max_new_tokens: how many tokens to write at the most.
            do_sample: draw from the distribution, else take its largest entry. `temperature`, `top_k`, `top_p`, `min_p`
                shape the distribution, `repetition_penalty` the scores in either case, as transformers' processors do.
            stop_at_eos: a row that wrote one of the end tokens is done, and is filled with padding.
            eos_token_id: the end tokens; without it the checkpoint's.
            stop_strings: texts that end a row too; they need the tokenizer.
            use_kv_cache: keep keys and values, else read the whole text again at every step.
            attention_mask: [batch seq] of the prompt, zeros for padding.
            names_filter: values to keep of every step.
            progress: show a bar.

        Returns:
            Text as text, texts as a list, token ids as token ids [batch seq + new]; prompt included. With
            `names_filter` a pair of that and a `StepCaches`, one cache a step.
        """
        caches = StepCaches()
        tokens, mask = self._prompt(input, attention_mask, max_new_tokens)
        settings = (mask, do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
        steps = self._steps(
            tokens,
            mask,
            max_new_tokens,
            _processors(*settings),
            do_sample,
            self._stopping(stop_at_eos, eos_token_id, stop_strings),
            use_kv_cache,
            names_filter,
            caches,
        )
        for new in _shown(steps, max_new_tokens) if progress else steps:
            tokens = torch.cat((tokens, new[:, None]), dim=1)
        output = tokens if isinstance(input, Tensor) else self._as_text(input, tokens, mask)
        return (output, caches) if names_filter != () else output

    def stream(self, input: Any, *, max_new_tokens: Any, **options: Any) -> Iterator[Int[Tensor, " batch"]]:
        """As `generate`, but hands each step's tokens [batch] over as they come; takes the same options, save
        `names_filter` and `progress`."""
        tokens, mask = self._prompt(input, options.pop("attention_mask", None), max_new_tokens)
        stop = {key: options.pop(key) for key in ("stop_at_eos", "eos_token_id", "stop_strings") if key in options}
        use_kv_cache = options.pop("use_kv_cache", True)
        processors, do_sample = _processors(mask, **options), options.get("do_sample", False)
        stopping = self._stopping(**stop)
        return self._steps(
            tokens, mask, max_new_tokens, processors, do_sample, stopping, use_kv_cache, (), StepCaches()
        )

    @torch.no_grad()
    def _steps(
        self,
        tokens: Tokens,
        mask: Tensor | None,
        count: int,
        processors: Any,
        do_sample: bool,
        stopping: Stopping,
        use_kv_cache: bool,
        names_filter: NamesFilter,
        caches: StepCaches,
    ) -> Iterator[Int[Tensor, " batch"]]:
        cache = KVCache(self, tokens.shape[1] + count) if use_kv_cache else None  # type: ignore[arg-type]
        done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for step in range(count):
            if cache is not None and self._must_read_again(len(cache), tokens.shape[1]):
                cache = KVCache(self, tokens.shape[1] + count - step)  # type: ignore[arg-type]
            fed = tokens[:, 0 if cache is None else len(cache) :]
            logits = self._read(step, fed, mask, cache, names_filter, caches)
            scores = processors(tokens, logits[:, -1].float())
            new = torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(-1)
            new = torch.where(done, stopping.pad, new)
            tokens = torch.cat((tokens, new[:, None]), dim=1)
            mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            done = done | stopping.finished(tokens)
            yield new
            if bool(done.all()):
                break

    def _read(
        self,
        step: int,
        fed: Tokens,
        mask: Tensor | None,
        cache: KVCache | None,
        names_filter: NamesFilter,
        caches: StepCaches,
    ) -> Float[Tensor, "batch read vocab_size"]:
        """The logits of one step. The head reads the last position alone, as transformers' generate has it (its bits
        depend on how many rows it reads), unless somebody watches what it says of all."""
        watched = self.lm_head_output.watched or self.logits.watched  # type: ignore[attr-defined]
        inputs = {"attention_mask": mask, "kv_cache": cache}
        self._set_step(step)
        try:
            if names_filter == ():
                return self(fed, **inputs, last_logits_only=not watched)  # type: ignore[operator]
            heads = {"lm_head_output", "logits"} & {point.name for point in self.names.resolve(names_filter)}
            logits, kept = self.run_with_cache(  # type: ignore[attr-defined]
                fed, **inputs, names_filter=names_filter, last_logits_only=not (watched or heads)
            )
        finally:
            self._set_step(0)
        caches.append(kept)
        return logits

    def _must_read_again(self, read: int, length: int) -> bool:
        """Whether this step is the first past a longrope's original length: the text so far is then read anew, with the
        long factors at every position, as transformers' generate does."""
        originals = {layer.attention.rotary.original_length for layer in self.config.layers if layer.attention.rotary}
        return any(original is not None and 0 < read <= original < length for original in originals)

    def _set_step(self, step: int) -> None:
        for point in self.names.points.values():
            point.step = step

    def _prompt(self, input: Any, attention_mask: Tensor | None, max_new_tokens: Any) -> tuple[Tokens, Tensor | None]:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}; give a whole number of at least 1")
        if isinstance(input, Tensor):
            tokens, mask = input, attention_mask
        else:
            tokens, mask = self._encode(input)  # type: ignore[attr-defined]
            mask = mask if attention_mask is None else attention_mask
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise ValueError(f"the prompt is {list(tokens.shape)}; give at least one token a row, [batch seq]")
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"the prompt has {tokens.shape[1]} tokens; the model's context is {self.config.max_length}"
            )
        device = self.input_device  # type: ignore[attr-defined]
        return tokens.to(device), None if mask is None else mask.to(device)

    def _stopping(self, stop_at_eos: bool = True, eos_token_id: Any = None, stop_strings: Any = None) -> Stopping:
        special = self.config.origin.special if self.config.origin else {}
        eos = special.get("eos_token_id") if eos_token_id is None else eos_token_id
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        pad = special.get("pad_token_id")
        pad = ids[0] if pad is None and ids else pad or 0
        strings = None
        if stop_strings is not None:
            strings = transformers_for("stop_strings").StopStringCriteria(self.tokenizer, stop_strings)  # type: ignore[attr-defined]
        device = self.input_device  # type: ignore[attr-defined]
        return Stopping(torch.tensor(ids if stop_at_eos else [], dtype=torch.long, device=device), strings, pad)

    def _as_text(self, input: Any, tokens: Tokens, mask: Tensor | None) -> str | list[str]:
        starts = [0] * len(tokens) if mask is None else [int(row.argmax()) for row in mask]
        texts = [
            self.tokenizer.decode(row[start:], skip_special_tokens=True)  # type: ignore[attr-defined]
            for row, start in zip(tokens, starts, strict=True)
        ]
        return texts[0] if isinstance(input, str) else texts


def _processors(
    mask: Tensor | None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> Any:
    """transformers' own processors of the scores, in its order: `processors(tokens, scores)`."""
    if not do_sample and repetition_penalty is None:
        return lambda tokens, scores: scores
    generation = transformers_for("sampling or a penalty").generation
    chosen = generation.LogitsProcessorList()
    if repetition_penalty is not None:
        padding = {} if mask is None else {"prompt_ignore_length": mask.bool().int().argmax(1)}
        chosen.append(generation.RepetitionPenaltyLogitsProcessor(repetition_penalty, **padding))
    if do_sample and temperature != 1.0:
        chosen.append(generation.TemperatureLogitsWarper(float(temperature)))
    for value, warper in (
        (top_k, generation.TopKLogitsWarper),
        (top_p, generation.TopPLogitsWarper),
        (min_p, generation.MinPLogitsWarper),
    ):
        if do_sample and value is not None:
            chosen.append(warper(value))
    return chosen


def _shown(steps: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    from rich.progress import track

    yield from track(steps, total=count, description="generating")
