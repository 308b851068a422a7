"""The README's code runs as it stands, on a tiny checkpoint in place of the released one."""

from __future__ import annotations

import re
from pathlib import Path

import converters
from converters.tiny import make_checkpoint
from transformer_std.hooks.hosts import vocabulary
from transformer_std.hooks.transformer_lens import NAMES

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_code_blocks(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        for number, source in enumerate(sorted(set(re.findall(r'"(\w+/[\w.-]+)"', block)))):
            folder = tmp_path / source
            if not folder.exists():
                make_checkpoint({"microsoft/phi-2": "phi", "Qwen/Qwen1.5-MoE-A2.7B": "qwen2_moe"}[source], folder)
            block = block.replace(source, str(folder))
            assert number == 0
        exec(compile(block, "README.md", "exec"), namespace)


def test_tables_are_whole() -> None:
    for family in converters.families():
        assert f"| `{family}` |" in README
    for host in ("model", "block", "self_attn", "mlp", "shared_experts"):
        for value in vocabulary(host):
            assert f"`{value}`" in README, value
    for lens in NAMES:
        assert lens.rpartition(".")[2] in README, lens
