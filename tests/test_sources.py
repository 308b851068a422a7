"""Where checkpoints come from: a file, and the Hub, which here is a small server that speaks its routes.

The client runs in a process of its own, since huggingface_hub reads its settings when it is imported. What a
folder may hold is in test_loading.py, what people save in test_custom.py, the released configs in test_released.py."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import converters
from converters.tiny import make_tokenizer
from tests.tiny import BASES, Folders, Recipe, edit_config, prompt
from transformer_std import HookedTransformer

ROOT = Path(__file__).parent.parent
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
REPO = "someone/tiny"


class Hub(ThreadingHTTPServer):
    """Serves one repo, a folder a revision. `log`: what was asked for; `cut`: a file whose body ends halfway."""

    def __init__(self, folders: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders = {COMMITS[revision]: folder for revision, folder in folders.items()}
        self.log: list[str] = []
        self.cut = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up

    @property
    def bodies(self) -> list[str]:
        """The files whose content was fetched."""
        return sorted({line.rpartition("/")[2] for line in self.log if line.startswith("GET") and "/resolve/" in line})


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.log.append(f"{self.command} {path}")
        if not path.startswith((f"/api/models/{REPO}", f"/{REPO}/resolve/")):
            self.fail("RepoNotFound", 401 if "private" in path else 404)
        elif path.startswith("/api/"):
            self.api(path.removeprefix(f"/api/models/{REPO}").strip("/").split("/"))
        else:
            self.resolve(*path.removeprefix(f"/{REPO}/resolve/").split("/", 1))

    def folder(self, revision: str) -> Path | None:
        found = self.server.folders.get(COMMITS.get(revision, revision))
        if found is None:
            self.fail("RevisionNotFound")
        return found

    def api(self, parts: list[str]) -> None:
        revision = parts[1] if len(parts) > 1 else "main"
        folder = self.folder(revision)
        if folder is None:
            return
        files = sorted(folder.rglob("*"))
        if parts[0] == "tree":
            self.answer([
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size, "oid": etag(f)}
                for f in files if f.is_file()
            ])  # fmt: skip
        else:
            siblings = [{"rfilename": str(f.relative_to(folder))} for f in files if f.is_file()]
            self.answer({"id": REPO, "sha": COMMITS.get(revision, revision), "siblings": siblings})

    def resolve(self, revision: str, name: str) -> None:
        folder = self.folder(revision)
        if folder is None:
            return
        if not (folder / name).is_file():
            self.fail("EntryNotFound")
            return
        body = (folder / name).read_bytes()
        commit = COMMITS.get(revision, revision)
        self.answer(body, {"ETag": f'"{etag(folder / name)}"', "X-Repo-Commit": commit}, cut=name == self.server.cut)

    def fail(self, code: str, status: int = 404) -> None:
        self.answer({"error": code}, {"X-Error-Code": code, "X-Repo-Commit": COMMITS["main"]}, status)

    def answer(self, content: Any, headers: dict[str, str] | None = None, status: int = 200, cut: bool = False) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(checkpoints: Folders, tmp_path: Path) -> Iterator[Hub]:
    """`main` is a checkpoint beside files that a load has no use for; `v2` is the same in shards, in bfloat16."""
    main, v2 = tmp_path / "main", tmp_path / "v2"
    shutil.copytree(checkpoints(BASES[0]), main)
    make_tokenizer(main, eos_token="<eos>")
    for name in ("README.md", "pytorch_model.bin", "model.onnx", "original/model.safetensors", "metrics.json"):
        (main / name).parent.mkdir(exist_ok=True)
        (main / name).write_text("no use")
    model = HookedTransformer.from_pretrained(checkpoints(BASES[0]), dtype=torch.bfloat16)
    converters.export(model, v2, max_shard_size=100_000)
    server = Hub({"main": main, "v2": v2})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# Imports once what takes long and reads no settings, then forks a client for each job on its standard input.
CLIENTS = """
import json, os, sys, traceback
import torch, converters
from transformer_std import HookedTransformer

torch.set_num_threads(1)
assert converters.families() and "huggingface_hub" not in sys.modules
load = HookedTransformer.from_pretrained

def total(model):
    return float(sum(p.detach().double().sum() for p in model.parameters()))

def fails(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except converters.CheckpointError as error:
        print(error)

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(job[name], os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
            os.environ.update(job["environment"])
            exec(job["code"])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def clients() -> Iterator[subprocess.Popen[str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    with subprocess.Popen(
        [sys.executable, "-c", CLIENTS], cwd=ROOT, env=kept, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def client(hub: Hub, clients: subprocess.Popen[str], tmp_path: Path) -> Callable[..., list[str]]:
    """Runs lines of Python where `load` is `from_pretrained` and `fails(load, ...)` prints the CheckpointError."""

    def run(*lines: str, **environment: str) -> list[str]:
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
            **environment,
        }
        out, err = tmp_path / "client.out", tmp_path / "client.err"
        job = {"code": "\n".join(lines), "environment": settings, "out": str(out), "err": str(err)}
        assert clients.stdin is not None
        assert clients.stdout is not None
        clients.stdin.write(json.dumps(job) + "\n")
        clients.stdin.flush()
        assert clients.stdout.readline() == "0\n", err.read_text()
        return out.read_text().splitlines()

    return run


def total(folder: Path) -> str:
    model = HookedTransformer.from_pretrained(folder)
    return repr(float(sum(parameter.detach().double().sum() for parameter in model.parameters())))


Client = Callable[..., list[str]]


# -- the Hub -----------------------------------------------------------------------------------------------------


def test_from_the_hub_and_then_from_the_cache(hub: Hub, client: Client, tmp_path: Path) -> None:
    lines = [f"model = load({REPO!r})", "print(total(model))", "print(model.to_tokens('the cat').tolist())"]
    first = client(*lines)
    assert first[0] == total(tmp_path / "main")
    assert hub.bodies == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    hub.log.clear()
    assert client(*lines) == first
    assert hub.bodies == []
    hub.log.clear()
    assert client(*lines, HF_HUB_OFFLINE="1") == first
    assert hub.log == []


def test_a_revision(hub: Hub, client: Client, tmp_path: Path) -> None:
    for revision in ("v2", COMMITS["v2"]):
        assert client(f"print(total(load({REPO!r}, revision={revision!r})))") == [total(tmp_path / "v2")]
    assert hub.bodies == sorted(path.name for path in (tmp_path / "v2").iterdir())
    assert client(f"fails(load, {REPO!r}, revision='v9')") == [f"{REPO} has no revision 'v9'"]


def test_a_single_file_wins_over_shards(hub: Hub, client: Client, checkpoints: Folders, tmp_path: Path) -> None:
    """As in transformers, which fetches from the same server; and so again from the cache."""
    whole = load_file(checkpoints(BASES[0]) / "model.safetensors")
    save_file(
        {name: 0.5 * tensor for name, tensor in whole.items()}, tmp_path / "v2/model.safetensors", {"format": "pt"}
    )
    options = f"{REPO!r}, revision='v2', dtype='float32'"
    ours = f"print(load({options}).lm_head.weight.detach().sum().item())"
    said = client(ours)
    assert "model.safetensors" in hub.bodies
    assert not any(name.startswith("model-") for name in hub.bodies)
    assert client(ours, HF_HUB_OFFLINE="1") == said
    theirs = ours.replace("load(", "transformers.AutoModelForCausalLM.from_pretrained(")
    assert client("import transformers", theirs) == said


def test_the_config_alone(hub: Hub, client: Client) -> None:
    assert client(f"print(converters.read_config({REPO!r}).vocab_size)") == ["131"]
    assert hub.bodies == ["config.json"]


def test_our_own_format_on_the_hub(hub: Hub, client: Client, tmp_path: Path) -> None:
    shutil.move(tmp_path / "main", tmp_path / "before")
    HookedTransformer.from_pretrained(tmp_path / "before").save_pretrained(tmp_path / "main")
    assert client(f"print(total(load({REPO!r})))") == [total(tmp_path / "before")]
    assert {"model.safetensors", "transformer_std.json"} <= set(hub.bodies)


def test_what_another_program_cached_is_enough(hub: Hub, client: Client, tmp_path: Path) -> None:
    fetch = f"from huggingface_hub import hf_hub_download as get; [get({REPO!r}, f) for f in %r]"
    client(fetch % ["config.json", "model.safetensors"])
    lines = [f"print(total(load({REPO!r})))"]
    assert client(*lines, HF_HUB_OFFLINE="1") == [total(tmp_path / "main")]


def test_transformers_cache_is_enough(hub: Hub, client: Client, tmp_path: Path) -> None:
    client(f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({REPO!r})")
    assert client(f"print(total(load({REPO!r})))", HF_HUB_OFFLINE="1") == [total(tmp_path / "main")]


def test_there_is_no_such_repo(client: Client) -> None:
    for name in ("someone/else", "someone/private", "nobody"):
        said = [f"{name!r} is no folder here and not on the Hub; if it is private, log in (hf auth login)"]
        assert client(f"fails(load, {name!r}); fails(converters.read_config, {name!r})") == said * 2
    assert client("fails(load, 'no/such/folder')") == [
        "'no/such/folder' is neither a folder here nor a Hub id (owner/name)"
    ]


def test_a_repo_without_safetensors(client: Client, tmp_path: Path) -> None:
    (tmp_path / "main/model.safetensors").unlink()
    said = f"{REPO} has no model.safetensors, nor model.safetensors.index.json; pickled weights are not read"
    assert client(f"fails(load, {REPO!r})") == [said]
    (tmp_path / "main/config.json").unlink()
    (said,) = client(f"fails(load, {REPO!r}, revision='main')", HF_HOME=str(tmp_path / "other"))
    assert said.endswith("has no config.json")


def test_a_missing_shard(client: Client, tmp_path: Path) -> None:
    shard = sorted((tmp_path / "v2").glob("model-*"))[2]
    shard.unlink()
    said = f"{REPO} has no {shard.name}, which model.safetensors.index.json lists"
    assert client(f"fails(load, {REPO!r}, revision='v2')") == [said]


def test_an_adapter(hub: Hub, client: Client, tmp_path: Path) -> None:
    (tmp_path / "main/adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (said,) = client(f"fails(load, {REPO!r})")
    assert "holds an adapter of org/base" in said
    assert "model.safetensors" not in hub.bodies


def test_a_dropped_connection(hub: Hub, client: Client, tmp_path: Path) -> None:
    """What fails is said once, and the next try gets it all."""
    hub.cut = "model.safetensors"
    quick = "import time; time.sleep = lambda seconds: None"
    (said,) = client(quick, f"fails(load, {REPO!r})")
    assert said.startswith(f"fetching model.safetensors of {REPO} failed, and can be taken up again: ")
    hub.cut = ""
    assert client(f"print(total(load({REPO!r})))") == [total(tmp_path / "main")]


def test_not_cached_and_offline(hub: Hub, client: Client) -> None:
    (said,) = client(f"fails(load, {REPO!r})", HF_HUB_OFFLINE="1")
    assert said == f"{REPO} is not in the cache, and HF_HUB_OFFLINE is set"
    client(f"converters.read_config({REPO!r})")
    (said,) = client(f"fails(load, {REPO!r})", HF_HUB_OFFLINE="1")
    assert said == f"model.safetensors of {REPO} is not in the cache, and HF_HUB_OFFLINE is set"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    quick = "import time; time.sleep = lambda seconds: None"
    (said,) = client(quick, f"fails(load, {REPO!r}, revision='v2')", HF_ENDPOINT=nowhere)
    assert said.startswith(f"{REPO} is not in the cache, and the Hub was not reached (")


# -- files -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_one_file(structure: Recipe, own_copy: Folders) -> None:
    folder = own_copy(structure)
    expected = HookedTransformer.from_pretrained(folder)(prompt())
    file = (folder / "model.safetensors").rename(folder / "best.safetensors")
    for source in (file, str(file)):
        assert torch.equal(HookedTransformer.from_pretrained(source)(prompt()), expected)
    assert converters.read_config(file) == converters.read_config(folder)
    with pytest.raises(converters.CheckpointError, match=r"best.safetensors: verify its folder"):
        converters.verify(file)


def test_which_file_counts(own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    whole = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in whole.items()}, folder / "other.safetensors")
    model = HookedTransformer.from_pretrained(folder / "other.safetensors")
    assert torch.equal(model.embed_tokens.weight, whole["model.embed_tokens.weight"] + 1)
    save_file({"x": whole["lm_head.bias"]}, folder / "part.safetensors")
    with pytest.raises(converters.CheckpointError, match=r"left over: x \[131\] in .*part.safetensors"):
        HookedTransformer.from_pretrained(folder / "part.safetensors")
    edit_config(folder, model_type="phi9")
    with pytest.raises(converters.ConfigError, match="phi9"):
        HookedTransformer.from_pretrained(folder / "other.safetensors")
    (folder / "config.json").unlink()
    with pytest.raises(converters.CheckpointError, match=r"has no config.json"):
        HookedTransformer.from_pretrained(folder / "other.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "weights.pt"])
def test_files_that_are_not_read(name: str, own_copy: Folders) -> None:
    folder = own_copy(BASES[0])
    with pytest.raises(converters.CheckpointError, match=f"there is no file .*{name}"):
        HookedTransformer.from_pretrained(folder / name)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(converters.CheckpointError, match=f"{name} is no safetensors file"):
        HookedTransformer.from_pretrained(folder / name)
    with pytest.raises(converters.CheckpointError, match=r"there is no file .*model.safetensors"):
        HookedTransformer.from_pretrained(folder / "model.safetensors")
