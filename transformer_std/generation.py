"""Generation, token by token, with the model's hooks on every step."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std.activation_cache import ActivationCache
from transformer_std.generation_settings import Processors, ids_of, processors, read_settings
from transformer_std.kv_cache import KVCache
from transformer_std.layouts import Tokens, axes
from transformer_std.names import NamesFilter
from transformer_std.optional import transformers_for
from transformer_std.padded import PaddedTokens
from transformer_std.runs import at_step
from transformer_std.text import Form, form_of

REASONS = ("length", "eos", "stop_string")


class StepCaches(list[ActivationCache]):
    """One cache a step of a generation: the prompt pass first."""

    def cat(self) -> ActivationCache:
        """One cache over all positions, where a value's layout has them; else the last step's. A pattern's row has its
        step's keys in their places; elsewhere zero, of scores the lowest finite number, as a pass has it."""
        first = self[0]
        values = {name: self._joined(name) for name in first}
        return ActivationCache(values, first._names, first.model)

    def _joined(self, name: str) -> Any:
        values, point = [cache[name] for cache in self], self[0]._names.points[name]
        names = axes(point.layout)
        along = next((names.index(each) for each in ("query", "seq") if each in names), None)
        if not isinstance(values[0], Tensor) or along is None or name == "attention_mask":
            return values[-1]
        unseen = torch.finfo(values[0].dtype).min if point.value == "attention_scores" else 0
        prompt = values[0].shape[along]
        joined = values[0].new_empty(0)
        for step, value in enumerate(values):  # a pass covers the last positions up to its own
            end = prompt + step
            if "key" in names:
                before = end - value.shape[-1]
                value = torch.nn.functional.pad(value, (before, len(values) - 1 - step), value=unseen)
            start = end - value.shape[along]
            joined = value if start == 0 else torch.cat((joined.narrow(along, 0, start), value), dim=along)
        return joined


@dataclass
class Generated:
    """What `generate(..., return_dict=True)` answers; a row for every row of the prompt and sample of it.

    Attributes:
        output: what generate answers without `return_dict`.
        tokens: [batch seq + new], the prompt and what was written.
        mask: [batch seq + new], zeros for padding, and for what fills a row that ended before the others.
        new_tokens: [batch new].
        log_probs: [batch new], in nats, of each new token in the model's own distribution; 0 behind a row's end.
        drawn_log_probs: [batch new], the same in the distribution that it was drawn from, which the settings shaped.
        stopped: why each row ended: "eos", "stop_string" or "length".
        text: each row's text, prompt and what was written; None without a tokenizer.
        new_text: each row's new text alone; None without a tokenizer.
        caches: one cache a step; None where no `names_filter` asked for any.
    """

    output: Any
    tokens: Tokens
    mask: Int[Tensor, "batch length"]
    new_tokens: Int[Tensor, "batch new"]
    log_probs: Float[Tensor, "batch new"]
    drawn_log_probs: Float[Tensor, "batch new"]
    stopped: list[str]
    text: list[str] | None
    new_text: list[str] | None
    caches: StepCaches | None


@dataclass
class Stopping:
    """When a row is done."""

    eos: Int[Tensor, " ids"]
    strings: Any
    pad: int

    def reasons(self, tokens: Tokens) -> Int[Tensor, " batch"]:
        """0 for a row that goes on, else the number of its reason."""
        ended = torch.isin(tokens[:, -1], self.eos).long()
        return ended if self.strings is None else torch.where(ended == 0, 2 * self.strings(tokens, None).long(), ended)


@dataclass
class Writing:
    """A generation under way. `prompt` is as it was given; `tokens` are what the model reads, padded on the left, and
    what it has written."""

    input: Any
    form: Form
    prompt: Tokens
    prompt_mask: Tensor | None
    tokens: Tokens
    mask: Tensor | None
    count: int
    processors: Processors
    do_sample: bool
    samples: int
    generator: torch.Generator | None
    stopping: Stopping
    use_kv_cache: bool
    names_filter: NamesFilter
    scored: bool  # keep the log probabilities
    stopped: Int[Tensor, " batch"]  # the number of each row's reason; 0 while it goes on
    caches: StepCaches = field(default_factory=StepCaches)
    new: list[Tensor] = field(default_factory=list)  # of each step [batch]
    real: list[Tensor] = field(default_factory=list)
    log_probs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Generation:
    """The part of a model that writes."""

    config: Any
    names: Any

    def generate(
        self,
        input: Any,
        *,
        max_new_tokens: Any,
        stop_at_eos: bool = True,
        use_kv_cache: bool = True,
        attention_mask: Tensor | None = None,
        names_filter: NamesFilter = (),
        return_dict: bool = False,
        generator: torch.Generator | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> Any:
        """Writes on from `input`. Hooks that are set around the call run on the prompt pass and on every step after it,
        with the step's number in `hook.step`; there, queries are the new token's and keys and values the whole cache's.

        Each row writes what it writes alone, whatever side it is padded on. Rows that end in padding are moved to the
        right for the model to read; since their positions are then others than given, they are refused where hooks or
        `names_filter` would see it. In bare ids without a mask the pad id is taken for padding, if it is no end token,
        as in transformers' generate.

        Args:
            input: anything that `read` takes: text, texts, token ids, chat messages, what a tokenizer returns.
            max_new_tokens: how many tokens to write at the most.
            stop_at_eos: a row that wrote one of the end tokens is done, and is filled with padding.
            use_kv_cache: keep keys and values, else read the whole text again at every step.
            attention_mask: [batch seq] of the prompt, zeros for padding.
            names_filter: values to keep of every step.
            return_dict: answer with a `Generated`: text, ids, log probabilities, why each row stopped, caches.
            generator: what sampling draws from, in place of torch's global one.
            progress: show a bar.
            settings: transformers' settings of a generation by their names there: `do_sample`, `temperature`, `top_k`,
                `top_p`, `min_p`, `typical_p`, `repetition_penalty`, `no_repeat_ngram_size`, `bad_words_ids`,
                `suppress_tokens`, `min_new_tokens`, `eos_token_id`, `pad_token_id`, `stop_strings`,
                `num_return_sequences` (so many rows for each, one after another) and the others that shape scores.
                One that is not given is the checkpoint's, from its generation config, else transformers' default
                (top_k=50 when sampling); None switches it off.

        Returns:
            The prompt and what was written, in the form of the input: text (which begins with the text given), a list
            of texts, messages with the reply as the last, token ids [batch seq + new] or [seq + new], lists of ids; an
            encoding gives token ids [batch seq + new]. Lists of ids, and texts, end where their row ends. Several
            samples of one text, conversation or row are a list of them, or rows. With `names_filter` a pair of that and
            a `StepCaches`, one cache a step.

        Raises:
            TypeError: an input or a setting of a name that is not known.
            ValueError: a setting that asks for another way of generating (beams, say), a prompt without tokens, or
                one longer than the model's context.
        """
        given = (input, attention_mask, max_new_tokens, settings, stop_at_eos, use_kv_cache, generator)
        writing = self._begin(self.generate, *given, names_filter, return_dict)
        steps = self._steps(writing)
        for _ in _shown(steps, writing.count) if progress else steps:
            pass
        return self._answer(writing)

    def stream(
        self,
        input: Any,
        *,
        max_new_tokens: Any,
        stop_at_eos: bool = True,
        use_kv_cache: bool = True,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> Iterator[Int[Tensor, " batch"]]:
        """As `generate`, but hands each step's tokens [batch] over as they come."""
        given = (input, attention_mask, max_new_tokens, settings, stop_at_eos, use_kv_cache, generator)
        return self._steps(self._begin(self.stream, *given))

    def _begin(
        self,
        function: Any,
        input: Any,
        attention_mask: Tensor | None,
        max_new_tokens: Any,
        settings: dict[str, Any],
        stop_at_eos: bool,
        use_kv_cache: bool,
        generator: torch.Generator | None,
        names_filter: NamesFilter = (),
        scored: bool = False,
    ) -> Writing:
        count = _whole(max_new_tokens)
        settings = read_settings(function, self.config.origin, settings)
        stopping = self._stopping(settings, stop_at_eos)
        form = form_of(input)
        prompt, mask = self.read(input, attention_mask)  # type: ignore[attr-defined]
        if prompt.shape[1] > self.config.max_length:
            raise ValueError(
                f"the prompt has {prompt.shape[1]} tokens; the model's context is {self.config.max_length}"
            )
        mask = None if mask is None else self._check_mask(mask, prompt.shape)  # type: ignore[attr-defined]
        prompt = prompt.to(self.input_device, torch.long)  # type: ignore[attr-defined]
        if mask is None and form not in ("text", "texts", "chat", "chats"):
            mask = _inferred_mask(prompt, settings, stopping)
        samples = settings.get("num_return_sequences") or 1
        if samples > 1:
            prompt = prompt.repeat_interleave(samples, 0)
            mask = None if mask is None else mask.repeat_interleave(samples, 0)
        mask = None if mask is None or bool(mask.all()) else mask.long()
        tokens, turned = _turned(prompt, mask)
        if turned is not mask and (names_filter != () or any(each.watched for each in self.names.points.values())):
            raise ValueError(
                "the prompt is padded on the right, and hooks and kept values go by positions, which generate would "
                "move: pad it on the left"
            )
        made = processors(settings, tokens, turned, count, stopping.eos)
        return Writing(
            input, form, prompt, mask, tokens, turned, count, made, bool(settings.get("do_sample")), samples, generator,
            stopping, use_kv_cache, names_filter, scored, torch.zeros_like(tokens[:, 0]),
        )  # fmt: skip

    def _steps(self, writing: Writing) -> Iterator[Int[Tensor, " batch"]]:
        # Rows count their real tokens; what is padding in all of them has no position.
        tokens, mask = writing.tokens, writing.mask
        padding = 0 if mask is None else tokens.shape[1] - int(mask.sum(1).max())
        cache = KVCache(self, tokens.shape[1] + writing.count) if writing.use_kv_cache else None  # type: ignore[arg-type]
        for step in range(writing.count):
            if cache is not None and self._must_read_again(len(cache) - padding, writing.tokens.shape[1] - padding):
                cache = KVCache(self, tokens.shape[1] + writing.count)  # type: ignore[arg-type]
            with torch.no_grad():  # here and not around the loop: who takes the tokens keeps gradients as they are
                new = self._step(step, cache, writing)
            yield new
            if bool((writing.stopped != 0).all()):
                break

    def _step(self, step: int, cache: KVCache | None, writing: Writing) -> Int[Tensor, " batch"]:
        """Writes one token a row."""
        tokens, mask, stopping = writing.tokens, writing.mask, writing.stopping
        fed = tokens[:, 0 if cache is None else len(cache) :]
        own = self._read(step, fed, None if mask is None else mask[:, -fed.shape[1] :], cache, writing)[:, -1]
        scores = writing.processors(tokens, own.to(torch.float32, copy=True))
        if writing.do_sample:
            new = torch.multinomial(scores.softmax(-1), 1, generator=writing.generator)[:, 0]
        else:
            new = scores.argmax(-1)
        real = writing.stopped == 0
        new = torch.where(real, new, stopping.pad)
        if writing.scored:
            writing.log_probs.append((_log_probs(own, new, real), _log_probs(scores, new, real)))
        writing.new.append(new)
        writing.real.append(real)
        writing.tokens = tokens = torch.cat((tokens, new[:, None]), dim=1)
        writing.mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        writing.stopped = torch.where(real, stopping.reasons(tokens), writing.stopped)
        return new

    def _read(
        self, step: int, fed: Tokens, mask: Tensor | None, cache: KVCache | None, writing: Writing
    ) -> Float[Tensor, "batch read vocab_size"]:
        """The logits of one step. The head reads the last position alone, as transformers' generate has it (its bits
        depend on how many rows it reads), unless somebody watches what it says of all."""
        watched = self.lm_head_output.watched or self.logits.watched  # type: ignore[attr-defined]
        inputs = {"attention_mask": mask, "kv_cache": cache}
        with at_step(step):
            if writing.names_filter == ():
                return self(fed, **inputs, last_logits_only=not watched)  # type: ignore[operator]
            heads = {"lm_head_output", "logits"} & {point.name for point in self.names.resolve(writing.names_filter)}
            logits, kept = self.run_with_cache(  # type: ignore[attr-defined]
                fed, **inputs, names_filter=writing.names_filter, last_logits_only=not (watched or heads)
            )
        writing.caches.append(kept)
        return logits

    def _must_read_again(self, read: int, length: int) -> bool:
        """Whether this step is the first past a longrope's original length: the text so far is then read anew, with the
        long factors at every position, as transformers' generate does. Both count the longest row's real tokens."""
        originals = {layer.attention.rotary.original_length for layer in self.config.layers if layer.attention.rotary}
        return any(original is not None and 0 < read <= original < length for original in originals)

    def _stopping(self, settings: dict[str, Any], stop_at_eos: bool) -> Stopping:
        eos, pad, strings = ids_of(settings, "eos_token_id"), ids_of(settings, "pad_token_id"), None
        pad = (pad or eos or [0])[0]  # rows that ended are filled with it
        if settings.get("stop_strings") is not None:
            criteria = transformers_for("stop_strings").StopStringCriteria
            try:
                strings = criteria(self.tokenizer, settings["stop_strings"])  # type: ignore[attr-defined]
            except ValueError as error:
                kind = type(self.tokenizer).__name__  # type: ignore[attr-defined]
                raise ValueError(
                    f"transformers' StopStringCriteria cannot read the tokens of this tokenizer ({kind}: {error}), so "
                    "stop_strings cannot be used with it"
                ) from error
        device = self.input_device  # type: ignore[attr-defined]
        return Stopping(torch.tensor(eos if stop_at_eos else [], dtype=torch.long, device=device), strings, pad)

    # -- the answer ----------------------------------------------------------------------------------------------

    def _answer(self, writing: Writing) -> Any:
        new, real = torch.stack(writing.new, 1), torch.stack(writing.real, 1)
        prompt, before = writing.prompt, writing.prompt_mask
        before = torch.ones_like(prompt) if before is None else before
        tokens, mask = torch.cat((prompt, new), 1), torch.cat((before, real.long()), 1)
        prompts, written = _real_rows(prompt, before), _real_rows(new, real)
        caches = writing.caches if writing.names_filter != () else None
        output = self._in_form(writing, tokens, mask, prompts, written)
        if not writing.scored:
            return output if caches is None else (output, caches)
        own, drawn = (torch.stack(each, 1) for each in zip(*writing.log_probs, strict=True))
        stopped = [REASONS[number] for number in writing.stopped.tolist()]
        text = new_text = None
        if self.has_tokenizer:  # type: ignore[attr-defined]
            new_text = [self._written(*each) for each in zip(prompts, written, strict=True)]
            texts = [writing.input] if writing.form == "text" else writing.input
            if writing.form in ("text", "texts"):
                said = [each for each in texts for _ in range(writing.samples)]
            else:
                said = [self._decode(each) for each in prompts]  # type: ignore[attr-defined]
            text = [before + after for before, after in zip(said, new_text, strict=True)]
        return Generated(output, tokens, mask, new, own, drawn, stopped, text, new_text, caches)

    def _in_form(
        self, writing: Writing, tokens: Tokens, mask: Tensor, prompts: list[list[int]], written: list[list[int]]
    ) -> Any:
        """The answer in the form of the input."""
        input, form, samples = writing.input, writing.form, writing.samples
        if form == "encoding" or form == "tensor":
            carries = isinstance(input, PaddedTokens) or (form == "encoding" and writing.prompt_mask is not None)
            tokens = PaddedTokens.of(tokens, mask) if carries else tokens
            return tokens[0] if form == "tensor" and input.ndim == 1 and samples == 1 else tokens
        rows: list[Any]
        if form in ("row", "rows"):
            rows = [before + after for before, after in zip(prompts, written, strict=True)]
        else:
            said = [each for each in ([input] if form in ("text", "chat") else input) for _ in range(samples)]
            texts = [self._written(*each) for each in zip(prompts, written, strict=True)]
            if form in ("text", "texts"):
                rows = [before + after for before, after in zip(said, texts, strict=True)]
            else:
                replies = [[{"role": "assistant", "content": text}] for text in texts]
                rows = [[*before, *reply] for before, reply in zip(said, replies, strict=True)]
        return rows[0] if form in ("text", "chat", "row") and samples == 1 else rows

    def _written(self, prompt: list[int], new: list[int]) -> str:
        """The text of `new` ids where they stand, without special tokens."""
        decode = self._decode  # type: ignore[attr-defined]
        return decode(prompt + new, skip_special=True)[len(decode(prompt, skip_special=True)) :]


def _whole(count: Any) -> int:
    try:
        number = operator.index(count)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"max_new_tokens is {count!r}; give a whole number of at least 1")
    return number


def _inferred_mask(tokens: Tokens, settings: dict[str, Any], stopping: Stopping) -> Tensor | None:
    """The mask of bare ids, as transformers' generate takes it: the pad id is padding where it ends no text."""
    told = ids_of(settings, "pad_token_id")
    return tokens != stopping.pad if told and stopping.pad not in ids_of(settings, "eos_token_id") else None


def _turned(tokens: Tokens, mask: Tensor | None) -> tuple[Tokens, Tensor | None]:
    """Rows with padding behind or between real tokens, those moved to the right, in their order."""
    if mask is None or bool((mask[:, 1:] >= mask[:, :-1]).all()):
        return tokens, mask
    columns = torch.argsort(mask, dim=1, stable=True)
    return tokens.gather(1, columns), mask.gather(1, columns)


def _real_rows(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(tokens, mask.bool(), strict=True)]


def _log_probs(scores: Tensor, tokens: Int[Tensor, " batch"], real: Tensor) -> Float[Tensor, " batch"]:
    return scores.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0].masked_fill(~real, 0)


def _shown(steps: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    from rich.progress import track

    yield from track(steps, total=count, description="generating")
