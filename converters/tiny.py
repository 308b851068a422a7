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


def make_checkpoint(family: str, folder: Path, **settings: Any) -> None:
    """Writes a tiny checkpoint of `family` as transformers writes one, every parameter away from its initial value."""
    transformers = transformers_for("making a checkpoint")
    size = make_tokenizer(folder, eos_token="<eos>")
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(
        family, **{"vocab_size": size + 3, **special, **module_of({"model_type": family}).TINY, **settings}
    )
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
