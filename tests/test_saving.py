"""A save is whole or not there, and reads back as what was saved; what cannot be saved is refused by name."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import converters
from converters.tiny import make_tokenizer
from tests.tiny import BASES, ONE, Folders, Recipe, build, edit_config, load_reference, prompt
from transformer_std import HookedTransformer, saving, whole

ROOT = Path(__file__).parent.parent
WRITERS = [
    pytest.param(lambda model, folder: model.save_pretrained(folder), id="save"),
    pytest.param(lambda model, folder: converters.export(model, folder, max_shard_size=60_000), id="export"),
]
writers = pytest.mark.parametrize("write", WRITERS)
Write = Callable[[HookedTransformer, Path], None]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints that differ in every parameter, in the config, and in the tokenizer, but in no shape."""
    folders = []
    for i in range(2):
        folder = build(ONE, tmp_path_factory.mktemp(f"model{i}"))
        tensors = load_file(folder / "model.safetensors")
        save_file({name: each + i for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        edit_config(folder, layer_norm_eps=1e-5 * (i + 1))
        make_tokenizer(folder, eos_token=f"<end{i}>")
        folders.append(folder)
    return folders


@pytest.fixture
def models(pair: list[Path]) -> list[HookedTransformer]:
    return [HookedTransformer.from_pretrained(folder) for folder in pair]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def same(a: HookedTransformer, b: HookedTransformer) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return a.config == b.config and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- whole or not there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["save", "export"])
def test_fifty_kills_and_fifty_races(kind: str, pair: list[Path], tmp_path: Path) -> None:
    """A killed saver leaves one of the models whole, or nothing; so do two at once; the next one cleans up."""
    tasks = {
        task: subprocess.Popen(
            [sys.executable, "-m", "tests.savers", task, kind, "50", tmp_path / task / "out", *pair],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in ("kill", "race")
    }
    for task, run in tasks.items():
        errors = run.communicate()[1]
        assert run.returncode == 0, f"{task}: {errors}"


@writers
def test_files_are_on_the_disk_before_they_are_moved(
    write: Write, models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    moved = []

    def fsync(file: int) -> None:
        synced.add(os.fstat(file).st_ino)

    def move(source: Path, target: Path, rename: Any = os.rename) -> None:
        if Path(target).parent in (tmp_path, tmp_path / "new", tmp_path / "empty"):
            assert {each.stat().st_ino for each in (Path(source), *Path(source).rglob("*"))} <= synced
            moved.append(Path(target).name)
        rename(source, target)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, move)
    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "empty").mkdir()
    write(models[0], tmp_path / "new")
    write(models[0], tmp_path / "empty")
    assert moved[0] == "new"
    assert {*moved[1:]} == {each.name for each in (tmp_path / "empty").iterdir()}
    assert moved[-1] in ("config.json", "transformer_std.json")
    assert tmp_path.stat().st_ino in synced
    assert (tmp_path / "empty").stat().st_ino in synced


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A disk that is full for whoever writes more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@writers
def test_a_full_disk_changes_nothing(
    write: Write, models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = write is WRITERS[0].values[0]  # an export does not go over anything
    if over:
        write(models[0], tmp_path / "there")
    else:
        (tmp_path / "there").mkdir()
    before = contents(tmp_path)
    for size in (0, 1000, 50_000):
        for folder in ("there", "new"):
            with files_no_larger_than(size), pytest.raises(Exception, match="File too large"):
                write(models[1], tmp_path / folder)
            assert contents(tmp_path) == before
            assert not (tmp_path / "new").exists()

    def full(at: int) -> Callable[[int], None]:
        calls = iter(range(1000))

        def fsync(file: int) -> None:
            if next(calls) == at:
                raise OSError(errno.ENOSPC, "No space left on device")

        return fsync

    failures = 0
    for at in range(1000):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full(at))
            try:
                write(models[1], tmp_path / "there")
            except OSError:
                failures += 1
            else:
                break
        after = HookedTransformer.from_pretrained(tmp_path / "there") if over else None
        assert after is None or same(after, models[0]) or same(after, models[1])
        if not over and contents(tmp_path) != before:  # all was moved already
            assert same(load(tmp_path / "there"), models[1])
            shutil.rmtree(tmp_path / "there")
            (tmp_path / "there").mkdir()
        assert not [each for each in tmp_path.rglob("*") if each.name.startswith(".")]
    assert failures >= 4
    assert same(load(tmp_path / "there"), models[1])


def load(folder: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained(folder)


@writers
def test_a_folder_that_is_there_is_kept_and_its_parent_left_alone(
    write: Write, models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it may be a mount point, its parent read-only, and its mode any."""
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o2750)
    inode = folder.stat().st_ino

    def guarded(act: Any) -> Any:
        def checked(*paths: Any, **options: Any) -> Any:
            if any(isinstance(each, (str, Path)) and Path(each).parent == tmp_path for each in paths):
                raise OSError(errno.EBUSY, "Device or resource busy")
            return act(*paths, **options)

        return checked

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "rmdir", "unlink", "remove", "chmod"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        patch.setattr(Path, "touch", guarded(Path.touch))
        write(models[0], folder)
    assert [each.name for each in tmp_path.iterdir()] == ["volume"]
    assert (folder.stat().st_ino, stat.S_IMODE(folder.stat().st_mode)) == (inode, 0o2750)
    assert same(load(folder), models[0])


@writers
def test_files_have_the_mode_that_new_files_have(write: Write, models: list[HookedTransformer], tmp_path: Path) -> None:
    """safetensors leaves a file to its owner alone, also in a folder that a group shares."""
    for mask in (0o022, 0o002, 0o077):
        before = os.umask(mask)
        try:
            write(models[0], tmp_path / str(mask))
        finally:
            os.umask(before)
        files = [each for each in (tmp_path / str(mask)).rglob("*") if each.is_file()]
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o666 & ~mask}


def test_a_folder_that_appears_while_it_is_saved(
    models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a logger writes into it: a save moves in beside, an export is refused."""
    write_json = saving.write_json

    def meanwhile(file: Path, values: Any) -> None:
        write_json(file, values)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/log.txt").write_text("mine")

    for module in (saving, whole):
        monkeypatch.setattr(module, "write_json", meanwhile)
    models[0].save_pretrained(tmp_path / "out")
    assert same(load(tmp_path / "out"), models[0])
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(FileExistsError, match="out is not empty: export to a new folder"):
        converters.export(models[0], tmp_path / "out")
    assert contents(tmp_path) == {"out/log.txt": b"mine"}


@writers
def test_where_locks_do_not_work_a_second_saver_is_refused(
    write: Write, models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells there whether the first one lives."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    write(models[0], tmp_path / "first")
    assert same(load(tmp_path / "first"), models[0])
    room = tmp_path / ".second.transformer_std.saving"
    room.mkdir()
    (room / "half").touch()
    with pytest.raises(FileExistsError, match=r"second.transformer_std.saving is of another saver; if none is running"):
        write(models[0], tmp_path / "second")
    assert (room / "half").exists()
    shutil.rmtree(room)
    write(models[0], tmp_path / "second")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first", "second"]


def test_a_save_inside_a_save_is_refused(
    models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal's handler would do it, which would wait for ever for what it interrupts."""
    write_json = saving.write_json

    def handler(file: Path, values: Any) -> None:
        with pytest.raises(RuntimeError, match=r"this thread is saving into .*out already"):
            models[1].save_pretrained(tmp_path / "out")
        write_json(file, values)

    monkeypatch.setattr(saving, "write_json", handler)
    models[0].save_pretrained(tmp_path / "out")
    assert same(load(tmp_path / "out"), models[0])


def test_a_reader_takes_header_and_tensors_of_one_file(
    models: list[HookedTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors opens a file for each; another one may have come to its place in between."""
    import converters.checkpoint

    models[0].save_pretrained(tmp_path)
    done = []

    def opened(file: Path, framework: str) -> Any:
        if done:
            return safe_open(file, framework=framework)
        done.append(file)
        first = safe_open(file, framework=framework)
        models[1].save_pretrained(tmp_path)
        return first

    monkeypatch.setattr(converters.checkpoint, "safe_open", opened)
    found = load(tmp_path)
    assert done
    assert same(found, models[1])
    assert found.tokenizer.eos_token == "<end1>"


# -- our own format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_saved_model_has_the_bits_of_the_one_in_memory(
    structure: Recipe, dtype: torch.dtype, checkpoints: Folders, tmp_path: Path
) -> None:
    model = copy.deepcopy(HookedTransformer.from_pretrained(checkpoints(structure), dtype=dtype))
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(prompt()), model(prompt()))


def test_our_file_is_one_that_safetensors_reads(models: list[HookedTransformer], tmp_path: Path) -> None:
    models[0].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = models[0].state_dict()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_the_header_of_the_weights_says_the_config(models: list[HookedTransformer], tmp_path: Path) -> None:
    models[0].save_pretrained(tmp_path)
    models[1].save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/transformer_std.json", tmp_path)
    assert same(load(tmp_path), models[0])
    (tmp_path / "transformer_std.json").unlink()
    assert converters.read_config(tmp_path) == load(tmp_path).config == models[0].config
    assert same(load(tmp_path / "model.safetensors"), models[0])


def as_older_versions_saved(model: HookedTransformer, tokenizer: Path | None, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    config = json.dumps(model.config.to_dict(), indent=2) + "\n"
    (folder / "transformer_std.json").write_text(config, encoding="utf-8")
    if tokenizer is not None:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, folder)


def test_what_older_versions_saved_is_read_and_replaced(
    models: list[HookedTransformer], pair: list[Path], tmp_path: Path
) -> None:
    old = tmp_path / "old"
    as_older_versions_saved(models[0], pair[0], old)
    found = load(old)
    assert same(found, models[0])
    found.save_pretrained(old)  # over itself, its tokenizer not read yet
    assert found.tokenizer.eos_token == load(old).tokenizer.eos_token == "<end0>"
    assert not (old / "tokenizer.json").exists()
    shutil.rmtree(old)
    as_older_versions_saved(models[0], pair[0], old)
    models[1].tokenizer = None
    models[1].save_pretrained(old)
    assert same(load(old), models[1])
    assert load(old).tokenizer_source is None


def test_an_earlier_tokenizer_does_not_stay(models: list[HookedTransformer], tmp_path: Path) -> None:
    bare = HookedTransformer(models[0].config)
    (tmp_path / "notes.txt").write_text("mine")
    models[0].save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer.eos_token == "<end0>"
    models[1].save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer.eos_token == "<end1>"
    bare.save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer_source is None
    assert sorted(contents(tmp_path)) == ["model.safetensors", "notes.txt", "transformer_std.json"]
    make_tokenizer(tmp_path, eos_token="<own>")  # put there by hand
    assert load(tmp_path).tokenizer.eos_token == "<own>"
    bare.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_model_saved_over_where_it_came_from_keeps_its_tokenizer(
    models: list[HookedTransformer], tmp_path: Path
) -> None:
    models[0].save_pretrained(tmp_path)
    model = load(tmp_path)
    model.save_pretrained(tmp_path)
    assert model.tokenizer.eos_token == "<end0>"
    model.tokenizer.chat_template = "{{ messages }}"
    model.save_pretrained(tmp_path)
    model = load(tmp_path)
    (model.tokenizer_source / "vocab.txt").write_text("as some tokenizers have it")
    model.save_pretrained(tmp_path)  # not read yet
    assert model.tokenizer.chat_template == "{{ messages }}"
    assert len(list(tmp_path.glob("tokenizer-*/vocab.txt"))) == len(list(tmp_path.glob("tokenizer-*"))) == 1


def test_a_header_names_no_folder_elsewhere(models: list[HookedTransformer], pair: list[Path], tmp_path: Path) -> None:
    header = {"transformer_std": json.dumps(models[0].config.to_dict()), "tokenizer": str(pair[1])}
    save_file(dict(models[0].state_dict()), tmp_path / "model.safetensors", header)
    assert same(load(tmp_path), models[0])
    assert load(tmp_path).tokenizer_source is None
    save_file(dict(models[0].state_dict()), tmp_path / "model.safetensors", {"transformer_std": "[]"})
    with pytest.raises(converters.ConfigError, match=r"the header of .* is not a config that save_pretrained wrote"):
        load(tmp_path)


WITHOUT_TRANSFORMERS = """
import sys
for name in ("transformers", "tokenizers"): sys.modules[name] = None
import converters
from transformer_std import HookedTransformer
source, folder = sys.argv[1:]
HookedTransformer.from_pretrained(source).save_pretrained(folder + "/own")
converters.export(HookedTransformer.from_pretrained(folder + "/own"), folder + "/release")
"""


def test_a_tokenizer_that_was_not_read_is_copied(pair: list[Path], tmp_path: Path) -> None:
    """Which needs no transformers, nor that it can be loaded."""
    source = shutil.copytree(pair[0], tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("é", encoding="utf-8")
    subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS, source, tmp_path], cwd=ROOT, check=True)
    files = ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tools.jinja"]
    for file in files:
        assert (tmp_path / "release" / file).read_bytes() == (source / file).read_bytes()
    assert load(tmp_path / "own").tokenizer.eos_token == "<end0>"
    (source / "tokenizer.json").write_text("no tokenizer")
    load(source).save_pretrained(tmp_path / "own")
    converters.export(load(tmp_path / "own"), tmp_path / "broken")
    assert (tmp_path / "broken/tokenizer.json").read_text() == "no tokenizer"
    model = load(source)
    shutil.rmtree(source)
    for write in (model.save_pretrained, lambda folder: converters.export(model, folder)):
        with pytest.raises(FileNotFoundError, match="source holds no tokenizer"):
            write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- weights that are not plain ----------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Adapted(nn.Module):
    """As peft puts it in a projection's place."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight


def parametrized(model: HookedTransformer) -> None:
    parametrize.register_parametrization(model.layers[0].self_attn.o, "weight", Doubled())


def adapted(model: HookedTransformer) -> None:
    model.layers[0].self_attn.o = Adapted(model.layers[0].self_attn.o)


def pruned(model: HookedTransformer) -> None:
    prune.l1_unstructured(model.layers[0].self_attn.o, "weight", 0.5)


def compiled(model: HookedTransformer) -> None:
    model.layers[0] = nn.ModuleDict({"_orig_mod": model.layers[0]})  # as torch.compile(model.layers[0]) is named


def with_a_buffer(model: HookedTransformer) -> None:
    model.layers[0].register_buffer("direction", torch.ones(96))


def of_two_dtypes(model: HookedTransformer) -> None:
    model.norm.bfloat16()


def sparse(model: HookedTransformer) -> None:
    model.layers[0].self_attn.o.weight = nn.Parameter(model.layers[0].self_attn.o.weight.detach().to_sparse())


def on_meta(model: HookedTransformer) -> None:
    model.layers[0].to("meta")


def offloaded(model: HookedTransformer) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def sharded(model: HookedTransformer) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


NOT_PLAIN = {
    parametrized: r"o.weight is missing, .*; make the weights plain first: .*remove_parametrizations",
    adapted: r"o.weight is missing, .*; make the weights plain first: peft's merge_and_unload",
    pruned: r"o.weight is missing, .*; make the weights plain first: torch.nn.utils.prune.remove",
    compiled: r"layers.0.* is missing, .*; make the weights plain first: compile modules in place",
    with_a_buffer: r"layers.0.direction is \[96\], the config makes it nothing",
    of_two_dtypes: r"norm.weight is torch.bfloat16 in a model of torch.float32",
    sparse: r"o.weight is a Parameter \(torch.sparse_coo\): make it a plain dense tensor",
    sharded: r"embed_tokens.weight is a DTensor .*: gather the shards first, get_model_state_dict",
    on_meta: r"weights are not in memory \(layers.0.",
    offloaded: r"weights are not in memory \(embed_tokens.weight, ...\): .*without putting parts on disk or offloading",
}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("change", NOT_PLAIN, ids=lambda change: change.__name__)
@writers
def test_weights_that_are_not_plain_are_refused_before_anything_is_written(
    change: Callable, write: Write, models: list[HookedTransformer], tmp_path: Path, alone: None
) -> None:
    change(models[1])
    error = RuntimeError if change in (on_meta, offloaded) else ValueError
    with pytest.raises(error, match=NOT_PLAIN[change]):
        write(models[1], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_advice_works(models: list[HookedTransformer], tmp_path: Path, alone: None) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    parametrized(models[0])
    logits = models[0](prompt())
    parametrize.remove_parametrizations(models[0].layers[0].self_attn.o, "weight")
    models[0].save_pretrained(tmp_path / "parametrized")
    assert torch.equal(load(tmp_path / "parametrized")(prompt()), logits)
    logits = models[1](prompt())
    sharded(models[1])
    plain = HookedTransformer(models[1].config)
    plain.load_state_dict(get_model_state_dict(models[1], options=StateDictOptions(full_state_dict=True)))
    plain.save_pretrained(tmp_path / "sharded")
    assert torch.equal(load(tmp_path / "sharded")(prompt()), logits)


@torch.no_grad()
def test_blocks_that_share_a_weight_are_written_both(checkpoints: Folders, tmp_path: Path) -> None:
    for base in BASES:
        model = copy.deepcopy(HookedTransformer.from_pretrained(checkpoints(base)))
        model.layers[1].self_attn.o.weight = model.layers[0].self_attn.o.weight
        model.save_pretrained(tmp_path / base.id / "own")
        converters.export(model, tmp_path / base.id / "release", max_shard_size="1GB")
        logits = model(prompt())
        assert torch.equal(load(tmp_path / base.id / "own")(prompt()), logits)
        assert same(load(tmp_path / base.id / "release"), model)
        theirs = load_reference(tmp_path / base.id / "release", attn="sdpa")
        assert torch.equal(theirs(prompt()).logits, load(tmp_path / base.id / "release")(prompt()))


# -- text files --------------------------------------------------------------------------------------------------


def test_files_are_utf8_whatever_the_locale(own_copy: Folders, tmp_path: Path) -> None:
    folder = own_copy(BASES[0])
    for file, key in (("config.json", "_name_or_path"), ("generation_config.json", "_name")):
        values = {**json.loads((folder / file).read_text(encoding="utf-8")), key: "modèle"}
        (folder / file).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    code = (
        "import sys, locale, converters\nfrom transformer_std import HookedTransformer\n"
        "assert locale.getpreferredencoding(False) == 'ANSI_X3.4-1968'\n"
        "model = HookedTransformer.from_pretrained(sys.argv[1])\n"
        "model.save_pretrained(sys.argv[2] + '/own')\n"
        "converters.export(HookedTransformer.from_pretrained(sys.argv[2] + '/own'), sys.argv[2] + '/release')\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, folder, tmp_path], cwd=ROOT, env=environment, check=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "release")
    assert config.to_dict()["vocab_size"] == 131
    for file in ("config.json", "generation_config.json"):
        assert "modèle" in json.loads((tmp_path / "release" / file).read_text(encoding="utf-8")).values()


def test_no_text_is_read_or_written_in_the_locales_encoding() -> None:
    calls = 0
    for package in ("transformer_std", "converters"):
        for path in (ROOT / package).rglob("*.py"):
            code = path.read_text(encoding="utf-8")
            for call in re.finditer(r"(read_text|write_text|(?<!safe_)(?<!def _)\bopen)\((.*)", code):
                assert (
                    "encoding=" in call[0]
                    or re.search(r'"(r\+|a|w|r)b"', call[0])
                    or "os.open" in code[call.start() - 3 : call.end()]
                ), f"{path.name}: {call[0]}"
                calls += 1
    assert calls > 5


@torch.no_grad()
def test_a_model_that_was_cast_is_saved_and_exported(base: Recipe, checkpoints: Folders, tmp_path: Path) -> None:
    """Also what a load in float16 would have kept in float32: it is read as that, and loses nothing."""
    model = HookedTransformer.from_pretrained(checkpoints(base)).half()
    model.save_pretrained(tmp_path / "saved")
    converters.export(model, tmp_path / "exported")
    for folder in ("saved", "exported"):
        read = HookedTransformer.from_pretrained(tmp_path / folder)
        assert read.dtype == torch.float16
        for name, weight in read.named_parameters():
            assert torch.equal(weight, model.get_parameter(name).to(weight.dtype)), name


def test_an_empty_name_is_no_folder(checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]))
    monkeypatch.chdir(tmp_path)
    for write in (lambda: model.save_pretrained(""), lambda: converters.export(model, "")):
        with pytest.raises(ValueError, match=r"name is empty: '\.' is the current one"):
            write()
    assert not [*tmp_path.iterdir()]
    model.save_pretrained(".")
    with pytest.raises(converters.CheckpointError, match="name is empty"):
        HookedTransformer.from_pretrained("")
    assert torch.equal(HookedTransformer.from_pretrained(".")(prompt()), model(prompt()))
