"""Our own format, both directions: `model.safetensors`, `transformer_std.json` and a folder for the tokenizer.

One rename decides a save, that of `model.safetensors`: its header holds the config, and the name of the folder that
holds the tokenizer. `transformer_std.json` says the config once more, for people and for the Hub; it alone counts where
the header holds none, as in what older versions saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer_std.config import TransformerConfig
from transformer_std.transformer import Transformer
from transformer_std.whole import sync_folder, whole, write_json

WEIGHTS, CONFIG = "model.safetensors", "transformer_std.json"
CONFIG_KEY, TOKENIZER_KEY = "transformer_std", "tokenizer"  # in the header of the weights
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = [
    TOKENIZER_CONFIG, "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja",
]  # fmt: skip
TOKENIZER_FOLDER = re.compile("tokenizer-[0-9a-f]{16}")  # named by what is in it
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 64
TRANSPOSED = ".T"  # behind the name of a matrix whose columns lie together: it is written as it lies


def save(model: Transformer, folder: str | Path) -> None:
    """What `HookedTransformer.save_pretrained` does."""
    model.check_in_memory()
    if problem := unlike_its_config(model):
        raise ValueError(problem)
    config = config_now(model).to_dict()
    header = {"format": "pt", CONFIG_KEY: json.dumps(config)}
    with whole(folder, _refuse_another, _move_own) as written:
        write_tokenizer(model, beside := written / "tokenizer")
        if beside.exists():
            header[TOKENIZER_KEY] = _named_by_content(beside)
            beside.rename(written / header[TOKENIZER_KEY])
        write_weights(written / WEIGHTS, as_they_lie(weights(model)), header)
        write_json(written / CONFIG, config)
    source = model.tokenizer_source
    if isinstance(source, (str, Path)) and not _tokenizer_files(Path(source)):
        model.tokenizer = Path(folder) / header[TOKENIZER_KEY]  # it was of the save that this one replaced


def config_now(model: Transformer) -> TransformerConfig:
    """The model's config, with what may have changed since it was built: the weights' dtype and whether the head is the
    embedding."""
    dtype = str(model.dtype).removeprefix("torch.")
    return dataclasses.replace(model.config, dtype=dtype, tied_head=model.lm_head.weight is model.embed_tokens.weight)


def read_header(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty where it has none, or is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def find_tokenizer(header: dict[str, str], folder: Path) -> Path | None:
    """Where a checkpoint's tokenizer is: where the header of its weights says, or beside them."""
    name = header.get(TOKENIZER_KEY)
    if name is None:
        return folder if (folder / TOKENIZER_CONFIG).exists() else None
    return folder / name if TOKENIZER_FOLDER.fullmatch(name) and (folder / name).is_dir() else None


def _refuse_another(folder: Path) -> None:
    for theirs in ("config.json", "model.safetensors.index.json"):
        if (folder / theirs).exists():
            raise ValueError(f"{folder} holds another checkpoint ({theirs}), which ours would ruin: name a new folder")


def _move_own(written: Path, folder: Path) -> None:
    new = {each.name for each in written.iterdir()}
    if (folder / CONFIG).exists() and CONFIG_KEY not in read_header(folder / WEIGHTS):
        for file in _tokenizer_files(folder):  # an older version's: beside the weights, where they would be found
            file.unlink()
    for name in new - {WEIGHTS, CONFIG}:
        if not (folder / name).exists():
            (written / name).rename(folder / name)
    sync_folder(folder)
    (written / WEIGHTS).replace(folder / WEIGHTS)
    (written / CONFIG).replace(folder / CONFIG)
    sync_folder(folder)
    for each in folder.iterdir():
        if TOKENIZER_FOLDER.fullmatch(each.name) and each.name not in new:
            shutil.rmtree(each, ignore_errors=True)


def _named_by_content(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size} ".encode())
            digest.update(file.read_bytes())
    return f"tokenizer-{digest.hexdigest()[:16]}"


# -- what is written -------------------------------------------------------------------------------------------------


def unlike_its_config(model: Transformer) -> str | None:
    """Why the model's weights cannot be written as its config describes them; None where they can."""
    with torch.device("meta"):
        described = Transformer(model.config)
    held = model.state_dict(keep_vars=True)
    found = {name: list(each.shape) for name, each in held.items()}
    wanted = {name: list(each.shape) for name, each in described.state_dict().items()}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            return (
                f"the model is not what its config says: {name} is {found.get(name, 'missing')}, the config makes it "
                f"{wanted.get(name, 'nothing')}{_advice(found)}"
            )
        weight, (path, _, attribute) = held[name], name.rpartition(".")
        if type(weight) not in (nn.Parameter, Tensor) or weight.layout != torch.strided:
            advice = GATHER if hasattr(weight, "full_tensor") else "make it a plain dense tensor first"
            return f"{name} is a {type(weight).__name__} ({weight.layout}): {advice}"
        module: Any = described.get_submodule(path)
        dtype = module.held_dtype(attribute, model.dtype)
        # What a load keeps wider, a cast of the model may have made as narrow as the rest: it is read wide again.
        if weight.dtype not in (dtype, model.dtype) or dtype not in DTYPES:
            return f"{name} is {weight.dtype} in a model of {model.dtype}, and would not be read as that: cast it first"
    return None


GATHER = (
    "gather the shards first, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict, and load them into a model that is not sharded"
)
MADE_PLAIN = {
    ".parametrizations.": "torch.nn.utils.parametrize.remove_parametrizations(module, name)",
    ".lora_": "peft's merge_and_unload()",
    ".base_layer.": "peft's merge_and_unload()",
    "weight_orig": "torch.nn.utils.prune.remove(module, name)",
    "weight_v": "torch.nn.utils.remove_weight_norm(module)",
    "_orig_mod.": "compile modules in place (module.compile())",
}


def _advice(names: Iterable[str]) -> str:
    """How weights under other names, such as those that a weight is computed from, become plain."""
    found = next((mark for mark in MADE_PLAIN if any(mark in name for name in names)), None)
    return "" if found is None else f"; make the weights plain first: {MADE_PLAIN[found]}"


def weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights by name; a head that is the embedding is left out."""
    named = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    if model.lm_head.weight is model.embed_tokens.weight:
        del named["lm_head.weight"]
    return named


def as_they_lie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, but for each matrix whose columns lie together its transpose under a name that says so: what a
    product rounds to depends on it."""
    turned = {
        name: each.ndim > 1 and not each.is_contiguous() and each.mT.is_contiguous() for name, each in tensors.items()
    }
    return {
        name + TRANSPOSED if turned[name] else name: each.mT if turned[name] else each for name, each in tensors.items()
    }


def write_weights(file: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """A safetensors file whose tensors lie at multiples of 64 bytes, as they do in torch's memory, but for the small
    ones of other sizes, which come last: the last bits of a product can depend on where its factors lie."""
    tensors = dict(sorted(tensors.items(), key=lambda each: each[1].nbytes % ALIGNMENT > 0))
    entries: dict[str, Any] = {"__metadata__": header}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in one piece each, none at another's place, as a safetensors file holds them."""
    places: set[int] = set()
    held = {}
    for name, tensor in tensors.items():
        held[name] = tensor.clone() if tensor.data_ptr() in places else tensor.contiguous()
        places.add(tensor.data_ptr())
    return held


def write_tokenizer(model: Transformer, folder: Path) -> None:
    """The tokenizer's files into `folder`, where the model has one. One that was not read yet is copied: that needs no
    transformers, nor that it can be loaded."""
    source = model.tokenizer_source
    if source is None:
        return
    if not isinstance(source, (str, Path)) or (isinstance(source, str) and not Path(source).is_dir()):  # a Hub id
        model.tokenizer.save_pretrained(str(folder))
        return
    if not (files := _tokenizer_files(Path(source))):
        raise FileNotFoundError(f"{source} holds no tokenizer (any more): set model.tokenizer, to None for none")
    for file in files:
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _tokenizer_files(folder: Path) -> list[Path]:
    """All that is in a folder of a tokenizer's own; of a checkpoint's folder, what a tokenizer reads."""
    patterns = ["**/*"] if TOKENIZER_FOLDER.fullmatch(folder.name) else TOKENIZER_FILES
    return [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]
