"""Generation, token by token, with the model's hooks on every step. Functions of a model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std.activation_cache import StepCaches
from transformer_std.generation_settings import Sampling, ids_of, processors, read_settings
from transformer_std.hooking import Hooked
from transformer_std.hooks.names import NamesFilter
from transformer_std.hooks.runs import at_step
from transformer_std.inputs import Input, fitting_mask
from transformer_std.kv_cache import KVCache
from transformer_std.layouts import Tokens
from transformer_std.optional import transformers_for
from transformer_std.padded import PaddedTokens
from transformer_std.text import Form, decode, form_of

REASONS = ("length", "eos", "stop_string")
TEXTS = ("text", "texts", "chat", "chats")  # forms of input that know their padding


def generate(
    model: Hooked,
    input: Input,
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
    decoding = _decoding(
        model,
        generate,
        input,
        attention_mask,
        settings,
        max_new_tokens=max_new_tokens,
        stop_at_eos=stop_at_eos,
        use_kv_cache=use_kv_cache,
        generator=generator,
        names_filter=names_filter,
        scored=return_dict,
    )
    steps = iter(decoding)
    for _ in _shown(steps, decoding.count) if progress else steps:
        pass
    return decoding.answer()


def stream(
    model: Hooked,
    input: Input,
    *,
    max_new_tokens: Any,
    stop_at_eos: bool = True,
    use_kv_cache: bool = True,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> Iterator[Int[Tensor, " batch"]]:
    """As `generate`, but hands each step's tokens [batch] over as they come."""
    decoding = _decoding(
        model,
        stream,
        input,
        attention_mask,
        settings,
        max_new_tokens=max_new_tokens,
        stop_at_eos=stop_at_eos,
        use_kv_cache=use_kv_cache,
        generator=generator,
    )
    return iter(decoding)


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


@dataclass(frozen=True)
class Prompt:
    """What is written on from.

    Attributes:
        input: as it was given, in this `form`.
        tokens: [batch seq], a row for every sample.
        mask: [batch seq], zeros for padding; None where all are real.
        samples: how many rows one row of the input is.
    """

    input: Any
    form: Form
    tokens: Tokens
    mask: Tensor | None
    samples: int

    def real(self) -> Int[Tensor, "batch seq"]:
        return torch.ones_like(self.tokens) if self.mask is None else self.mask


class Decoding:
    """A generation under way: an iterator over the tokens [batch] of each step.

    Attributes:
        tokens: [batch seq], what the model reads, padded on the left, and what it has written.
        mask: [batch seq] of them, None where all are real.
        stopped: [batch], the number of each row's reason; 0 while it goes on.
        count: how many steps there are at the most.
    """

    def __init__(
        self,
        model: Hooked,
        prompt: Prompt,
        tokens: Tokens,
        mask: Tensor | None,
        count: int,
        sampling: Sampling,
        stopping: Stopping,
        *,
        use_kv_cache: bool,
        names_filter: NamesFilter,
        scored: bool,
    ):
        self.model, self.prompt, self.count, self.sampling, self.stopping = model, prompt, count, sampling, stopping
        self.names_filter, self.scored = names_filter, scored
        self.tokens, self.mask = tokens, mask
        self.stopped = torch.zeros_like(self.tokens[:, 0])
        self.caches = StepCaches()
        self._room = tokens.shape[1] + count
        self._cache = KVCache(model, self._room) if use_kv_cache else None
        # Rows count their real tokens; what is padding in all of them has no position.
        self._padding = 0 if mask is None else tokens.shape[1] - int(mask.sum(1).max())
        self._restarts = {need.restart for need in model.needs if need.restart is not None}
        self._new: list[Tensor] = []  # of each step [batch]
        self._real: list[Tensor] = []
        self._log_probs: list[tuple[Tensor, Tensor]] = []

    def __iter__(self) -> Iterator[Int[Tensor, " batch"]]:
        for step in range(self.count):
            with torch.no_grad():  # here and not around the loop: who takes the tokens keeps gradients as they are
                new = self._step(step)
            yield new
            if bool((self.stopped != 0).all()):
                break

    def _step(self, step: int) -> Int[Tensor, " batch"]:
        """Writes one token a row."""
        if self._must_read_again():
            self._cache = KVCache(self.model, self._room)
        own = self._read(step)[:, -1]
        scores = self.sampling.processors(self.tokens, own.to(torch.float32, copy=True))
        real = self.stopped == 0
        new = torch.where(real, self.sampling.choose(scores), self.stopping.pad)
        if self.scored:
            self._log_probs.append((_log_probs(own, new, real), _log_probs(scores, new, real)))
        self._new.append(new)
        self._real.append(real)
        self.tokens = torch.cat((self.tokens, new[:, None]), dim=1)
        self.mask = None if self.mask is None else torch.cat((self.mask, self.mask.new_ones(len(new), 1)), dim=1)
        self.stopped = torch.where(real, self.stopping.reasons(self.tokens), self.stopped)
        return new

    def _read(self, step: int) -> Float[Tensor, "batch read vocab_size"]:
        """The logits of one step. The head reads the last position alone, as transformers' generate has it (its bits
        depend on how many rows it reads), unless somebody watches what it says of all."""
        model, cache = self.model, self._cache
        fed = self.tokens[:, 0 if cache is None else len(cache) :]
        mask = None if self.mask is None else self.mask[:, -fed.shape[1] :]
        watched = model.lm_head_output.watched or model.logits.watched
        with at_step(step):
            if self.names_filter == ():
                return model(fed, attention_mask=mask, kv_cache=cache, last_logits_only=not watched)
            heads = {"lm_head_output", "logits"} & {point.name for point in model.names.resolve(self.names_filter)}
            logits, kept = model.run_with_cache(
                fed,
                names_filter=self.names_filter,
                attention_mask=mask,
                kv_cache=cache,
                last_logits_only=not (watched or heads),
            )
        self.caches.append(kept)
        return logits

    def _must_read_again(self) -> bool:
        """Whether this step is the first past a length at which what blocks need of the positions before is another:
        the text so far is then read anew, as transformers' generate does with a longrope's long factors. Both lengths
        count the longest row's real tokens."""
        read = 0 if self._cache is None else len(self._cache) - self._padding
        length = self.tokens.shape[1] - self._padding
        return any(0 < read <= restart < length for restart in self._restarts)

    # -- the answer ----------------------------------------------------------------------------------------------

    def answer(self) -> Any:
        """What `generate` answers."""
        prompt, new, real = self.prompt, torch.stack(self._new, 1), torch.stack(self._real, 1)
        tokens, mask = torch.cat((prompt.tokens, new), 1), torch.cat((prompt.real(), real.long()), 1)
        rows = _real_rows(prompt.tokens, prompt.real()), _real_rows(new, real)
        output = self._in_form(tokens, mask, *rows)
        caches = self.caches if self.names_filter != () else None
        if not self.scored:
            return output if caches is None else (output, caches)
        own, drawn = (torch.stack(each, 1) for each in zip(*self._log_probs, strict=True))
        stopped = [REASONS[number] for number in self.stopped.tolist()]
        text = new_text = None
        if self.model.has_tokenizer:
            new_text = self._written(*rows)
            text = [before + after for before, after in zip(self._said(rows[0]), new_text, strict=True)]
        return Generated(output, tokens, mask, new, own, drawn, stopped, text, new_text, caches)

    def _in_form(self, tokens: Tokens, mask: Tensor, prompts: list[list[int]], written: list[list[int]]) -> Any:
        """The answer in the form of the input."""
        input, form, samples = self.prompt.input, self.prompt.form, self.prompt.samples
        if form == "encoding" or form == "tensor":
            carries = isinstance(input, PaddedTokens) or (form == "encoding" and self.prompt.mask is not None)
            tokens = PaddedTokens.of(tokens, mask) if carries else tokens
            return tokens[0] if form == "tensor" and input.ndim == 1 and samples == 1 else tokens
        rows: list[Any]
        if form in ("row", "rows"):
            rows = [before + after for before, after in zip(prompts, written, strict=True)]
        elif form in ("text", "texts"):
            texts = zip(self._said(prompts), self._written(prompts, written), strict=True)
            rows = [before + after for before, after in texts]
        else:
            said = [each for each in ([input] if form == "chat" else input) for _ in range(samples)]
            replies = [{"role": "assistant", "content": text} for text in self._written(prompts, written)]
            rows = [[*before, reply] for before, reply in zip(said, replies, strict=True)]
        return rows[0] if form in ("text", "chat", "row") and samples == 1 else rows

    def _said(self, prompts: list[list[int]]) -> list[str]:
        """Each row's prompt as text: the very one that was given, where it was text."""
        input, form = self.prompt.input, self.prompt.form
        if form in ("text", "texts"):
            return [each for each in ([input] if form == "text" else input) for _ in range(self.prompt.samples)]
        return [decode(self.model.tokenizer, each) for each in prompts]

    def _written(self, prompts: list[list[int]], written: list[list[int]]) -> list[str]:
        """The text of each row's new ids where they stand, without special tokens."""

        def shown(ids: list[int]) -> str:
            return decode(self.model.tokenizer, ids, skip_special=True)

        return [shown(prompt + new)[len(shown(prompt)) :] for prompt, new in zip(prompts, written, strict=True)]


def _decoding(
    model: Hooked,
    function: Callable[..., Any],
    input: Any,
    attention_mask: Tensor | None,
    given: dict[str, Any],
    *,
    max_new_tokens: Any,
    stop_at_eos: bool,
    use_kv_cache: bool,
    generator: torch.Generator | None,
    names_filter: NamesFilter = (),
    scored: bool = False,
) -> Decoding:
    count = _whole(max_new_tokens)
    settings = read_settings(function, model.config.origin, given)
    stopping = _stopping(model, settings, stop_at_eos)
    prompt = _prompt(model, input, attention_mask, settings, stopping)
    tokens, mask = _turned(prompt.tokens, prompt.mask)
    watched = names_filter != () or any(each.watched for each in model.names.points.values())
    if mask is not prompt.mask and watched:
        raise ValueError(
            "the prompt is padded on the right, and hooks and kept values go by positions, which generate would "
            "move: pad it on the left"
        )
    shaping = processors(settings, tokens, mask, count, stopping.eos)
    return Decoding(
        model,
        prompt,
        tokens,
        mask,
        count,
        Sampling(shaping, bool(settings.get("do_sample")), generator),
        stopping,
        use_kv_cache=use_kv_cache,
        names_filter=names_filter,
        scored=scored,
    )


def _prompt(
    model: Hooked, input: Any, attention_mask: Tensor | None, settings: dict[str, Any], stopping: Stopping
) -> Prompt:
    form = form_of(input)
    tokens, mask = model.read(input, attention_mask)
    if tokens.shape[1] > model.config.max_length:
        raise ValueError(f"the prompt has {tokens.shape[1]} tokens; the model's context is {model.config.max_length}")
    mask = fitting_mask(mask, tokens.shape, model.input_device)
    tokens = tokens.to(model.input_device, torch.long)
    if mask is None and form not in TEXTS:
        mask = _inferred_mask(tokens, settings, stopping)
    samples = settings.get("num_return_sequences") or 1
    if samples > 1:
        tokens = tokens.repeat_interleave(samples, 0)
        mask = None if mask is None else mask.repeat_interleave(samples, 0)
    return Prompt(input, form, tokens, None if mask is None or bool(mask.all()) else mask.long(), samples)


def _stopping(model: Hooked, settings: dict[str, Any], stop_at_eos: bool) -> Stopping:
    eos, pad, strings = ids_of(settings, "eos_token_id"), ids_of(settings, "pad_token_id"), None
    pad_id = (pad or eos or [0])[0]  # rows that ended are filled with it
    if settings.get("stop_strings") is not None:
        criteria = transformers_for("stop_strings").StopStringCriteria
        try:
            strings = criteria(model.tokenizer, settings["stop_strings"])
        except ValueError as error:
            kind = type(model.tokenizer).__name__
            raise ValueError(
                f"transformers' StopStringCriteria cannot read the tokens of this tokenizer ({kind}: {error}), so "
                "stop_strings cannot be used with it"
            ) from error
    ends = torch.tensor(eos if stop_at_eos else [], dtype=torch.long, device=model.input_device)
    return Stopping(ends, strings, pad_id)


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
