"""A family is one short file, and no other knows its name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from helm.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "python/helm/model/families"
MOST_LINES = 150
SOURCES = (".py", ".cc", ".h", ".cu", ".cuh")
MODULES = {family.architecture: path for path in sorted(FOLDER.glob("*.py"))
           if (family := getattr(importlib.import_module(f"helm.model.families.{path.stem}"),
                                 "FAMILY", None)) is not None}  # fmt: skip
# Lists of names, and a model that HELM makes to measure a machine.
LISTS = (
    "python/helm/model/families/__init__.py", "python/helm/model/gguf/architectures.py",
    "python/helm/measure/tiny_model.py",
)  # fmt: skip


def test_every_family_is_listed_and_has_a_file_of_its_own() -> None:
    assert sorted(MODULES) == sorted(FAMILIES)
    assert len(set(MODULES.values())) == len(FAMILIES)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_family_is_short(architecture: str) -> None:
    assert len(MODULES[architecture].read_text().splitlines()) < MOST_LINES


def test_no_other_file_names_a_family() -> None:
    """As transformers writes it in a config.json, in quotes. A type may be a family of GGUF files,
    or a tokenizer, too, so it counts beside `model_type` alone."""
    names = "|".join(sorted(FAMILIES))
    types = "|".join(sorted(family.model_type for family in FAMILIES.values()))
    said = re.compile(rf'"({names})"|model_type\W{{1,6}}"({types})"')
    folders = [ROOT / "python", ROOT / "cpp", ROOT / "cuda"]
    files = [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in SOURCES]
    assert len(files) > 200
    own = set(MODULES.values()) | {ROOT / name for name in LISTS}
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in files
        if path not in own and (match := said.search(path.read_text()))
    }
    assert not found
    for architecture, path in MODULES.items():  # nor does a family name another
        others = {match[1] for match in said.finditer(path.read_text()) if match[1]}
        assert others <= {architecture}, path
