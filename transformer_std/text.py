"""Text to tokens and back, as the checkpoint's tokenizer does it and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_std.layouts import Tokens
from transformer_std.optional import transformers_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Text:
    """The part of a model that speaks text. The tokenizer adds what it adds by itself; nothing is prepended."""

    _tokenizer: Any

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, loaded when first used."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: pass token ids, or load it with tokenizer=...")
        if isinstance(self._tokenizer, (str, Path)):
            auto = transformers_for("text").AutoTokenizer
            self._tokenizer = auto.from_pretrained(str(self._tokenizer), trust_remote_code=False)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | str | Path | None) -> None:
        self._tokenizer = tokenizer

    def to_tokens(self, texts: str | Sequence[str], *, return_mask: bool = False) -> Any:
        """Token ids of text, [batch seq]. Several texts are padded on the left: the forward then needs the mask too,
        `model(tokens, attention_mask=mask)`; with `return_mask` the answer is the pair."""
        tokens, mask = self._encode(texts)
        mask = torch.ones_like(tokens) if mask is None else mask
        return (tokens, mask) if return_mask else tokens

    def _encode(self, texts: Any) -> tuple[Tokens, Int[Tensor, "batch seq"] | None]:
        """Token ids of texts, padded on the left, with the mask that says so. Nothing is prepended that the tokenizer
        does not prepend."""
        batch = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, (list, tuple)) else []
        if not batch or not all(isinstance(text, str) for text in batch):
            raise TypeError(
                f"the input is {type(texts).__name__}: give text, a list of texts, or token ids [batch seq]"
            )
        rows = self.tokenizer(batch)["input_ids"]
        if not all(rows):
            raise ValueError("a text has no tokens")
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        pad = 0 if pad is None else pad  # never seen: the mask covers it
        tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(longest) >= (longest - lengths)[:, None]).long()
        return tokens, None if bool(mask.all()) else mask

    def to_string(self, tokens: Tensor | Sequence[int]) -> str | list[str]:
        """The text of token ids [seq], or the texts of ids [batch seq]."""
        tokens = torch.as_tensor(tokens)
        if tokens.ndim == 2:
            return [self.tokenizer.decode(row) for row in tokens]
        return self.tokenizer.decode(tokens.reshape(-1))

    def to_str_tokens(self, input: str | Tensor | Sequence[int]) -> list[str]:
        """Each token of a text, or of token ids [seq], on its own."""
        ids = self.to_tokens(input)[0] if isinstance(input, str) else torch.as_tensor(input).squeeze()
        return [self.tokenizer.decode([int(each)]) for each in ids.reshape(-1)]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token. Raises `ValueError` where it is another number of them."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, {self.tokenizer.convert_ids_to_tokens(ids)}, not one")
        return ids[0]
