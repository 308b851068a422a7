"""From files to a model: spellings of the config, the exact account of tensors, and every bad file.

What people save is in test_custom.py, the Hub and single files in test_sources.py, the released configs in
test_released.py."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import converters
from converters.checkpoint import Checkpoint, LiveTensors
from converters.fill import fill
from converters.hf_config import MOST
from converters.rules import Beyond
from tests.tiny import (
    BASES,
    BOUNDARY,
    NAMED,
    STRUCTURES,
    Folders,
    Recipe,
    as_released,
    edit_config,
    family_of,
    hf_config,
    load_reference,
    prompt,
    refused,
    released,
    spelled,
    tensors_of,
    write_tensors,
)
from transformer_std import HookedTransformer, TransformerConfig
from transformer_std.components.latent import LatentAttention
from transformer_std.weights import UnreadableWeight

# -- configs -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_released_spelling(structure: Recipe, own_copy: Folders) -> None:
    folder = own_copy(structure)
    current = converters.read_config(folder)
    expected = HookedTransformer.from_pretrained(folder)(prompt())
    as_released(folder)
    assert "dtype" not in json.loads((folder / "config.json").read_text())
    assert converters.read_config(folder) == current
    assert torch.equal(HookedTransformer.from_pretrained(folder)(prompt()), expected)
    assert torch.equal(load_reference(folder, attn="sdpa")(prompt()).logits, expected)


@torch.no_grad()
def test_su_is_longrope(own_copy: Folders) -> None:
    """Phi-3-medium-128k's spelling, which transformers cannot read: the same weights, against the spelling it can."""
    folder = own_copy(NAMED["phi3-longrope"])
    theirs = load_reference(folder, attn="sdpa")
    as_released(folder)
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, rope_scaling={**config["rope_scaling"], "type": "su"})
    with pytest.raises(KeyError, match="original_max_position_embeddings"):
        load_reference(folder)
    model = HookedTransformer.from_pretrained(folder)
    for length in (BOUNDARY - 1, BOUNDARY, BOUNDARY + 1):
        assert torch.equal(model(prompt(length)), theirs(prompt(length)).logits)


def test_a_config_of_defaults_is_transformers_defaults() -> None:
    for family in converters.families():
        hf = hf_config(Recipe(family, "x")).__class__()
        theirs = converters.read_config(hf.to_dict())
        rope = {"rope_parameters": hf.rope_parameters} if hasattr(hf, "rope_parameters") else {}
        ours = converters.read_config({"model_type": family, **rope})
        assert ours == theirs


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.0,
    "long_mscale": 1.0,
}
BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("phi", {"model_type": "phi9"}, "model_type is 'phi9' .*supported are"),
    ("phi3", {"model_type": "phi3small"}, "model_type is 'phi3small' .another architecture than phi3, in spite"),
    ("phi3", {"model_type": "phi4flash"}, "model_type is 'phi4flash'"),
    ("phi", {"model_type": "cli"}, "model_type is 'cli'"),
    ("phi", {"hidden_act": "xielu"}, "config.hidden_act is 'xielu'; phi implements"),
    ("phi", {"rope_parameters": {"rope_type": "wavy"}}, "rope type is 'wavy'"),
    ("phi", {"rope_parameters": {"rope_type": "default", "wobble": 2}}, "rope setting wobble"),
    ("phi", {"num_key_value_heads": 4}, "6 query heads do not divide among 4"),
    ("phi", {"hidden_size": 97}, "hidden_size 97 does not divide among 6 heads"),
    ("phi", {"num_hidden_layers": 0}, "config.num_hidden_layers is 0; phi needs a whole number of at least 1"),
    ("phi", {"hidden_size": "96"}, "config.hidden_size is '96'"),
    ("phi", {"logit_softcap": 30.0}, "phi does not know the config key logit_softcap = 30.0"),
    ("phi3", {"attention_bias": True}, "config.attention_bias is True; phi3 implements False"),
    ("phi3", {"dtype": "float7"}, "config.dtype is 'float7'"),
    ("phi3", {"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    ("phi3", {"tie_word_embeddings": "yes"}, "config.tie_word_embeddings is 'yes'"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "needs 8 numbers"),
    ("phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.32}}, "turns 5 of 16"),
    ("qwen2_moe", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "qwen2_moe turns whole heads"),
    ("qwen2_moe", {"mlp_only_layers": ["0"]}, "needs a list of layer numbers"),
    ("qwen2_moe", {"num_experts_per_tok": 8}, "8 experts a token of 7"),
    ("afmoe", {"partial_rotary_factor": 0.5}, "afmoe turns whole heads"),
    ("afmoe", {"layer_types": ["full_attention"]}, "for each of its 4 layers"),
    ("afmoe", {"score_func": "softmax"}, "afmoe implements 'sigmoid'"),
    ("afmoe", {"n_group": 2}, "config.n_group is 2"),
    ("phimoe", {"rope_parameters": {**LONGROPE, "short_mscale": None}}, "short_mscale is None; phimoe needs"),
    ("phimoe", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": "8"}}, "needs a whole number"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("family", "changes", "message"), BAD_CONFIGS, ids=[str(c[1])[:40] for c in BAD_CONFIGS])
def test_bad_configs(family: str, changes: dict[str, Any], message: str, own_copy: Folders) -> None:
    folder = own_copy(NAMED[f"{family}-base"])
    edit_config(folder, **changes)
    for enter in (converters.read_config, HookedTransformer.from_pretrained):
        with pytest.raises(converters.ConfigError, match=message):
            enter(folder)


HARMLESS = {
    "attention_bias": False,
    "attn_implementation": "eager",
    "classifier_dropout": 0.1,
    "gradient_checkpointing": False,
    "is_causal": True,
    "keys_to_ignore_at_inference": ["past_key_values"],
    "loss_type": "ForCausalLMLoss",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "quantization_config": None,
    "use_sliding_window": False,
    "wobble": None,
}


@torch.no_grad()
def test_keys_that_change_nothing_do_not_stop_a_load(family: Recipe, own_copy: Folders) -> None:
    folder = own_copy(family)
    expected = HookedTransformer.from_pretrained(folder)(prompt())
    own = {**family_of(family).DEFAULTS, **family_of(family).TINY}
    more = {key: value for key, value in HARMLESS.items() if not own.get(key)}  # some are on there
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    assert torch.equal(HookedTransformer.from_pretrained(folder)(prompt()), expected)
    assert torch.equal(load_reference(folder, attn="sdpa")(prompt()).logits, expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [("mlp_bias", True), ("attention_bias", True), ("use_sliding_window", True), ("is_causal", False)],
)
def test_a_switch_that_would_change_something_is_named(key: str, value: bool, own_copy: Folders) -> None:
    folder = own_copy(NAMED["phi-base"])
    edit_config(folder, **{key: value})
    with pytest.raises(converters.ConfigError, match=f"phi does not know the config key {key} = {value}"):
        HookedTransformer.from_pretrained(folder)


# Given the folders of tiny checkpoints: in 500 MB more than it has, and each within a second, refuses every size.
LIES = """
import json, resource, sys, time
from pathlib import Path
import converters
from transformer_std import HookedTransformer

folders = [Path(folder) for folder in sys.argv[1:]]
for folder in folders:
    HookedTransformer.from_pretrained(folder)
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 500_000_000,) * 2)
sizes = [
    "num_hidden_layers", "n_layer", "vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head",
    "num_key_value_heads", "intermediate_size", "n_inner", "num_local_experts", "num_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size", "num_shared_experts",
]
for folder in folders:
    text = (folder / "config.json").read_text()
    config = json.loads(text)
    for key in [key for key in sizes if key in config]:
        for lie in (9_000, 10**5, 10**7, 10**9, 10**12, 2**63, 2**70):
            if key == "num_attention_heads" and "num_key_value_heads" in config:  # else the width does not divide
                config["head_dim"], config["num_key_value_heads"] = 16, None
            (folder / "config.json").write_text(json.dumps({**config, key: lie}))
            start = time.perf_counter()
            try:
                HookedTransformer.from_pretrained(folder)
                print("loaded", key, lie)
            except (converters.ConfigError, converters.CheckpointError) as error:
                if len(str(error)) > 5000:
                    print("says too much", key, lie)
            if time.perf_counter() - start > 1:
                print("slow", key, lie)
            if lie >= 10**12 or (key == "num_hidden_layers" and lie >= 10**5):
                try:
                    converters.read_config(folder)
                    print("read", key, lie)
                except converters.ConfigError as error:
                    assert key in str(error), error
    (folder / "config.json").write_text(text)
print("done")
"""


def test_a_config_that_lies_about_sizes_is_refused_at_once(own_copy: Folders) -> None:
    folders = [str(own_copy(base)) for base in BASES]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", LIES, *folders], env=environment, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stdout + done.stderr


def test_a_matrix_that_no_machine_holds(own_copy: Folders) -> None:
    """Each size may be, the two together not: torch would say so in its own words."""
    folder = own_copy(NAMED["phi-base"])
    edit_config(folder, hidden_size=2**30, num_attention_heads=2**26, num_key_value_heads=2**26)
    for enter in (converters.read_config, HookedTransformer.from_pretrained):
        with pytest.raises(
            converters.ConfigError, match=r"the config makes a matrix of .* weights; one has .* at most"
        ):
            enter(folder)


def test_our_own_config_that_lies_is_refused(
    checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOST, "num_hidden_layers", 100)  # ten thousand take seconds to read
    HookedTransformer.from_pretrained(checkpoints(NAMED["qwen2_moe-base"])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "transformer_std.json").read_text())
    mixture = config["layers"][0]["mlp"]
    lies = [
        ({"vocab_size": 2**63}, "the config's vocab_size is 9223372036854775808"),
        ({"hidden_size": True}, "the config's hidden_size is True"),
        ({"layers": config["layers"][:1] * 4}, "the config has 4 blocks, the tensors are of 3"),
        ({"layers": config["layers"][:1] * 101}, "the config has 101 blocks; 100 are taken at most"),
        ({"layers": [{**config["layers"][0], "mlp": {**mixture, "num_experts": 10**12}}]}, "num_experts is 10000000"),
        ({"dtype": "float7"}, "config.dtype is 'float7'"),
    ]
    for lie, message in lies:
        header = {"format": "pt", "transformer_std": json.dumps({**config, **lie})}
        save_file(tensors_of(tmp_path), tmp_path / "model.safetensors", header)
        with pytest.raises((converters.ConfigError, converters.CheckpointError), match=message):
            HookedTransformer.from_pretrained(tmp_path)


DEEP = ["[" * 100_000 + "]" * 100_000, '{"a":' * 900 + "1" + "}" * 900]


@pytest.mark.parametrize("deep", DEEP, ids=["by 100000", "by 900"])
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "adapter_config.json", "transformer_std.json"]
)
def test_a_config_that_is_nested_too_deep(file: str, deep: str, own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    (folder / file).write_text(deep)
    with pytest.raises(converters.ConfigError, match=f"{file} is nested (too deep|deeper than 100 levels)"):
        HookedTransformer.from_pretrained(folder)


def test_an_index_that_is_nested_too_deep(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    in_shards(folder)
    (folder / "model.safetensors.index.json").write_text(DEEP[0])
    refused(folder, "index.json is nested too deep")
    config = json.loads((folder / "config.json").read_text())
    for _ in range(200):
        config = {**config, "task_specific_params": config}
    with pytest.raises(converters.ConfigError, match="nested deeper than 100 levels"):
        converters.read_config(config)


NO_TOKENS = ["x", [None], [[1]], 1e30, 1.5, 10**23, 131, True, {}, []]


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_special_tokens_are_tokens(file: str, key: str, own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    path = folder / f"{file}.json"
    values = json.loads(path.read_text())
    for wrong in NO_TOKENS if key == "eos_token_id" else [*NO_TOKENS, [1]]:
        path.write_text(json.dumps({**values, key: wrong}))
        for enter in (converters.read_config, HookedTransformer.from_pretrained):
            with pytest.raises(converters.ConfigError, match=f"config.{key} is {re.escape(repr(wrong))}"):
                enter(folder)
    for right in (None, 0, 130, *([[1, 2]] if key == "eos_token_id" else [-1] if key == "pad_token_id" else [])):
        path.write_text(json.dumps({**values, key: right}))
        origin = HookedTransformer.from_pretrained(folder).config.origin
        assert {"config": origin.config, "generation_config": origin.generation}[file][key] == right


@pytest.mark.quick
def test_no_config(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    (folder / "config.json").write_text("{")
    with pytest.raises(converters.ConfigError, match=r"config.json is not JSON"):
        converters.read_config(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(converters.ConfigError, match="holds list"):
        converters.read_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(converters.CheckpointError, match=r"has no config.json"):
        HookedTransformer.from_pretrained(folder)


# -- the account of tensors --------------------------------------------------------------------------------------


def empty(folder: Path) -> HookedTransformer:
    with torch.device("meta"):
        return HookedTransformer(converters.read_config(folder))


def refused_tensors(model: HookedTransformer, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(converters.CheckpointError, match=message):
        fill(model, LiveTensors(tensors), converters.family_of(model.config).WEIGHTS, None)


def test_every_tensor_is_needed(structure: Recipe, checkpoints: Folders) -> None:
    model, whole = empty(checkpoints(structure)), tensors_of(checkpoints(structure))
    for name in whole:
        rest = {each: tensor for each, tensor in whole.items() if each != name}
        refused_tensors(model, rest, rf"(?m)missing: {re.escape(name)}$")


def test_every_tensor_must_have_its_shape(structure: Recipe, checkpoints: Folders) -> None:
    model, whole = empty(checkpoints(structure)), tensors_of(checkpoints(structure))
    for name, tensor in whole.items():
        for wrong in (tensor[:-1], tensor.mT) if tensor.ndim == 2 else (tensor[:-1], tensor[None]):
            if wrong.shape != tensor.shape:
                message = rf"misshapen: {re.escape(name)} is \[.*\], the config makes it \["
                refused_tensors(model, {**whole, name: wrong}, message)


def test_nothing_may_be_left_over(family: Recipe, own_copy: Folders) -> None:
    folder = own_copy(family)
    whole = tensors_of(folder)
    more = released(family, "layers.0.self_attn.o.weight").replace(".0.", ".9.")
    passed_over = any(isinstance(rule, Beyond) for rule in family_of(family).WEIGHTS)
    for extra in ("model.layers.0.self_attn.q_proj.lora_A.weight", "x", *([] if passed_over else [more])):
        write_tensors(folder, {**whole, extra: torch.ones(2)})
        refused(folder, rf"left over: {re.escape(extra)} \[2\] in .*model.safetensors")


@pytest.mark.quick
def test_one_error_lists_all(family: Recipe, own_copy: Folders) -> None:
    folder = own_copy(family)
    whole = tensors_of(folder)
    output, embedding = (released(family, name) for name in ("layers.0.self_attn.o.weight", "embed_tokens.weight"))
    whole["extra"] = whole.pop(output)
    whole[embedding] = whole[embedding].int()
    write_tensors(folder, whole)
    with pytest.raises(converters.CheckpointError) as caught:
        HookedTransformer.from_pretrained(folder)
    for line in (f"missing: {output}", "left over: extra", f"not a weight: {embedding} is I32"):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")],
    ids=str,
)
def test_what_is_no_weight_is_named_as_what_it_is(dtype: torch.dtype, kind: str, own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    whole = tensors_of(folder)
    write_tensors(folder, {**whole, "lm_head.bias": whole["lm_head.bias"].to(dtype)})
    refused(folder, f"not a weight: lm_head.bias is {kind}; weights are F64, F32, F16, BF16, not quantised")
    write_tensors(folder, whole)
    theirs = load_reference(folder)
    theirs.lm_head.bias = torch.nn.Parameter(theirs.lm_head.bias.to(dtype), requires_grad=False)
    with pytest.raises(converters.CheckpointError, match=f"not a weight: lm_head.bias is {str(dtype)[6:]}"):
        HookedTransformer.from_pretrained(theirs)


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe", "afmoe"])
def test_an_expert_too_many(family: str, own_copy: Folders) -> None:
    folder = own_copy(NAMED[f"{family}-base"])
    whole = tensors_of(folder)
    name = next(name for name in whole if ".experts.0." in name)
    extra = name.replace(".experts.0.", ".experts.9.")
    write_tensors(folder, {**whole, extra: whole[name].clone()})
    refused(folder, f"left over: {re.escape(extra)}, an expert more than the config has")


def test_a_failed_fill_changes_nothing(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    whole = tensors_of(folder)
    del whole["lm_head.bias"]
    write_tensors(folder, whole)
    model = empty(folder)
    with pytest.raises(converters.CheckpointError, match=r"missing: lm_head\.bias"):
        fill(model, Checkpoint(folder), converters.family_of(model.config).WEIGHTS, None)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["phi-tied", "phi3-tied"])
@torch.no_grad()
def test_tied_heads(name: str, own_copy: Folders) -> None:
    folder = own_copy(NAMED[name])
    whole = tensors_of(folder)
    model = HookedTransformer.from_pretrained(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in whole
    write_tensors(folder, {**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()})
    assert torch.equal(HookedTransformer.from_pretrained(folder)(prompt()), model(prompt()))
    write_tensors(folder, {**whole, "lm_head.weight": whole["model.embed_tokens.weight"] + 1})
    refused(folder, "tie_word_embeddings, but lm_head.weight and model.embed_tokens.weight differ")


# -- files -------------------------------------------------------------------------------------------------------


def in_shards(folder: Path) -> None:
    whole = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(whole)}
    for file in set(files.values()):
        save_file({name: whole[name] for name in whole if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.quick
@torch.no_grad()
def test_shards(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    expected = HookedTransformer.from_pretrained(folder)(prompt())
    in_shards(folder)
    assert torch.equal(HookedTransformer.from_pretrained(folder)(prompt()), expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"lacks model-00002-of-00002.safetensors, which model.safetensors.index.json lists")


@torch.no_grad()
def test_a_single_file_wins_over_shards(own_copy: Folders) -> None:
    """As in transformers, which is asked."""
    folder = own_copy(BASES[0])
    whole = tensors_of(folder)
    in_shards(folder)
    index = folder / "model.safetensors.index.json"
    for listed in (index.read_text(), json.dumps({"weight_map": dict.fromkeys(whole, "model.safetensors")}), "{"):
        write_tensors(folder, {name: 0.5 * tensor for name, tensor in whole.items()})
        index.write_text(listed)
        model = HookedTransformer.from_pretrained(folder)
        assert torch.equal(model.embed_tokens.weight, 0.5 * whole["model.embed_tokens.weight"])
        assert torch.equal(model(prompt()), load_reference(folder, attn="sdpa")(prompt()).logits)


@pytest.mark.parametrize("cut", [0, 4, 100, -4])
def test_truncated_files(cut: int, own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    refused(folder, r"model.safetensors is not a whole safetensors file")


def test_pickles_are_refused(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"only pickled weights \(pytorch_model.bin\)")
    (folder / "pytorch_model.bin").rename(folder / "phi.gguf")
    refused(folder, r"has its weights in phi.gguf, and GGUF is not read")
    (folder / "phi.gguf").unlink()
    refused(folder, r"has no model.safetensors and no model.safetensors.index.json")


# -- dtypes, live models, our own format -------------------------------------------------------------------------


def test_dtypes(structure: Recipe, own_copy: Folders) -> None:
    folder = own_copy(structure)
    assert HookedTransformer.from_pretrained(folder).embed_tokens.weight.dtype == torch.float32
    edit_config(folder, dtype="bfloat16")
    assert HookedTransformer.from_pretrained(folder).embed_tokens.weight.dtype == torch.bfloat16
    edit_config(folder, dtype=None)
    write_tensors(folder, {name: tensor.half() for name, tensor in tensors_of(folder).items()})
    model = HookedTransformer.from_pretrained(folder)
    theirs = load_reference(folder, torch.float16)
    ours = {str(parameter.dtype) for parameter in model.parameters()}
    assert ours == {str(parameter.dtype) for parameter in theirs.parameters()}


def test_a_dtype_by_its_name(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    edit_config(folder, dtype="float16")
    for name in ("float64", "float32", "float16", "bfloat16", "auto", None):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=name or "auto")
        model = HookedTransformer.from_pretrained(folder, dtype=name)
        assert model.embed_tokens.weight.dtype == theirs.model.embed_tokens.weight.dtype
        assert HookedTransformer.from_pretrained(theirs, dtype=name).embed_tokens.weight.dtype == theirs.dtype
    for wrong in ("float7", "torch.float32", "int8", torch.int8, torch.complex64, 16, [torch.float32]):
        with pytest.raises(TypeError, match=r"dtype is .*: give 'auto', or one of float64, float32, float16, bfloat16"):
            converters.load(folder, dtype=wrong)


def test_half_precision_is_never_loaded_through_float32(own_copy: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_copy(BASES[0])
    write_tensors(folder, {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()})
    edit_config(folder, dtype="bfloat16")
    monkeypatch.setattr(torch.Tensor, "float", None)
    model = HookedTransformer.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_a_live_model_shares_its_tensors(structure: Recipe, checkpoints: Folders) -> None:
    theirs = load_reference(checkpoints(structure), attn="sdpa")
    model = HookedTransformer.from_pretrained(theirs)
    storages = {tensor.untyped_storage().data_ptr() for tensor in theirs.state_dict().values()}
    assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == storages
    assert torch.equal(model(prompt()), theirs(prompt()).logits)
    theirs.get_input_embeddings().weight += 1
    assert torch.equal(model(prompt()), theirs(prompt()).logits)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compiled", "data-parallel"])
@torch.no_grad()
def test_a_live_model_in_a_wrapper(wrap: Callable[[Any], Any], checkpoints: Folders) -> None:
    theirs = load_reference(checkpoints(BASES[0]), attn="sdpa")
    expected = theirs(prompt()).logits
    theirs.model.layers[1].self_attn = torch.compile(theirs.model.layers[1].self_attn)
    assert any("_orig_mod" in name for name in theirs.state_dict())
    model = HookedTransformer.from_pretrained(wrap(theirs))
    assert model.embed_tokens.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model(prompt()), expected)


def test_a_live_model_that_is_not_all_there_is_refused(checkpoints: Folders) -> None:
    import accelerate

    def refused_live(model: Any, message: str) -> None:
        with pytest.raises(converters.CheckpointError, match=message):
            HookedTransformer.from_pretrained(model)

    def reference() -> Any:
        return load_reference(checkpoints(BASES[0]))

    away = r"47 of the live model's tensors are not in memory .*load it without offloading, or give the folder"
    refused_live(accelerate.cpu_offload(reference(), execution_device=torch.device("cpu")), away)
    with torch.device("meta"):
        refused_live(transformers.AutoModelForCausalLM.from_config(hf_config(BASES[0])), away)
    one = reference()
    accelerate.cpu_offload(one.model.layers[1].mlp.fc1, execution_device=torch.device("cpu"))
    refused_live(one, r"2 of the live model's tensors are not in memory \(model.layers.1.mlp.fc1.weight")

    class Sharded(torch.Tensor):
        pass

    sharded = reference()
    sharded.lm_head.weight = torch.nn.Parameter(sharded.lm_head.weight.detach().as_subclass(Sharded))
    refused_live(sharded, r"1 of the live model's tensors are no plain ones \(lm_head.weight is a Sharded")
    parametrized = reference()
    torch.nn.utils.parametrizations.weight_norm(parametrized.lm_head)
    refused_live(parametrized, r"parametrized weights: .*remove_parametrizations")
    with pytest.raises(TypeError, match="source is HookedTransformer: give a folder"):
        HookedTransformer.from_pretrained(HookedTransformer.from_pretrained(checkpoints(BASES[0])))


def test_a_live_model_with_an_adapter_is_refused(checkpoints: Folders) -> None:
    """Its layer as peft's are: the base under `base_layer`, and its weight shown as the layer's own."""

    class Lora(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear):
            super().__init__()
            self.base_layer = base
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base.in_features, 2, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, base.out_features, bias=False)})

        @property
        def weight(self) -> torch.Tensor:
            return self.base_layer.weight

    for part, name in (("q_proj", r"model.layers.2.self_attn.q_proj.weight"), ("dense", "self_attn.dense.weight")):
        theirs = load_reference(checkpoints(BASES[0]))
        attention = theirs.model.layers[2].self_attn
        setattr(attention, part, Lora(getattr(attention, part)))
        with pytest.raises(converters.CheckpointError, match=rf"missing: .*{name}(.|\n)*merge it into its base model"):
            HookedTransformer.from_pretrained(theirs)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(each, torch.float32) for each in STRUCTURES]
    + [(each, dtype) for each in BASES for dtype in (torch.bfloat16, torch.float16)],
    ids=lambda each: getattr(each, "id", str(each)),
)
@torch.no_grad()
def test_our_format_round_trips(recipe: Recipe, dtype: torch.dtype, checkpoints: Folders, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(recipe), dtype=dtype)
    model.save_pretrained(tmp_path)
    again = HookedTransformer.from_pretrained(tmp_path)
    assert again.config == dataclasses.replace(model.config, dtype=str(dtype)[6:])
    assert again.config.origin == model.config.origin
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    # In another file the weights lie at other addresses, and a product's last bits can depend on them: compare copies.
    assert torch.equal(copy.deepcopy(model)(prompt()), copy.deepcopy(again)(prompt()))


def test_saving_is_whole_or_not_at_all(checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.embed_tokens.weight.data += 1

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("json.dumps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match="holds another checkpoint"):
        model.save_pretrained(checkpoints(BASES[0]))


@pytest.mark.parametrize("name", ["phi-tied", "phi3-tied"])
def test_a_head_that_was_untied_is_saved(name: str, checkpoints: Folders, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(NAMED[name]))
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    model.save_pretrained(tmp_path)
    again = HookedTransformer.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(again.lm_head.weight, again.embed_tokens.weight)


def test_a_config_of_ours_alone(structure: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    config = converters.read_config(checkpoints(structure))
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = HookedTransformer(config)
    assert not model.training
    assert model(prompt()).shape == (2, prompt().shape[1], config.vocab_size)
    model.save_pretrained(tmp_path)
    again = HookedTransformer.from_pretrained(tmp_path)
    assert torch.equal(copy.deepcopy(again)(prompt()), copy.deepcopy(model)(prompt()))


# -- sizes -------------------------------------------------------------------------------------------------------


def test_nothing_grows_with_the_context(base: Recipe, own_copy: Folders) -> None:
    """Building and running 8 tokens allocates the same bytes, whatever the context."""
    from torch.profiler import profile

    def cost(folder: Path) -> int:
        HookedTransformer.from_pretrained(folder)(prompt(8))  # imports and first-use tables are not this model's
        with profile(profile_memory=True) as run, torch.no_grad():
            HookedTransformer.from_pretrained(folder)(prompt(8))
        return sum(max(event.self_cpu_memory_usage, 0) for event in run.events())

    folder = own_copy(base)
    small = cost(folder)
    config = converters.read_config(folder)
    edit_config(folder, **{spelled(base, "max_position_embeddings"): 131072})
    if config.positions is None:
        assert cost(folder) == small
    else:
        with pytest.raises(converters.CheckpointError, match="misshapen"):  # learned, as many as there are rows
            cost(folder)


@torch.no_grad()
def test_sizes_and_weight_views(structure: Recipe, checkpoints: Folders) -> None:
    model, theirs = HookedTransformer.from_pretrained(checkpoints(structure)), load_reference(checkpoints(structure))
    config = theirs.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.vocab_size)
    assert sizes == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", config.num_attention_heads),
        config.vocab_size,
    )
    widths = getattr(config, "v_head_dim", head_dim), getattr(config, "qk_head_dim", head_dim)
    assert (model.head_dim, model.qk_head_dim) == widths
    width = getattr(config, spelled(structure, "intermediate_size"))
    assert model.intermediate_size == (4 * config.hidden_size if width is None else width)
    _, cache = model.run_with_cache(prompt())
    attention, x = model.layers[1].self_attn, cache["attention_input", 1]
    o = torch.einsum("bshd,hdm->bsm", cache["attention_premix", 1], attention.W_O) + attention.b_O
    torch.testing.assert_close(o, attention.o(cache["attention_premix", 1].flatten(2)))
    out = cache["final_norm_output"] @ model.W_U + model.b_U
    torch.testing.assert_close(out, cache["lm_head_output"])
    assert torch.equal(model.W_E[prompt()], cache["token_embeddings"])
    if isinstance(attention, LatentAttention):
        return
    q = torch.einsum("bsm,hmd->bhsd", x, attention.W_Q) + attention.b_Q[:, None]
    v = torch.einsum("bsm,hmd->bhsd", x, attention.W_V) + attention.b_V[:, None]
    k = torch.einsum("bsm,hmd->bhsd", x, attention.W_K) + attention.b_K[:, None]
    torch.testing.assert_close(v, cache["attention_values", 1])
    if attention.q_norm is None:
        torch.testing.assert_close(q, cache["attention_queries_before_rotary", 1])
        torch.testing.assert_close(k, cache["attention_keys_before_rotary", 1])
    views = [attention.W_Q, attention.W_K, attention.W_V, attention.W_O, model.W_E, model.W_U]
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(view.untyped_storage().data_ptr() in storages for view in views)


@torch.no_grad()
def test_maps_from_a_latent(checkpoints: Folders) -> None:
    for recipe in ("deepseek_v3-base", "deepseek_v3-whole_queries"):
        model = HookedTransformer.from_pretrained(checkpoints(NAMED[recipe]))
        _, cache = model.run_with_cache(prompt())
        attention, latent = model.layers[1].self_attn, cache["attention_latent", 1]
        k = torch.einsum("bsl,hld->bhsd", latent, attention.W_UK)
        v = torch.einsum("bsl,hld->bhsd", latent, attention.W_UV)
        torch.testing.assert_close(k, cache["attention_keys", 1][..., : attention.cfg.plain_dims])
        torch.testing.assert_close(v, cache["attention_values", 1])
        for name in ("W_K", "W_V", *["W_Q"] * (attention.cfg.query_size is not None)):
            with pytest.raises(UnreadableWeight, match=r"layers.1.self_attn.*a norm between.*read W_UK and W_UV"):
                getattr(attention, name)
    q = torch.einsum("bsm,hmd->bhsd", cache["attention_input", 1], attention.W_Q)
    torch.testing.assert_close(q, cache["attention_queries_before_rotary", 1])


@torch.no_grad()
def test_blocks_that_foretell_more_tokens_are_passed_over(own_copy: Folders, checkpoints: Folders) -> None:
    """As transformers does with the last block of DeepSeek V3; where no family says so, such blocks are left over."""
    folder = own_copy(NAMED["deepseek_v3-base"])
    whole = tensors_of(folder)
    more = {f"model.layers.3.{name}": torch.ones(2) for name in ("eh_proj.weight", "self_attn.o_proj.weight")}
    write_tensors(folder, {**whole, **more})
    model = HookedTransformer.from_pretrained(folder)
    assert torch.equal(
        model(prompt()), load_reference(checkpoints(NAMED["deepseek_v3-base"]), attn="sdpa")(prompt()).logits
    )
    write_tensors(folder, {**whole, "model.layers.2.eh_proj.weight": torch.ones(2)})
    refused(folder, r"left over: model.layers.2.eh_proj.weight")
    folder = own_copy(NAMED["llama-base"])
    write_tensors(folder, {**tensors_of(folder), **more})
    refused(folder, r"left over: model.layers.3.eh_proj.weight")


@torch.no_grad()
def test_mlp_weight_views(structure: Recipe, checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(structure))
    mlp = model.layers[0].mlp
    _, cache = model.run_with_cache(prompt())
    x = cache["mlp_input", 0]
    if model.support(0)["router_logits"] is None:
        experts = cache["expert_indices", 0]
        for at in ((0, 0, 0), (1, 5, mlp.top_k - 1)):
            expert, token = experts[at], x[at[:2]]
            gate, up = token @ mlp.W_gate[expert] + mlp.b_gate[expert], token @ mlp.W_in[expert] + mlp.b_in[expert]
            torch.testing.assert_close(gate, cache["mlp_preactivation", 0][at])
            torch.testing.assert_close(up, cache["mlp_up", 0][at])
            out = cache["mlp_neurons", 0][at] @ mlp.W_out[expert] + mlp.b_out[expert]
            torch.testing.assert_close(out * cache["expert_weights", 0][at], cache["expert_outputs", 0][at])
    else:
        if model.support(0)["mlp_up"] is None:
            torch.testing.assert_close(x @ mlp.W_gate + mlp.b_gate, cache["mlp_preactivation", 0])
            torch.testing.assert_close(x @ mlp.W_in + mlp.b_in, cache["mlp_up", 0])
        else:
            torch.testing.assert_close(x @ mlp.W_in + mlp.b_in, cache["mlp_preactivation", 0])
        torch.testing.assert_close(cache["mlp_neurons", 0] @ mlp.W_out + mlp.b_out, mlp.down(cache["mlp_neurons", 0]))


def test_a_config_as_transformers_holds_it(checkpoints: Folders) -> None:
    theirs = transformers.AutoConfig.from_pretrained(checkpoints(BASES[0]))
    assert converters.read_config(theirs) == converters.read_config(checkpoints(BASES[0]))
    with pytest.raises(converters.ConfigError, match="pad_token_id is 32000, phi3's own where the config has none"):
        converters.read_config({"model_type": "phi3", "vocab_size": 50})


def test_a_weights_file_of_another_name_is_named(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with pytest.raises(converters.CheckpointError, match=r"is loaded by its path \(model.fp16.safetensors\)"):
        HookedTransformer.from_pretrained(folder)
    HookedTransformer.from_pretrained(folder / "model.fp16.safetensors")


def test_blocks_that_were_cut_off_are_said(checkpoints: Folders) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    model.layers = model.layers[:2]
    with pytest.raises(ValueError, match="the config has 3 blocks and the model 2"):
        model(prompt())
