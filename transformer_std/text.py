"""Text to tokens and back, as the checkpoint's tokenizer does it and nothing more; and all other inputs to tokens."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_std.inputs import checked_mask
from transformer_std.layouts import Tokens
from transformer_std.optional import transformers_for
from transformer_std.padded import PaddedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["text", "texts", "chat", "chats", "row", "rows", "encoding", "tensor"]
Mask = Int[Tensor, "batch seq"]
ACCEPTED = (
    "text, a list of texts, token ids [batch seq] or [seq] (a tensor or lists), chat messages, or what a tokenizer "
    "returns; a stream [batch seq hidden_size] goes with start_at_layer"
)
# What tokenizers return beside ids and mask, and no decoder-only model reads.
NOTES = {
    "token_type_ids", "special_tokens_mask", "offset_mapping", "length", "overflowing_tokens", "num_truncated_tokens",
    "overflow_to_sample_mapping",
}  # fmt: skip


class NoTokenizer(ValueError, AttributeError):
    """Text was asked of a model without a tokenizer. An `AttributeError` too, so that `hasattr` answers False."""


class Text:
    """The part of a model that speaks text. The tokenizer adds what it adds by itself; nothing is prepended."""

    _tokenizer: Any

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, loaded when first used. Raises `NoTokenizer` where there is none."""
        if self._tokenizer is None:
            raise NoTokenizer("this model has no tokenizer: pass token ids, or load it with tokenizer=...")
        if isinstance(self._tokenizer, (str, Path)):
            tokenizers = transformers_for("text").AutoTokenizer
            self._tokenizer = tokenizers.from_pretrained(str(self._tokenizer), trust_remote_code=False)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | str | Path | None) -> None:
        self._tokenizer = tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer_source(self) -> PreTrainedTokenizerBase | str | Path | None:
        """The tokenizer, or where it is as long as nobody used it; None where there is none."""
        return self._tokenizer

    def to_tokens(self, input: Any, *, return_mask: bool = False) -> Any:
        """Token ids [batch seq] of text, texts, or anything else that the model reads.

        Rows of several lengths are padded on the left. The answer is then a `PaddedTokens`, which carries its mask
        along: the model knows the padding. With `return_mask` the answer is the pair of ids and mask.
        """
        tokens, mask = self.read(input)
        if mask is not None and not bool(mask.all()):
            tokens = PaddedTokens.of(tokens, mask.to(tokens.dtype, copy=True))
        return (tokens, torch.ones_like(tokens) if mask is None else mask) if return_mask else tokens

    def read(self, input: Any, attention_mask: Tensor | None = None) -> tuple[Tokens, Tensor | None]:
        """Token ids [batch seq] of whatever says them, and the mask that is known of them; None where none is.

        Args:
            input: text or a list of texts; token ids [batch seq], or [seq] for a batch of one, as a tensor, an array or
                lists, whose rows may differ in length; a mapping with `input_ids` and perhaps `attention_mask`, as
                tokenizers return; chat messages (dicts with `role` and `content`) or a list of conversations, rendered
                by the checkpoint's chat template with the generation prompt. Rows of several lengths are padded on
                the left.
            attention_mask: wins over what the input says; 1 for real tokens, 0 for padding.

        Raises:
            TypeError: an input of another kind.
            ValueError: one without tokens, or a mask with other numbers than 0 and 1.
        """
        if isinstance(input, Tensor):
            tokens, own = PaddedTokens.parts(input, attention_mask is None)
            tokens = tokens[None] if tokens.ndim == 1 else tokens
            own = own[None] if own is not None and own.ndim == 1 else own
        else:
            tokens, own = self._read_other(input)
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"the input is {list(tokens.shape)} {tokens.dtype}: give {ACCEPTED}")
        if tokens.numel() == 0:
            raise ValueError(f"the input has no tokens: it is {list(tokens.shape)} [batch seq]")
        if attention_mask is None:
            return tokens, own
        mask = checked_mask(attention_mask)
        return tokens, mask[None] if mask.ndim == 1 and len(tokens) == 1 else mask

    def _read_other(self, input: Any) -> tuple[Tensor, Mask | None]:
        form = form_of(input)
        if form == "text":
            return self._encode([input])
        if form == "texts":
            return self._encode(list(input))
        if form in ("chat", "chats"):
            return self._render(input)
        if form == "encoding":
            return _read_encoding(input)
        if form in ("row", "rows"):
            return _read_rows([input] if form == "row" else input)
        return self.read(torch.as_tensor(input))

    def _encode(self, texts: list[str]) -> tuple[Tokens, Mask | None]:
        rows = self.tokenizer(texts)["input_ids"]
        if not all(rows):
            raise ValueError("a text has no tokens")
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        return joined(rows, 0 if pad is None else pad)

    def _render(self, messages: Any) -> tuple[Tokens, Mask | None]:
        """Chat messages by the checkpoint's template, the generation prompt added. What begins a text is the template's
        part, so the tokenizer adds nothing."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(
                "the tokenizer has no chat template, so chat messages cannot be read: give text, or set "
                "model.tokenizer.chat_template"
            )
        settings: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        encoding: Any = self.tokenizer.apply_chat_template(messages, **settings)
        return _read_encoding({"input_ids": encoding["input_ids"]})

    def to_string(self, tokens: Tensor | Sequence[int]) -> str | list[str]:
        """The text of token ids [seq], or the texts of ids [batch seq]."""
        tokens = torch.as_tensor(tokens)
        if tokens.ndim == 2:
            return [decode(self.tokenizer, row) for row in tokens.tolist()]
        return decode(self.tokenizer, tokens.reshape(-1).tolist())

    def to_str_tokens(self, input: str | Tensor | Sequence[int]) -> list[str]:
        """The text of each token of a text, or of token ids [seq], where it stands: joined they are the text of all,
        `to_string`. Tokens that are parts of one character are empty, save the last of them."""
        ids = self.to_tokens(input)[0] if isinstance(input, str) else torch.as_tensor(input).squeeze()
        ids, pieces, start, end = ids.reshape(-1).tolist(), [], 0, 0
        for at in range(1, len(ids) + 1):  # a token's text depends on the one before it
            before, after = decode(self.tokenizer, ids[start:end]), decode(self.tokenizer, ids[start:at])
            whole = at == len(ids) or not after.endswith(BROKEN)
            pieces.append(after[len(before) :] if whole else "")
            start, end = (end, at) if whole else (start, end)
        return pieces

    def token_name(self, token: int) -> str:
        """One token's text, with the space in front that is part of it. Where the token has no text of its own (a byte)
        the tokenizer's name for it, and `#5` for an id that the tokenizer does not have."""
        own: str | None = self.tokenizer.convert_ids_to_tokens([token])[0]
        if own is None:
            return f"#{token}"
        once, twice = (decode(self.tokenizer, [token] * count) for count in (1, 2))
        text = twice[len(once) :]  # a text's first token can lose its space
        is_byte = own.startswith("<0x") and own.endswith(">")
        return own if is_byte or not text or BROKEN in text or text.strip() == own else text

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token. Raises `ValueError` where it is another number of them."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, {self.tokenizer.convert_ids_to_tokens(ids)}, not one")
        return ids[0]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip_special: bool = False) -> str:
    """What tokens say, to the letter: no spaces are cleaned up."""
    text = tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no whole character


def form_of(input: Any) -> Form:
    """How an input says its tokens."""
    if isinstance(input, str):
        return "text"
    if isinstance(input, Mapping):
        return "encoding"
    if isinstance(input, Tensor) or hasattr(input, "__array__"):
        return "tensor"
    if isinstance(input, (list, tuple)) and input:
        kinds: list[tuple[Form, Callable[[Any], bool]]] = [
            ("texts", lambda each: isinstance(each, str)),
            ("row", _is_id),
            ("chat", _is_message),
            ("chats", lambda each: isinstance(each, (list, tuple)) and bool(each) and all(map(_is_message, each))),
            ("rows", lambda each: all(map(_is_id, _listed(each)))),
        ]
        for form, holds in kinds:
            if all(map(holds, input)):
                return form
    kind = type(input).__name__
    if isinstance(input, (list, tuple)):
        kind = (
            f"a {kind} of {', '.join(dict.fromkeys(type(each).__name__ for each in input))}"
            if input
            else f"an empty {kind}"
        )
    raise TypeError(f"the input is {kind}: give {ACCEPTED}")


def _is_id(each: Any) -> bool:
    return isinstance(each, numbers.Integral) and not isinstance(each, bool)


def _is_message(each: Any) -> bool:
    return isinstance(each, Mapping) and "role" in each


def _listed(row: Any) -> list[Any]:
    """A row of ids as a list; one entry that is no id where it is something else."""
    if isinstance(row, PaddedTokens):  # its real ids: padding a list of rows is done here
        row, mask = PaddedTokens.parts(row)
        row = row if mask is None else row[mask.bool()]
    row = row.tolist() if hasattr(row, "tolist") else row
    return list(row) if isinstance(row, (list, tuple)) else [None]


def _read_encoding(values: Mapping[str, Any]) -> tuple[Tensor, Mask | None]:
    """What a tokenizer returns."""
    if "input_ids" not in values:
        raise TypeError(f"the input is a mapping of {', '.join(map(repr, values)) or 'nothing'}, without 'input_ids'")
    if unknown := set(values) - {"input_ids", "attention_mask"} - NOTES:
        raise TypeError(
            f"the input has {', '.join(sorted(map(repr, unknown)))}: of a mapping only 'input_ids' and "
            "'attention_mask' are read"
        )
    ids, mask = values["input_ids"], values.get("attention_mask")
    if not isinstance(ids, (list, tuple)):
        tokens, own = PaddedTokens.parts(torch.as_tensor(ids), mask is None)
        mask = own if mask is None else checked_mask(torch.as_tensor(mask))
        return torch.atleast_2d(tokens), None if mask is None else torch.atleast_2d(mask)
    form = form_of(ids)
    if form not in ("row", "rows"):
        raise TypeError(f"the input's 'input_ids' are a list of {type(ids[0]).__name__}, not of ids")
    if form == "row":
        ids, mask = [ids], None if mask is None else [mask]
    return _read_rows(ids, mask)


def _read_rows(rows: Sequence[Any], masks: Any = None) -> tuple[Tokens, Mask | None]:
    rows = [_listed(row) for row in rows]
    if not all(rows):
        raise ValueError("a row has no tokens")
    masks = None if masks is None else [_listed(mask) for mask in masks]
    if masks is not None and [*map(len, masks)] != [*map(len, rows)]:
        raise ValueError("the input's 'attention_mask' has other lengths than its 'input_ids'")
    return joined(rows, 0, masks)


def joined(rows: list[list[int]], pad: int, masks: list[list[int]] | None = None) -> tuple[Tokens, Mask | None]:
    """Rows of ids as one tensor, padded on the left, and the mask that says so; None where all of them are real."""
    longest = max(map(len, rows))
    masks = [[1] * len(row) for row in rows] if masks is None else masks
    tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], dtype=torch.long)
    mask = checked_mask(torch.tensor([[0] * (longest - len(row)) + row for row in masks]))
    return tokens, None if bool(mask.all()) else mask.long()
