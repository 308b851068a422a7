"""`verify` of whatever has weights, and `diff`: each number against one computed here, from transformers' run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import converters
from converters import cli
from converters.fill import same
from converters.tiny import make_tokenizer
from converters.verification.report import largest_difference
from tests.tiny import BASES, NAMED, VOCAB, Folders, Recipe, edit_config, load_reference, prompt, released
from transformer_std import HookedTransformer


def edit_tensors(folder: Path, edits: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Writes the tensors anew, those named through their functions."""
    tensors = load_file(folder / "model.safetensors")
    for name, edit in edits.items():
        tensors[name] = edit(tensors[name].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return edit


def strictly(text: str) -> Any:
    """JSON as the standard has it, without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def run(*arguments: object) -> tuple[int, str]:
    with cli.console.capture() as output:
        done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return done.exit_code, output.get() + done.output


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of the token ids of `prompt()`."""
    (tmp_path / "rows.json").write_text(json.dumps(prompt().tolist()))
    return tmp_path / "rows.json"


# -- verify ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_our_own_format_is_verified(base: Recipe, dtype: str | None, checkpoints: Folders, tmp_path: Path) -> None:
    HookedTransformer.from_pretrained(checkpoints(base)).save_pretrained(tmp_path)
    report = converters.verify(tmp_path, layers=True, dtype=dtype)
    assert report.bit_equal, report
    assert report.dtype == (dtype or "float32")
    assert all(each.values > 40 for each in report.comparisons)


def test_what_our_own_format_says_otherwise_is_found(checkpoints: Folders, tmp_path: Path) -> None:
    """The folder's own config and tensors are compared, not those of the release it came from."""
    folder = checkpoints(BASES[0])
    model = HookedTransformer.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "transformer_std.json").read_text())
    for layer in config["layers"]:
        layer["attention"]["rotary"]["theta"] = 5000.0
    header = {"format": "pt", "transformer_std": json.dumps(config)}
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", header)
    report = converters.verify(tmp_path)
    assert not report.bit_equal
    assert report.unlike_tensors == ()
    assert report.comparisons[0].first_departure.name == "layers.0.self_attn.attention_queries"
    HookedTransformer(dataclasses.replace(model.config, origin=None)).save_pretrained(tmp_path / "new")
    with pytest.raises(converters.ConfigError, match="no release to write it as"):
        converters.verify(tmp_path / "new")


@pytest.mark.parametrize("name", ["phi-tied", "qwen2_moe-base"])
def test_a_model_in_memory_is_verified(name: str, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    report = converters.verify(model, layers=True)
    assert report.bit_equal, report
    assert report.summary == "verify a model in memory float32 sdpa: bit-equal"
    assert converters.verify(model.bfloat16()).dtype == "bfloat16"


def test_a_nan_is_equal_to_a_nan(family: Recipe, own_copy: Folders, tmp_path: Path) -> None:
    folder = own_copy(family)
    norm, embedding = (released(family, name) for name in ("norm.weight", "embed_tokens.weight"))
    edit_tensors(folder, {norm: set_first(torch.nan), embedding: set_first(-torch.inf)})
    file = tmp_path / "report.json"
    status, output = run("verify", folder, "--layers", "--json", file)
    assert status == 0, output
    found = strictly(file.read_text())
    assert found["bit_equal"]
    assert found["unlike_tensors"] == []
    assert all(each["max_difference"] == 0 for each in found["comparisons"])


def test_a_nan_on_one_side_is_found(
    own_copy: Folders, rows: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = own_copy(BASES[0])
    turn = "transformer_std.components.rotary.turn"
    monkeypatch.setattr(turn, lambda x, *rest: torch.full_like(x, torch.nan))
    file = tmp_path / "report.json"
    status, output = run("verify", folder, "--tokens", rows, "--json", file)
    assert status == 1, output
    (found,) = strictly(file.read_text())["comparisons"]
    assert found["first_departure"] == {"name": "layers.0.self_attn.attention_queries", "max_difference": None}


def test_the_largest_difference_knows_nan_and_infinity() -> None:
    nan, inf = torch.nan, torch.inf
    for ours, theirs, expected in [
        ([nan, 1, inf, -inf], [nan, 1, inf, -inf], 0),
        ([nan, 1, inf], [nan, 3, inf], 2),
        ([nan, 1], [0, 1], inf),
        ([inf], [-inf], inf),
        ([inf], [1], inf),
    ]:
        pair = torch.tensor(ours, dtype=torch.float16), torch.tensor(theirs, dtype=torch.float16)
        assert largest_difference(*pair) == largest_difference(*reversed(pair)) == expected
        assert same(*pair) == (expected == 0)


NO_ROWS = [
    "1", "1.5", "[1.5]", "[true]", "[1, true]", "{}", '{"a": 1}', "[[1], [2, 3]]", "[[1], 2]", "[1, [2]]", "[]", "[[]]",
    '["a"]', "[null]", "[-1]", "[1e3]", "[99999999999999999999]", "null", "x", "[" * 100_000 + "]" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", NO_ROWS, ids=lambda text: text[:20])
def test_what_is_no_rows_of_token_ids(text: str, checkpoints: Folders, rows: Path) -> None:
    rows.write_text(text)
    for compare in (converters.verify, lambda folder, **options: converters.diff(folder, folder, **options)):
        with pytest.raises(
            converters.CheckpointError, match=r"rows.json (is no JSON list of token ids|is not|is nested)"
        ):
            compare(checkpoints(BASES[0]), token_files=[rows])


# -- diff --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_same_in_another_format_is_equal_in_every_bit(
    base: Recipe, attn: str, checkpoints: Folders, tmp_path: Path
) -> None:
    """Though its tensors lie elsewhere in the file, on which a product's last bits can depend."""
    folder = checkpoints(base)
    HookedTransformer.from_pretrained(folder).save_pretrained(tmp_path)
    found = converters.diff(folder, tmp_path, attn_implementation=attn)
    assert found.bit_equal, found
    assert found.settings == {}
    model = HookedTransformer.from_pretrained(folder)
    assert found.compared[0] == len(list(model.named_parameters(remove_duplicate=False)))
    assert found.compared[1] > 40
    again = converters.diff(load_reference(folder), model, attn_implementation=attn)
    assert again.bit_equal, again


@torch.no_grad()
def test_what_differs_and_by_how_much(base: Recipe, own_copy: Folders, checkpoints: Folders, rows: Path) -> None:
    a, b = checkpoints(base), own_copy(base)
    norm = released(base, "layers.1.attention_norm.weight")
    edit_tensors(b, {norm: lambda weight: weight + 0.5})
    found = converters.diff(a, b, token_files=[rows])
    (parameter,) = found.parameters
    before = load_file(a / "model.safetensors")[norm]
    largest = float(((before + 0.5).double() - before.double()).abs().max())
    assert dataclasses.astuple(parameter) == (
        "layers.1.attention_norm.weight", "attention_norm.weight", 1, largest, largest / float(before.abs().max()), 1.0
    )  # fmt: skip
    assert (found.uncompared, found.settings) == ({}, {})
    theirs = [load_reference(folder, attn="sdpa") for folder in (a, b)]
    outputs = [model(prompt(), output_hidden_states=True) for model in theirs]
    one, other = (each.logits.double() for each in outputs)
    (reading,) = found.readings
    assert not reading.bit_equal
    assert reading.max_difference == float((one - other).abs().max())
    assert reading.top1_agreement == pytest.approx(float((one.argmax(-1) == other.argmax(-1)).double().mean()))
    p, q = F.softmax(one, -1), F.softmax(other, -1)
    divergence = (p * (p / q).log()).sum(-1)
    # Both in float64, summed in another order.
    assert reading.mean_kl == pytest.approx(float(divergence.mean()), rel=1e-9)
    assert reading.max_kl == pytest.approx(float(divergence.max()), rel=1e-9)
    changes = {change.name: change for change in found.values}
    for layer in range(1, len(outputs[0].hidden_states) - 1):
        one, other = (each.hidden_states[layer].double() for each in outputs)
        change = changes.get(f"layers.{layer}.layer_input")
        if layer == 1:
            assert change is None
            assert torch.equal(one, other)
        else:
            difference = (one - other).abs()
            assert change is not None
            assert change.max_difference == float(difference.max())
            assert change.relative == change.max_difference / float(one.abs().max())
            assert change.changed == pytest.approx(float((difference > 0).double().mean()))
    assert min(change.layer for change in found.values if change.layer is not None) == 1
    if "layers.1.mlp.expert_indices" in changes:
        assert changes["layers.1.mlp.expert_indices"].max_difference is None


def test_two_families_are_compared_where_both_have_the_value(checkpoints: Folders, rows: Path) -> None:
    a, b = checkpoints(NAMED["phi3-base"]), checkpoints(NAMED["phi-base"])
    found = converters.diff(a, b, token_files=[rows])
    assert found.settings["family"] == ("phi3", "phi")
    assert found.settings["layers.{i}.kind"] == ("sequential", "parallel")
    assert found.uncompared["layers.0.layer_mid"] == "only in A"
    assert found.uncompared["layers.0.self_attn.o.bias"] == "only in B"
    assert found.uncompared["layers.0.self_attn.attention_keys"] == "[2, 2, 13, 16] in A, [2, 6, 13, 16] in B"
    assert {change.name for change in found.values} >= {"layers.0.layer_input", "layers.2.layer_output", "logits"}
    one, other = (load_reference(folder, attn="sdpa")(prompt()).logits.detach().double() for folder in (a, b))
    assert found.readings[0].max_difference == float((one - other).abs().max())
    assert not found.bit_equal


@torch.no_grad()
def test_two_vocabularies_and_two_depths(own_copy: Folders, checkpoints: Folders, rows: Path, tmp_path: Path) -> None:
    a = checkpoints(BASES[0])
    theirs = load_reference(a)
    theirs.resize_token_embeddings(VOCAB + 9)
    theirs.config.num_hidden_layers = 2
    del theirs.model.layers[2]
    theirs.save_pretrained(tmp_path / "b")
    for options in ({"token_files": [rows]}, {}):
        found = converters.diff(a, tmp_path / "b", **options)
        assert found.settings["vocab_size"] == (VOCAB, VOCAB + 9)
        assert found.settings["num_layers"] == (3, 2)
        assert found.uncompared["layers.2.mlp.mlp_output"] == "only in A"
        assert found.uncompared["lm_head.bias"] == "[131] in A, [140] in B"
        assert found.uncompared["logits"].endswith("131] in A, [2, 13, 140] in B" if options else "140] in B")
        assert [change.name for change in found.values] == ["final_norm_output"]  # of another block
        assert all(each.mean_kl is None and not each.bit_equal for each in found.readings)
    rows.write_text(json.dumps([VOCAB + 3]))
    with pytest.raises(converters.CheckpointError, match=r"rows.json has token 134, and one vocabulary is of 131"):
        converters.diff(a, tmp_path / "b", token_files=[rows])


def test_texts_are_for_two_that_read_them_the_same(own_copy: Folders, tmp_path: Path) -> None:
    a, b = own_copy(BASES[0]), own_copy(NAMED["phi-tied"])
    text = "the cat sat on the mat"
    assert converters.diff(a, a).readings[0].prompt == "random tokens [2, 64]"
    with pytest.raises(converters.CheckpointError, match=r"the two do not read 'the cat .*' as the same tokens: give"):
        converters.diff(a, b, prompts=[text])
    make_tokenizer(a, eos_token="<eos>")
    make_tokenizer(b, eos_token="<eos>")
    assert converters.diff(a, b, prompts=[text]).readings[0].tokens == 6
    assert converters.diff(a, b).readings[0].prompt == "The Eiffel Tower is in the city of"
    make_tokenizer(b, eos_token="<eos>", bos_token="<bos>")
    with pytest.raises(converters.CheckpointError, match="do not read"):
        converters.diff(a, b, prompts=[text])


def test_a_dtype_for_both_or_each_its_own(own_copy: Folders, checkpoints: Folders) -> None:
    a, b = checkpoints(BASES[0]), own_copy(BASES[0])
    edit_config(b, dtype="bfloat16")
    found = converters.diff(a, b)
    assert found.dtypes == ("float32", "bfloat16")
    assert found.settings == {"dtype": ("float32", "bfloat16")}
    assert len(found.parameters) == found.compared[0]
    exact = load_file(a / "model.safetensors")["lm_head.bias"].double()
    (head,) = [change for change in found.parameters if change.name == "lm_head.bias"]
    assert head.max_difference == float((exact - exact.bfloat16().double()).abs().max())
    assert converters.diff(a, b, dtype="float16").bit_equal


def test_a_model_in_memory_stays_as_it_was(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    kept = dict(model.named_parameters())
    model.layers[1].mlp.down.bias.data += 1
    found = converters.diff(checkpoints(BASES[0]), model)
    assert [change.name for change in found.parameters] == ["layers.1.mlp.down.bias"]
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())


def test_diff_on_the_command_line(own_copy: Folders, checkpoints: Folders, rows: Path, tmp_path: Path) -> None:
    a, b = checkpoints(NAMED["qwen2_moe-base"]), own_copy(NAMED["qwen2_moe-base"])
    status, output = run("diff", a, b, "--tokens", rows)
    assert status == 0, output
    assert output.rstrip().endswith("sdpa: bit-equal")
    edit_tensors(b, {"model.layers.1.mlp.gate.weight": set_first(torch.nan)})
    for options in ([], ["--layers"]):
        status, output = run("diff", a, b, "--tokens", rows, "--json", tmp_path / "report.json", *options)
        assert status == 1, output
        assert "mlp.router.weight" in output
        assert "router_logits" in output
        found = strictly((tmp_path / "report.json").read_text())
        assert found["summary"] in output
        assert found == converters.diff(a, b, token_files=[rows]).to_dict()
        assert found["parameters"][0]["max_difference"] is None
    status, output = run("diff", a, checkpoints(NAMED["phi-base"]), "--tokens", rows)
    assert status == 1, output
    assert "not compared: layers.i.mlp.router.weight" in output
    assert run("diff", a, tmp_path / "nothing")[0] == 2
    assert run("diff", a, b, "--json", tmp_path / "nowhere/report.json")[0] == 2


def test_a_mixture_in_float64_cannot_be_compared(checkpoints: Folders) -> None:
    mixture = next(recipe for recipe in BASES if recipe.family == "qwen2_moe")
    with pytest.raises(converters.CheckpointError, match="experts have no float64: verify a mixture in float32"):
        converters.verify(checkpoints(mixture), dtype="float64")
    assert converters.verify(checkpoints(BASES[0]), dtype="float64").bit_equal
