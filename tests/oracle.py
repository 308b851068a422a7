"""What the tests ask transformers: its own forward and its own gradients on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import converters
from converters.checkpoint import LiveTensors
from converters.fill import turned
from converters.rules import Stack, written_by
from converters.verification.reference import Reference
from tests.tiny import load_reference
from transformer_std import HookedTransformer


def both(folder: Path, attn: str = "eager", dtype: torch.dtype = torch.float32) -> tuple[HookedTransformer, Reference]:
    model = HookedTransformer.from_pretrained(folder, dtype=dtype, attn_implementation=attn)
    hf = load_reference(folder, dtype, attn)
    return model, Reference(hf, model.config, converters.family_of({"model_type": model.config.origin.family}))


def check_parameter_gradients(model: HookedTransformer, theirs: Any) -> None:
    rules = converters.family_of({"model_type": model.config.origin.family}).WEIGHTS
    frozen = [name for name, each in theirs.named_parameters() if each.grad is None]
    tensors = LiveTensors({name: each.grad for name, each in theirs.named_parameters() if name not in frozen})
    as_ours = turned(tensors, rules)
    gradients = {name: as_ours.tensor(name) for name in tensors} | dict.fromkeys(frozen)
    for name, parameter in model.named_parameters():
        names = [
            rule.theirs.format(**found[1])
            for rule in rules
            if not isinstance(rule, Stack) and (found := written_by([rule], name))
        ]
        if not parameter.requires_grad:
            assert not any(gradients.get(each) is not None for each in names)
            continue
        (theirs_name,) = [each for each in names if each in gradients]
        assert torch.equal(parameter.grad, gradients[theirs_name]), name
