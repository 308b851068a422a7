"""Text in: what the tokenizer adds and nothing else, padding on the left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from converters.demo import make_checkpoint, make_tokenizer
from transformer_std import HookedTransformer

LONG, SHORT = "the cat sat on the red mat", "the dog ran"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("phi3", tmp_path)
    return tmp_path


@torch.no_grad()
def test_text_is_what_the_tokenizer_makes_of_it(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    ids = model.tokenizer(LONG)["input_ids"]
    assert model.to_tokens(LONG).tolist() == [ids]
    assert torch.equal(model(LONG), model(torch.tensor([ids])))
    assert torch.equal(model([LONG]), model(LONG))


@torch.no_grad()
def test_texts_are_padded_on_the_left(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    assert model.tokenizer.pad_token is None
    logits, cache = model.run_with_cache([LONG, SHORT], names_filter=["input_ids", "attention_mask"])
    assert cache["attention_mask"].tolist() == [[1] * 7, [0] * 4 + [1] * 3]
    assert cache["input_ids"][1, :4].tolist() == [model.tokenizer.eos_token_id] * 4
    torch.testing.assert_close(logits[1, 4:], model(SHORT)[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0], model(LONG)[0], atol=1e-4, rtol=1e-4)
    tokens, mask = model.to_tokens([LONG, SHORT], return_mask=True)
    assert torch.equal(model(tokens, attention_mask=mask), model([LONG, SHORT]))
    assert not torch.equal(model(tokens.as_subclass(torch.Tensor)), model([LONG, SHORT]))


@torch.no_grad()
def test_eos_inside_a_text_is_a_token(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    text = "the cat <eos> the dog"
    _, cache = model.run_with_cache(text, names_filter=["input_ids", "attention_mask"])
    assert cache["input_ids"][0, 2] == model.tokenizer.eos_token_id
    assert cache["attention_mask"].all()


@torch.no_grad()
def test_a_mask_given_wins(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    mask = torch.ones(2, 7, dtype=torch.long)
    tokens = model.to_tokens([LONG, SHORT])
    bare = model(torch.tensor(tokens.tolist()))
    assert torch.equal(model([LONG, SHORT], attention_mask=mask), bare)
    assert torch.equal(model(tokens, attention_mask=mask), bare)


@torch.no_grad()
def test_a_bos_comes_from_the_tokenizer_alone(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    model = HookedTransformer.from_pretrained(folder)
    plain = model.to_tokens(LONG)
    tokenizer = model.tokenizer
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokens = HookedTransformer.from_pretrained(folder, tokenizer=tokenizer).to_tokens(LONG)
    assert tokens.tolist() == [[1, *plain[0].tolist()]]


def test_other_tokenizers_and_bad_texts(folder: Path, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    elsewhere = tmp_path / "tokenizer"
    make_tokenizer(elsewhere, eos_token="<eos>")
    assert torch.equal(HookedTransformer.from_pretrained(folder, tokenizer=elsewhere)(LONG), model(LONG))
    with pytest.raises(ValueError, match="a text has no tokens"):
        model("")
    with pytest.raises(TypeError, match="the input is an empty list: give text, a list of texts, token ids"):
        model([])
    with pytest.raises(TypeError, match="the input is a list of int, str: give text, a list of texts, token ids"):
        model([1, "the"])
