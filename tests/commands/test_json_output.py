"""The names of docs/json.md are those that the commands print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import command
from helm.machine.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
QWEN = str(ROOT / "tests" / "data" / "configs" / "qwen3-8b.json")
LOADED = "Every loaded model"


def documented(*sections: str) -> dict[str, bool]:
    """Names of the sections' tables, and whether they may be absent."""
    found = {}
    for section in sections:
        text = DOCUMENT.split(f"\n## {section}\n")[1].split("\n## ")[0]
        for row in re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE):
            for name in re.findall(r"`([^`]+)`", row[0]):
                assert name not in found, f"{name} is documented twice"
                found[name] = row[1].startswith("if ")
    assert found
    return found


def names(value: Any, path: str = "") -> Iterator[str]:
    """Dotted names of all leaves."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from names(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from names(item, f"{path}[]")
    else:
        yield path


def check(printed: list[Any], *sections: str) -> None:
    """Every name that is printed is documented, and the other way round."""
    said = documented(*sections)
    patterns = {
        name: re.compile(re.sub(r"<\w+>", "[^.]+", re.escape(name).replace(r"\<", "<")))
        for name in said
    }
    found = set()
    for path in {path for one in printed for path in names(one)}:
        fitting = [name for name, pattern in patterns.items() if pattern.fullmatch(path)]
        optional = any(n.startswith(path) and maybe for n, maybe in said.items())
        assert fitting or optional, f"{path} is not documented in {sections}"
        found.update(fitting)
    missing = [name for name, maybe in said.items() if not maybe and name not in found]
    assert not missing, f"{missing} are documented in {sections}, but not printed"


def printed(*arguments: str) -> Any:
    return json.loads(command.helm(*arguments, "--json").stdout)


def test_run() -> None:
    alone = printed("run", "-n", "3")
    split = printed("run", "-n", "3", "--device", "sim:vram=64MiB", "--profile", "thesis-4060")
    check([alone, split], "`run --json`", LOADED)


def test_bench() -> None:
    check([printed("bench", "--rounds", "1")], "`bench --json`", LOADED)


@pytest.mark.parametrize("preset", ["thesis-4060", "cpu-desktop-64gb-ddr5"])
def test_plan(preset: str) -> None:
    plan = ("plan", QWEN, "--profile", preset, "-c", "4096")
    found = [printed(*plan, "--policies"), printed(*plan, "--objective", "serve")]
    check(found, "`plan --json`")


def test_formats() -> None:
    large = str(ROOT / "tests" / "data" / "configs" / "llama-3.1-70b.json")
    found = [printed("plan", large, "--profile", "thesis-l40s", "--formats"),
             printed("plan", QWEN, "--profile", "thesis-4060", "--formats")]  # fmt: skip
    check(found, "`plan --formats --json`")


def test_profile() -> None:
    found = load_profile("thesis-4060").to_dict()
    own = printed("profile")
    check([own, found], "`profile --json`")


def test_doctor() -> None:
    check([printed("doctor")], "`doctor --json`")


def test_list_and_show(tmp_path: Path) -> None:
    listed = command.helm("list", "--json", XDG_CACHE_HOME=str(tmp_path)).stdout
    check([json.loads(listed)], "`list --json`")
    check([printed("show")], "`show --json`")


def test_quantize(tmp_path: Path) -> None:
    compared = printed("quantize", "--to", "q4", "-o", str(tmp_path / "a"))
    alone = printed("quantize", "--to", "q8", "-o", str(tmp_path / "b"), "--no-compare")
    check([compared, alone], "`quantize --json`")
