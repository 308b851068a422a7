"""Text in: what the tokenizer adds and nothing else, padding on the left."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import einops
import pytest
import torch
from torch.utils.data import DataLoader

from converters.tiny import make_checkpoint, make_tokenizer
from tests.tiny import BASES
from transformer_std import HookedTransformer
from transformer_std.padded import PaddedTokens

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


# -- other inputs ------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<eos> {{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<eos> the red{% endif %}"
)
CHAT = [{"role": "dog", "content": "the cat sat"}, {"role": "cat", "content": "on the mat"}]


@torch.no_grad()
def test_all_that_a_tokenizer_returns_is_read(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    tokenizer, texts = model.tokenizer, [LONG, SHORT]
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    for text in (LONG, texts):
        expected = model(text)
        for settings in ({}, {"return_tensors": "pt"}, {"return_tensors": "np"}):
            encoding = tokenizer(text, padding=True, **settings)
            assert torch.equal(model(encoding), expected)
            assert torch.equal(model(dict(encoding)), expected)
    ragged = tokenizer(texts)
    for rows in (ragged, dict(ragged), ragged["input_ids"], [torch.tensor(row) for row in ragged["input_ids"]]):
        logits = model(rows)
        assert torch.equal(logits[0], model(texts)[0])
        assert torch.equal(logits[1, 4:], model(texts)[1, 4:])  # padding is another token
    ids = tokenizer(LONG)["input_ids"]
    for one in (ids, tuple(ids), torch.tensor(ids), torch.tensor(ids).numpy(), torch.tensor(ids, dtype=torch.int32)):
        assert torch.equal(model(one), model(LONG))
        assert model.to_tokens(one).tolist() == [ids]
    right = {"input_ids": [[*ids[:3], 0], ids[:4]], "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]]}
    torch.testing.assert_close(model(right)[0, :3], model(ids[:3])[0])


@torch.no_grad()
def test_chat_messages_are_what_the_template_makes_of_them(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    model = HookedTransformer.from_pretrained(folder)
    tokenizer = model.tokenizer
    with pytest.raises(ValueError, match="the tokenizer has no chat template, so chat messages cannot be read"):
        model(CHAT)
    tokenizer.chat_template = TEMPLATE
    # A tokenizer that begins every text by itself must not begin what the template began.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    rendered = "<eos> dog the cat sat <eos> cat on the mat <eos> the red"
    assert model.to_tokens(CHAT).tolist() == [tokenizer(rendered, add_special_tokens=False)["input_ids"]]
    encoding = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert torch.equal(model(CHAT), model(encoding))
    both = model([CHAT, CHAT[:1]])
    torch.testing.assert_close(both[0], model(CHAT)[0], atol=1e-5, rtol=1e-4)  # batched rows round otherwise
    alone = model(CHAT[:1])[0]
    torch.testing.assert_close(both[1, -len(alone) :], alone, atol=1e-5, rtol=1e-4)


def test_unknown_inputs_are_refused_by_name(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    accepted = "give text, a list of texts, token ids"
    for wrong, said in (
        (None, f"the input is NoneType: {accepted}"),
        (3, f"the input is int: {accepted}"),
        ([1.5], f"the input is a list of float: {accepted}"),
        ([True], f"the input is a list of bool: {accepted}"),
        ([[1, 2], "the"], f"the input is a list of list, str: {accepted}"),
        ([{"content": "the"}], f"the input is a list of dict: {accepted}"),
        ({"ids": [1]}, "the input is a mapping of 'ids', without 'input_ids'"),
        ({"input_ids": [1], "labels": [1]}, "the input has 'labels': of a mapping only 'input_ids' and 'attention_m"),
    ):
        for call in (model, model.to_tokens, lambda input: model.generate(input, max_new_tokens=1)):
            with pytest.raises(TypeError, match=re.escape(said)):
                call(wrong)
    for empty in ([[1], []], torch.zeros(0, dtype=torch.long)):
        with pytest.raises(ValueError, match="no tokens"):
            model(empty)
    with pytest.raises(ValueError, match=r"the input is \[1, 2\] torch.float32: give"):
        model(torch.zeros(2))


def test_masks_of_other_numbers_are_refused(folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    tokens = torch.tensor([[2, 3, 4]])
    for numbers in ([0.0, 0.0, -torch.inf], [0.0, torch.nan, 1.0], [1.0, 0.5, 1.0]):
        for call in (model, lambda *given, **more: model.generate(*given, max_new_tokens=1, **more)):
            with pytest.raises(ValueError, match="the attention_mask has other numbers than 0 and 1"):
                call(tokens, attention_mask=torch.tensor([numbers]))
        with pytest.raises(ValueError, match="the attention_mask has other numbers than 0 and 1"):
            model(torch.zeros(1, 3, model.hidden_size), start_at_layer=0, attention_mask=torch.tensor([numbers]))
    expected = model(tokens, attention_mask=torch.tensor([[0, 1, 1]]))
    assert torch.equal(model(tokens, attention_mask=torch.tensor([[0.0, 1.0, 1.0]])), expected)


# -- padded tokens -----------------------------------------------------------------------------------------------

MOVES: dict[str, Any] = {
    "as they are": lambda tokens: tokens,
    "clone": lambda tokens: tokens.clone(),
    "another dtype": lambda tokens: tokens.to(torch.int32),
    "another device and back": lambda tokens: tokens.to("cpu").cpu(),
    "rows by a list": lambda tokens: tokens[[0, 1]],
    "rows by a slice": lambda tokens: torch.cat([tokens[:1], tokens[1:]]),
    "rows one by one": lambda tokens: torch.stack(list(tokens)),
    "split": lambda tokens: torch.cat(tokens.split(1)),
    "repeated": lambda tokens: tokens.repeat(2, 1)[2:],
    "einops": lambda tokens: einops.repeat(tokens, "batch seq -> (batch n) seq", n=2)[::2],
    "turned twice": lambda tokens: tokens.flip(0).flip(0),
    "deepcopy": copy.deepcopy,
    "pickle": lambda tokens: pickle.loads(pickle.dumps(tokens)),
    "a loader": lambda tokens: next(iter(torch.utils.data.DataLoader(tokens, batch_size=2))),
}


@pytest.mark.parametrize("move", MOVES)
@torch.no_grad()
def test_tokens_of_several_texts_keep_their_mask(move: str, folder: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    moved = MOVES[move](model.to_tokens([LONG, SHORT]))
    assert torch.equal(model(moved), model([LONG, SHORT]))


@torch.no_grad()
def test_what_becomes_of_a_mask(folder: Path, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(folder)
    tokens, mask = model.to_tokens([LONG, SHORT], return_mask=True)
    assert type(model.to_tokens(LONG)) is type(model.to_tokens([LONG, LONG])) is torch.Tensor
    assert torch.equal(tokens.mask, mask)
    torch.testing.assert_close(model(tokens[1])[0, 4:], model(SHORT)[0], atol=1e-5, rtol=1e-4)
    joined = torch.cat([tokens, model.to_tokens(LONG)])  # what is joined to them is real
    assert joined.mask.tolist() == [*mask.tolist(), [1] * 7]
    written = tokens.clone()
    written[1][3] = written[0, 0]  # a token over padding is a token, through a view too
    assert written.mask.tolist() == [[1] * 7, [0] * 3 + [1] * 4]
    assert tokens.mask.tolist() == mask.tolist()
    torch.save(tokens, tmp_path / "tokens.pt")
    assert torch.equal(model(torch.load(tmp_path / "tokens.pt")), model(tokens))
    _, cache = model.run_with_cache(tokens, names_filter=["input_ids", "attention_mask"])
    assert type(cache["input_ids"]) is type(cache["attention_mask"]) is torch.Tensor
    assert type(model.W_E[tokens]) is type(tokens == 3) is type(tokens.float()) is torch.Tensor
    for lost in (tokens + 0, torch.where(tokens > 1, tokens, 1), tokens.T):
        with pytest.raises(ValueError, match="what made them lost their mask: pass attention_mask"):
            model(lost)
    assert torch.equal(model(tokens + 0, attention_mask=mask), model(tokens))
    bare = model(torch.tensor(tokens.tolist()))
    for plain in (tokens.as_subclass(torch.Tensor), tokens.tolist(), tokens.numpy()):
        assert torch.equal(model(plain), bare)
    assert not torch.equal(bare, model(tokens))
    ids, own = torch.compile(PaddedTokens.parts, fullgraph=True, backend="eager")(tokens)
    assert type(ids) is torch.Tensor
    assert (ids.tolist(), own.tolist()) == (tokens.tolist(), mask.tolist())


# -- names of tokens ---------------------------------------------------------------------------------------------


@pytest.fixture
def pieces(folder: Path) -> HookedTransformer:
    """A model with a tokenizer of Phi-3's kind: spaces are part of tokens, bytes stand for what it has no token for."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"catdog",
        "▁cat",
        "cat",
        "▁dog",
    ]
    ids = {piece: at for at, piece in enumerate(dict.fromkeys(vocabulary))}
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("d", "o"), ("do", "g"), ("▁", "dog")]
    ids |= {piece: len(ids) + at for at, piece in enumerate(["ca", "do", "dog"])}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return HookedTransformer.from_pretrained(folder, tokenizer=tokenizer)


def test_a_texts_tokens_join_to_the_text(pieces: HookedTransformer) -> None:
    for text in ("cat dog", "catdog cat", "dog 🙂 cat", "é", "🙂🙂", "cat  dog", "cat \ufffd dog"):
        ids = pieces.tokenizer(text)["input_ids"]
        assert pieces.to_string(ids) == text
        parts = pieces.to_str_tokens(text)
        assert len(parts) == len(ids)
        assert "".join(parts) == text
    assert pieces.to_str_tokens("cat dogcat") == ["cat", " dog", "cat"]
    assert pieces.to_str_tokens("🙂") == ["", "", "", "", "🙂"]
    half = pieces.tokenizer("dog 🙂")["input_ids"][:-2]
    assert "".join(pieces.to_str_tokens(half)) == pieces.to_string(half)


def test_no_two_tokens_share_a_name(pieces: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {
        piece: pieces.tokenizer.convert_tokens_to_ids(piece) for piece in ("▁cat", "cat", "<0xF0>", "<0x9F>", "▁dog")
    }
    probabilities = torch.zeros(len(pieces.tokenizer) + 3)
    for index, share in zip(ids.values(), (0.5, 0.2, 0.15, 0.1, 0.05), strict=True):
        probabilities[index] = share
    named = pieces.probs_to_dict(probabilities, k=5)
    assert list(named) == [" cat", "cat", "<0xF0>", "<0x9F>", " dog"]
    assert list(named.values()) == pytest.approx([0.5, 0.2, 0.15, 0.1, 0.05])
    everything = pieces.probs_to_dict(torch.rand(len(probabilities)), k=len(probabilities))
    assert len(everything) == len(probabilities)
    unknown = f"#{len(probabilities) - 1}"
    assert unknown in everything
    names = pieces.get_topk_closest_tokens(torch.randn(2, pieces.hidden_size), k=pieces.vocab_size)
    assert [len({name for name, _ in row}) for row in names] == [pieces.vocab_size] * 2
    assert pieces.token_name(pieces.tokenizer.convert_tokens_to_ids("<0x63>")) == "<0x63>"
    assert pieces.token_name(pieces.tokenizer.convert_tokens_to_ids("c")) == "c"
    monkeypatch.setattr(pieces, "token_name", lambda token: "cat")  # whatever a tokenizer makes of its tokens
    assert list(pieces.probs_to_dict(probabilities, k=5).values()) == list(named.values())


@pytest.fixture(params=["phi", "afmoe"])
def speaking(request: pytest.FixtureRequest, tmp_path: Path) -> HookedTransformer:
    """A model with a tokenizer."""
    make_checkpoint(request.param, tmp_path)
    return HookedTransformer.from_pretrained(tmp_path)


@torch.no_grad()
def test_readouts(speaking: HookedTransformer) -> None:
    logits, cache = speaking.run_with_cache("the cat sat on the red mat")
    probabilities = logits[0, -1].softmax(-1)
    top = speaking.get_topk_closest_tokens(cache["layer_output", -1][0, -1], k=3)
    assert [text for text, _ in top] == [speaking.tokenizer.decode([int(i)]) for i in probabilities.topk(3).indices]
    assert [p for _, p in top] == pytest.approx(probabilities.topk(3).values.tolist(), rel=1e-4)
    assert speaking.probs_to_dict(cache["next_token_probs"][0], k=3) == pytest.approx(dict(top), rel=1e-4)
    nested = speaking.get_topk_closest_tokens(cache["layer_output", -1], k=3)
    assert len(nested[0]) == 7
    assert dict(nested[0][-1]) == pytest.approx(dict(top), rel=1e-4)


def test_tokens_and_text(speaking: HookedTransformer) -> None:
    text = "the cat sat on the red mat"
    tokens = speaking.to_tokens(text)
    assert speaking.to_string(tokens[0]) == text
    assert speaking.to_string(tokens) == [text]
    assert speaking.to_str_tokens(text) == ["the", " cat", " sat", " on", " the", " red", " mat"]
    assert speaking.to_str_tokens(tokens) == speaking.to_str_tokens(text)
    assert speaking.to_single_token("cat") == int(tokens[0, 1])
    with pytest.raises(ValueError, match=r"'the cat' is 2 tokens, \['the', 'cat'\], not one"):
        speaking.to_single_token("the cat")


# -- no tokenizer ------------------------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_says_so(checkpoints: Any) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    assert not hasattr(model, "tokenizer")
    assert not model.has_tokenizer
    assert getattr(model, "tokenizer", None) is None
    inspect.getmembers(model)
    for kind in (ValueError, AttributeError):
        with pytest.raises(kind, match="this model has no tokenizer: pass token ids, or load it with tokenizer="):
            model("the cat")


def test_a_propertys_own_error_is_told(checkpoints: Any) -> None:
    """torch says of any property that fails with an AttributeError that the module does not have it."""
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    model.layers[0].mlp.cfg = None
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'intermediate_size'"):
        _ = model.layers[0].mlp.intermediate_size
    model.tokenizer = "somewhere"
    assert model.has_tokenizer
    with pytest.raises(AttributeError, match="'HookedTransformer' object has no attribute 'nothing'"):
        _ = model.nothing


# What was done to padded ids, and the bare ids and the mask that come of it.
DONE: dict[str, Callable[[PaddedTokens], Any]] = {
    "rows swapped": lambda tokens: put(tokens, [[0, 1]], tokens[[1, 0]]),
    "a row over another": lambda tokens: put(tokens, [0], tokens[1]),
    "the same id over padding": lambda tokens: put(tokens, [(1, 2)], int(tokens[1, 2])),
    "bare ids over padding": lambda tokens: put(tokens, [(1, slice(0, 2))], torch.tensor([5, 6])),
    "stacked into": lambda tokens: torch.stack(
        [tokens[0], tokens[1]], out=torch.zeros_like(tokens, dtype=torch.long).as_subclass(torch.Tensor)
    ),
    "a worker's batch": lambda tokens: next(iter(DataLoader(tokens, batch_size=2, num_workers=1))),
}


def put(tokens: PaddedTokens, where: list[Any], ids: Any) -> PaddedTokens:
    tokens = tokens.clone()
    tokens[where[0]] = ids
    return tokens


@pytest.mark.parametrize("name", DONE)
@torch.no_grad()
def test_what_is_done_to_padded_ids_is_done_to_their_mask(name: str, checkpoints: Any) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    padded = model.to_tokens([[5, 6, 7, 8, 9, 10], [11, 12, 13]])
    ids, mask = padded.as_subclass(torch.Tensor).clone(), padded.mask.clone()
    if name == "rows swapped":
        ids, mask = ids[[1, 0]], mask[[1, 0]]
    elif name == "a row over another":
        ids[0], mask[0] = ids[1].clone(), mask[1].clone()
    elif name == "the same id over padding":
        mask[1, 2] = 1
    elif name == "bare ids over padding":
        ids[1, :2], mask[1, :2] = torch.tensor([5, 6]), 1
    found = DONE[name](padded)
    assert torch.equal(found.as_subclass(torch.Tensor), ids)
    assert torch.equal(found.mask, mask)
    assert torch.equal(model(found), model(ids, attention_mask=mask))


@torch.no_grad()
def test_rows_of_padded_ids_and_ids_of_their_size(checkpoints: Any) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    padded = model.to_tokens([[5, 6, 7, 8, 9, 10], [11, 12, 13]])
    wanted = model(padded)
    for rows in (list(padded), [padded[0], padded[1]], {"input_ids": [padded[0], padded[1]]}):
        assert torch.equal(model(rows), wanted)
    assert type(torch.zeros_like(padded)) is torch.Tensor
    assert model(torch.ones_like(padded)).shape == wanted.shape
