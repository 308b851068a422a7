"""What is asked of a released model: transformers' bits, and the structures that such models are known to have."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from converters.fill import same
from transformer_std import HookedTransformer

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
SHORT = "The capital of France is"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = 50  # tokens that are read twice
HEADS = 6  # that are ablated
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


def load_both(folder: Path, dtype: torch.dtype = torch.float32, attn: str = "sdpa") -> tuple[HookedTransformer, Any]:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn).eval()
    return HookedTransformer.from_pretrained(folder, dtype=dtype, attn_implementation=attn), theirs


@dataclass
class Logits:
    """One comparison: of `length` tokens, or of a padded batch at its real positions."""

    dtype: str
    attn: str
    what: str
    equal: bool
    nan: bool  # some are, in both


@torch.no_grad()
def compare_logits(folder: Path) -> Iterator[Logits]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :512] for text in (SHORT, TEXT[:400], TEXT)]
    batch = tokenizer([SHORT, "Once upon a time there was"], return_tensors="pt", padding=True)
    real = batch.attention_mask.bool()
    positions = (batch.attention_mask.cumsum(-1) - 1).clamp(min=0)
    for dtype in DTYPES:
        for attn in ("sdpa", "eager"):
            model, theirs = load_both(folder, dtype, attn)
            named = (str(dtype).removeprefix("torch."), attn)
            for tokens in prompts:
                ours, expected = model(tokens), theirs(tokens).logits
                yield Logits(*named, f"{tokens.shape[1]} tokens", same(ours, expected), bool(expected.isnan().any()))
            ours = model(batch.input_ids, attention_mask=batch.attention_mask)
            expected = theirs(**batch, position_ids=positions).logits
            ours, expected = ours[real], expected[real]
            yield Logits(*named, "a padded batch", same(ours, expected), bool(expected.isnan().any()))
            del model, theirs
            gc.collect()


@dataclass
class Continuation:
    prompt: str
    text: str
    equal: bool


@torch.no_grad()
def continue_texts(model: HookedTransformer, theirs: Any) -> Iterator[Continuation]:
    """Greedy text, token for token; of a model with a chat template, an answer too."""
    tokenizer: Any = model.tokenizer
    prompts = {text: tokenizer(text, return_tensors="pt").input_ids for text in (SHORT, "Once upon a time")}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompts[chat[0]["content"]] = given.input_ids
    for prompt, ids in prompts.items():
        ours = model.generate(ids, max_new_tokens=30, do_sample=False)
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        yield Continuation(prompt, tokenizer.decode(ours[0, ids.shape[1] :]), torch.equal(ours, expected))


@dataclass
class Induction:
    """Random tokens, read twice: the loss on each half, the heads that look behind a token's first occurrence, and the
    second half's loss without them, and without as many others."""

    first: float
    second: float
    heads: list[tuple[str, float]]
    without: float
    without_others: float


@torch.no_grad()
def find_induction(model: HookedTransformer) -> Induction:
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(1000, 40_000, (4, HALF), generator=generator)
    start = torch.full((4, 1), model.tokenizer.bos_token_id)
    tokens = torch.cat((start, half, half), dim=1)

    def second_loss(hooks: list[Any]) -> float:
        losses = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="loss", loss_per_token=True)
        return float(losses[:, HALF + 1 :].mean())  # nothing foretells the first token again

    losses = model(tokens, return_type="loss", loss_per_token=True)
    _, cache = model.run_with_cache(tokens, names_filter="attention_probabilities", return_type=None)
    patterns = [cache["attention_probabilities", i] for i in range(model.num_layers)]
    scores = torch.stack([each.diagonal(1 - HALF, -2, -1).mean((0, -1)) for each in patterns])
    best = scores.flatten().topk(HEADS)
    others = torch.randperm(scores.numel(), generator=generator)
    others = others[~torch.isin(others, best.indices)][:HEADS]
    return Induction(
        float(losses[:, :HALF].mean()),
        float(losses[:, HALF + 1 :].mean()),
        [(head_name(int(i), model), float(score)) for score, i in zip(*best, strict=True)][:3],
        second_loss(ablating(model, best.indices)),
        second_loss(ablating(model, others)),
    )


def head_name(i: int, model: HookedTransformer) -> str:
    return f"L{i // model.num_heads}H{i % model.num_heads}"


def ablating(model: HookedTransformer, heads: Tensor) -> list[Any]:
    def zero(head: int) -> Any:
        def hook(premix: Tensor, hook: Any) -> None:
            premix[:, :, head] = 0

        return hook

    places = [divmod(int(i), model.num_heads) for i in heads]
    return [(("attention_premix", layer), zero(head)) for layer, head in places]


@dataclass
class Names:
    """The indirect object: logit(" Mary") - logit(" John") behind either prompt; and how much of the difference between
    them comes back where one position of one block's input is the clean run's, at its strongest position."""

    clean: float
    corrupted: float
    restored: list[tuple[int, str, float]]
    heads: list[tuple[str, float]]


@torch.no_grad()
def patch_names(model: HookedTransformer) -> Names:
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")

    def difference(logits: Tensor) -> Tensor:
        return logits[0, -1, mary] - logits[0, -1, john]

    logits, cache = model.run_with_cache(CLEAN, names_filter=["layer_input", "attention_premix"])
    clean, corrupted = float(difference(logits)), float(difference(model(CORRUPTED)))

    def share(values: Tensor) -> Tensor:
        return (values - corrupted) / (clean - corrupted)

    streams = share(model.activation_patching(CORRUPTED, cache, "layer_input", difference))
    words = model.to_str_tokens(CLEAN)
    at = [(layer, int(streams[layer].argmax())) for layer in range(0, model.num_layers, 3)]
    heads = share(
        model.activation_patching(CORRUPTED, cache, "attention_premix", difference, over=("num_heads",))
    ).flatten()
    return Names(
        clean,
        corrupted,
        [(layer, words[position], float(streams[layer, position])) for layer, position in at],
        [(head_name(int(i), model), float(value)) for value, i in zip(*heads.topk(3), strict=True)],
    )


@dataclass
class Lens:
    """The rank of the right next token in what each stream, read as the last, would say; the parts that say it; and how
    far the parts' sum is from the logit."""

    prompt: str
    answer: str
    ranks: list[int]
    parts: list[tuple[str, float]]
    off: float


@torch.no_grad()
def look_through_lens(model: HookedTransformer, prompt: str, answer: str) -> Lens:
    names = ["layer_input", "layer_output", "attention_output", "mlp_output", "lm_head_output"]
    _, cache = model.run_with_cache(prompt, names_filter=names)
    token = model.to_single_token(answer)
    lens = cache.logit_lens()[:, 0, -1]
    parts, labels = cache.decompose_resid(return_labels=True)
    said = cache.logit_attrs(parts, answer)[:, 0, -1]
    off = said.sum() + model.bias_logits[token] - cache["lm_head_output"][0, -1, token]
    return Lens(
        prompt,
        answer,
        (lens > lens[:, token, None]).sum(-1).tolist(),
        [(labels[int(i)], float(value)) for value, i in zip(*said.topk(3), strict=True)],
        float(off.abs()),
    )
