"""Tiny checkpoints made on the spot, for the demonstration, tests and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from converters.families import module_of
from transformer_std.optional import transformers_for

TEXT = "the cat sat on the mat and the dog ran to the red house by the sea"


def make_tokenizer(folder: Path, **special: str) -> int:
    """Writes a tokenizer of the words of `TEXT`, one token each, that adds nothing; returns its size."""
    transformers = transformers_for("the tokenizer")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", *special.values(), *dict.fromkeys(TEXT.split())]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    fast.save_pretrained(folder)
    return len(words)


def make_byte_tokenizer(folder: Path) -> int:
    """Writes a byte-level tokenizer in which a word of `TEXT` is one token; returns its size."""
    transformers = transformers_for("the tokenizer")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, f" {TEXT}"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return tokenizer.get_vocab_size()


def make_checkpoint(family: str, folder: Path, **settings: Any) -> None:
    """Writes a tiny checkpoint of `family` as transformers writes one, every parameter away from its initial value."""
    transformers = transformers_for("making a checkpoint")
    size = make_tokenizer(folder, eos_token="<eos>")
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    tiny = module_of({"model_type": family}).TINY
    transformers.AutoConfig.for_model(family, **special, **tiny).save_pretrained(folder)
    if not transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]:  # it takes no other kind for some
        size = make_byte_tokenizer(folder)
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": size + 3, **special, **tiny, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    shake(model)
    model.save_pretrained(folder)


def shake(model: torch.nn.Module, seed: int = 0) -> None:
    """Moves every parameter by seeded noise: fresh biases are 0 and fresh norms 1, which hides what drops them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.12 * torch.randn(parameter.shape, generator=generator))
