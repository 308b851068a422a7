"""Trains two toys, each in some seconds on two cores: a dense model of two blocks that has learned induction and
indirect objects, and one block with a mixture of 8 experts that has learned facts of three kinds.

    python examples/train_toy.py toys                     # writes toys/dense and toys/mixture
    HookedTransformer.from_pretrained("toys/dense")

The texts are made up as they are needed: `repeated`, `gifts` and `facts` give token ids, and WORDS says what they are.
docs/guide/toys.md takes both models apart.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from transformer_std import HookedTransformer
from transformer_std.config import Attention, Layer, Mixture, Mlp, Norm, Rotary, SoftmaxTopK, TransformerConfig

FRAME = ["<bos>", "When", "and", "went", "home", ",", "gave", "it", "to", "."]
NAMES = ["John", "Mary", "Tom", "Anna", "Peter", "Lucy", "Paul", "Emma"]
PLAIN = [f"w{i}" for i in range(40)]
FACTS = {"country": ("in", "city"), "animal": ("says", "cry"), "tool": ("does", "use")}
COUNT = 12  # of each kind
NUMBERED = [kind for first, (_, second) in FACTS.items() for kind in (first, second)]
VERBS = [verb for verb, _ in FACTS.values()]
WORDS = [*FRAME, *NAMES, *PLAIN, *VERBS, *(f"{kind}{i}" for kind in NUMBERED for i in range(COUNT))]
ID = {word: i for i, word in enumerate(WORDS)}

Texts = Callable[[int, Generator], Tensor]


def repeated(rows: int, generator: Generator, half: int = 10) -> Tensor:
    """Random words, and the same again: what followed a word before follows it again, [rows 1+2*half]."""
    first = ID["w0"] + torch.rand(rows, len(PLAIN), generator=generator).argsort(-1)[:, :half]
    return torch.cat((torch.full((rows, 1), ID["<bos>"]), first, first), -1)


def gifts(rows: int, generator: Generator) -> Tensor:
    """ "When John and Mary went home , John gave it to Mary ." The last name is the one that came once, [rows 14]."""
    first, second = (ID["John"] + torch.rand(rows, len(NAMES), generator=generator).argsort(-1)[:, :2]).T
    giver = torch.where(torch.rand(rows, generator=generator) < 0.5, first, second)
    text: list[str | Tensor] = ["<bos>", "When", first, "and", second, "went", "home", ",", giver, "gave", "it", "to"]
    text += [first + second - giver, "."]
    return torch.stack([each if isinstance(each, Tensor) else torch.full((rows,), ID[each]) for each in text], -1)


def facts(rows: int, generator: Generator, count: int = 6) -> Tensor:
    """ "country3 in city3 tool7 does use7 ...": facts of three kinds in any order, [rows 1+3*count]."""
    kinds = torch.randint(len(FACTS), (rows, count), generator=generator)
    numbers = torch.randint(COUNT, (rows, count), generator=generator)
    first = torch.tensor([ID[f"{kind}0"] for kind in FACTS])[kinds] + numbers
    verb = torch.tensor([ID[verb] for verb in VERBS])[kinds]
    second = torch.tensor([ID[f"{kind}0"] for _, kind in FACTS.values()])[kinds] + numbers
    three = torch.stack((first, verb, second), -1)
    return torch.cat((torch.full((rows, 1), ID["<bos>"]), three.flatten(1)), -1)


def config(mlp: Mlp | Mixture, blocks: int) -> TransformerConfig:
    """Blocks of four heads, 64 wide."""
    norm = Norm("rms", 1e-6)
    attention = Attention(num_heads=4, num_kv_heads=4, head_dim=16, rotary=Rotary(dims=16, theta=1000.0))
    return TransformerConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=mlp.intermediate_size, max_length=64,
        layers=(Layer("sequential", norm, attention, mlp),) * blocks, norm=norm, initializer_range=0.06,
    )  # fmt: skip


def train(
    model: HookedTransformer, texts: list[Texts], steps: int, few_heads: float = 0.0, all_experts: float = 0.0
) -> HookedTransformer:
    """A batch of each kind of text in turn.

    Args:
        few_heads: a penalty on the length of each head's output matrix. Heads that do the same share no work under
            it: one of them does all.
        all_experts: a penalty on experts of which some are chosen more often (https://arxiv.org/abs/2101.03961).
    """
    generator, highest = Generator().manual_seed(1), 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=highest, betas=(0.9, 0.98))
    scores: dict[str, Tensor] = {}
    keep = [("router_scores", lambda value, hook: scores.update({hook.name: value}))] if all_experts else []
    for step in range(steps):
        rate = highest * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        with model.hooks(fwd_hooks=keep):
            loss = model(texts[step % len(texts)](64, generator), return_type="loss")
        for layer in model.layers:
            loss = loss + few_heads * layer.self_attn.W_O.norm(dim=(1, 2)).sum()
        for each in scores.values():
            chosen = F.one_hot(each.argmax(-1), each.shape[-1]).float()
            loss = loss + all_experts * each.shape[-1] * (chosen.mean((0, 1)) * each.mean((0, 1))).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def dense(seed: int = 0) -> HookedTransformer:
    model = HookedTransformer(config(Mlp(128, "silu", "gated"), blocks=2), seed=seed)
    return train(model, [repeated, gifts], 500, few_heads=0.04)


def mixture(seed: int = 0) -> HookedTransformer:
    experts = Mixture(32, "silu", num_experts=8, top_k=1, router=SoftmaxTopK(normalized=False))
    return train(HookedTransformer(config(experts, blocks=1), seed=seed), [facts], 300, all_experts=0.003)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "toys")
    for name, make in (("dense", dense), ("mixture", mixture)):
        make().save_pretrained(folder / name)
        print(folder / name)
