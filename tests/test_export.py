"""Back to a release: what `export` writes is what transformers would have, and what it must not touch is left."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import converters
from converters import cli
from converters.tiny import make_tokenizer
from converters.verification.reference import attention_there_is
from tests.tiny import (
    AROUND,
    BASES,
    NAMED,
    Folders,
    Recipe,
    as_released,
    edit_config,
    load_reference,
    prompt,
)
from transformer_std import HookedTransformer


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def equal_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_round_trip(structure: Recipe, dtype: torch.dtype, checkpoints: Folders, tmp_path: Path) -> None:
    """The file that transformers itself saves, to the bit, and a model of transformers' with our logits."""
    model = HookedTransformer.from_pretrained(checkpoints(structure), dtype=dtype)
    converters.export(model, tmp_path / "ours")
    reference = load_reference(checkpoints(structure), dtype, attn="sdpa")
    reference.save_pretrained(tmp_path / "theirs")
    equal_tensors(load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors"))
    assert config_of(tmp_path / "ours")["dtype"] == str(dtype)[6:]
    exported, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        attn_implementation=attention_there_is(model.config, "sdpa"),
        output_loading_info=True,
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    equal_tensors(exported.state_dict(), reference.state_dict())
    again = HookedTransformer.from_pretrained(tmp_path / "ours")
    assert again.config == model.config.__class__.from_dict({**model.config.to_dict(), "dtype": str(dtype)[6:]})
    equal_tensors(again.state_dict(), model.state_dict())
    # The same file gives the same bits; the two files' tensors lie at other addresses, so compare on one.
    assert torch.equal(again(prompt()), exported(prompt()).logits)


def test_the_release_keeps_its_spelling(family: Recipe, own_copy: Folders, tmp_path: Path) -> None:
    folder = own_copy(family)
    as_released(folder)
    released = {**config_of(folder), "auto_map": {"AutoConfig": "configuration_x.X"}}
    (folder / "config.json").write_text(json.dumps(released))
    converters.export(HookedTransformer.from_pretrained(folder, dtype=torch.bfloat16), tmp_path / "out")
    assert config_of(tmp_path / "out") == {
        **{key: value for key, value in released.items() if key != "auto_map"},
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": released["tie_word_embeddings"],
    }


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["su", "yarn"])
@torch.no_grad()
def test_the_first_names_of_longrope_become_the_one_that_transformers_reads(
    kind: str, key: str, own_copy: Folders, tmp_path: Path
) -> None:
    folder = own_copy(NAMED["phi3-longrope"])
    expected = load_reference(folder, attn="sdpa")
    as_released(folder)
    rope = config_of(folder)["rope_scaling"]
    edit_config(folder, rope_scaling={**{name: rope[name] for name in rope if name != "type"}, key: kind})
    converters.export(HookedTransformer.from_pretrained(folder), tmp_path / "out")
    theirs = load_reference(tmp_path / "out", attn="sdpa")
    for length in AROUND:
        assert torch.equal(theirs(prompt(length)).logits, expected(prompt(length)).logits)
        assert torch.equal(HookedTransformer.from_pretrained(folder)(prompt(length)), expected(prompt(length)).logits)


@torch.no_grad()
def test_by_way_of_our_format_and_of_a_live_model(family: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    theirs = load_reference(checkpoints(family), attn="sdpa")
    HookedTransformer.from_pretrained(checkpoints(family)).save_pretrained(tmp_path / "own")
    for name, source in (("from_own", tmp_path / "own"), ("from_live", theirs)):
        converters.export(HookedTransformer.from_pretrained(source), tmp_path / name)
        equal_tensors(
            load_file(tmp_path / name / "model.safetensors"), load_file(checkpoints(family) / "model.safetensors")
        )
        equal_tensors(load_reference(tmp_path / name).state_dict(), theirs.state_dict())


def test_shards(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    """No shard is over the limit, though the experts of a block are views of one tensor."""
    model = HookedTransformer.from_pretrained(checkpoints(base))
    converters.export(model, tmp_path / "out", max_shard_size=100_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    whole = load_file(checkpoints(base) / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 5
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 100_000
    equal_tensors(load_reference(tmp_path / "out").state_dict(), load_reference(checkpoints(base)).state_dict())
    equal_tensors(HookedTransformer.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["phi-tied", "phi3-tied", "qwen2_moe-dense_first"])
@torch.no_grad()
def test_a_head_of_its_own(name: str, checkpoints: Folders, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED[name]))
    converters.export(model, tmp_path / "tied")
    assert config_of(tmp_path / "tied")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    model.lm_head.weight = torch.nn.Parameter(model.embed_tokens.weight + 1)
    converters.export(model, tmp_path / "untied")
    assert config_of(tmp_path / "untied")["tie_word_embeddings"] is False
    theirs = load_reference(tmp_path / "untied", attn="sdpa")
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight)
    again = HookedTransformer.from_pretrained(tmp_path / "untied")
    assert torch.equal(theirs(prompt()).logits, again(prompt()))


@torch.no_grad()
def test_what_was_edited_is_written(checkpoints: Folders, tmp_path: Path) -> None:
    model = copy.deepcopy(HookedTransformer.from_pretrained(checkpoints(NAMED["phimoe-base"])))
    model.layers[1].mlp.experts.gate_up[3] *= 2
    converters.export(model, tmp_path / "out")
    before, after = (load_file(f / "model.safetensors") for f in (checkpoints(NAMED["phimoe-base"]), tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.1.block_sparse_moe.experts.3.{w}.weight" for w in ("w1", "w3")}


def test_the_tokenizer_goes_along(own_copy: Folders, tmp_path: Path) -> None:
    folder = own_copy(BASES[0])
    make_tokenizer(folder, eos_token="<eos>")
    converters.export(HookedTransformer.from_pretrained(folder), tmp_path / "out")
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the cat sat").input_ids
    assert tokens == transformers.AutoTokenizer.from_pretrained(folder)("the cat sat").input_ids
    assert "<unk>" not in transformers.AutoTokenizer.from_pretrained(tmp_path / "out").decode(tokens)


# -- refusals ----------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_left_alone(checkpoints: Folders, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="used is not empty: export to a new folder"):
        converters.export(model, tmp_path / "used")
    with pytest.raises(FileExistsError, match=r"notes.txt is not empty"):
        converters.export(model, tmp_path / "used/notes.txt")
    assert [path.name for path in tmp_path.rglob("*")] == ["used", "notes.txt"]
    (tmp_path / "empty").mkdir()
    converters.export(model, tmp_path / "empty")
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == files


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupt_leaves_nothing(
    stop: type[BaseException], checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half")
        raise stop("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", save)
        with pytest.raises(stop):
            converters.export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", save)
        with pytest.raises(stop):
            converters.export(model, tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_model_without_a_release(checkpoints: Folders, tmp_path: Path) -> None:
    config = converters.read_config(checkpoints(BASES[0]))
    values = {**config.to_dict(), "origin": None}
    with pytest.raises(converters.ConfigError, match="made from a config of ours alone"):
        converters.export(HookedTransformer(type(config).from_dict(values)), tmp_path / "out")
    converters.export(HookedTransformer(config), tmp_path / "out")  # fresh weights of a release's config are fine
    load_reference(tmp_path / "out")


def test_a_model_that_outgrew_its_config(checkpoints: Folders, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    layers = model.layers
    model.layers = layers[:2]
    with pytest.raises(converters.ConfigError, match=r"layers.2.attention_norm.weight is missing, the config makes"):
        converters.export(model, tmp_path / "out")
    model.layers = layers
    model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(140, 96))
    with pytest.raises(converters.ConfigError, match=r"embed_tokens.weight is \[140, 96\], the config makes it \[131"):
        converters.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- commands ----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    with cli.console.capture() as output:
        done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return done.exit_code, output.get() + done.output


def test_convert_then_export(base: Recipe, own_copy: Folders, tmp_path: Path) -> None:
    folder, own, back = own_copy(base), tmp_path / "own", tmp_path / "back"
    make_tokenizer(folder, eos_token="<eos>")
    assert run("convert", folder, own) == (0, f"converted {folder} to {own}\n")
    assert (own / "transformer_std.json").exists()
    assert not (own / "config.json").exists()
    whole = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    assert run("export", own, back) == (0, f"exported {own} to {back}\n")
    equal_tensors(load_file(back / "model.safetensors"), whole)
    assert (back / "tokenizer.json").exists()
    status, output = run("verify", back)
    assert status == 0, output


def test_commands_change_the_dtype_and_refuse(checkpoints: Folders, tmp_path: Path) -> None:
    folder = checkpoints(BASES[0])
    for command in ("convert", "export"):
        out = tmp_path / command
        assert run(command, folder, out, "--dtype", "bfloat16")[0] == 0
        assert HookedTransformer.from_pretrained(out).embed_tokens.weight.dtype == torch.bfloat16
    status, output = run("export", folder, tmp_path / "export")
    assert (status, "is not empty" in output, "Traceback" in output) == (2, True, False)
    status, output = run("convert", folder, tmp_path / "export")
    assert (status, "is not empty: name a new folder" in output) == (2, True)
