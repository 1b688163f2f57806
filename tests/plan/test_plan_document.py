"""docs/plan.md lists every record of a plan, docs/weights.md every format, as the code has them.

    python tests/plan/test_plan_document.py

writes the section "Records" anew.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from helm.base.formats import FORMAT_NAMES, parse
from helm.model.graph import OPS
from helm.plan.records import Prediction
from helm.plan.schema import Plan

DOCUMENT = next(
    folder / "docs" / "plan.md"
    for folder in Path(__file__).resolve().parents
    if (folder / "pyproject.toml").exists()
)
BEGIN, END = "<!-- records: begin -->\n", "<!-- records: end -->\n"
OWN = {
    "format",
    "version",
    "units_cpu",
    "units_accelerator",
    "units_cut",
    "loading",
}  # of the text, in no dataclass
RENAMED = {"input": "in"}  # a keyword of Python
WORDS = {int: "int", float: "float", str: "string", bool: "bool", type(None): "null"}


def records(cls: type, seen: dict[type, None] | None = None) -> list[type]:
    """The dataclasses that a record consists of, itself first, each once."""
    seen = {} if seen is None else seen
    if cls not in seen:
        seen[cls] = None
        for hint in typing.get_type_hints(cls).values():
            for part in parts(hint):
                if dataclasses.is_dataclass(part):
                    records(part, seen)
    return list(seen)


def parts(hint: Any) -> Iterator[Any]:
    """A type and all types that its description names."""
    yield hint
    for inner in typing.get_args(hint):
        yield from parts(inner)


def shown(hint: Any) -> str:
    """A type as JSON has it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        if all(getattr(argument, "op", None) in OPS for argument in arguments):
            return "ops"
        return " or ".join(shown(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {shown(arguments[0])}"
    if origin is dict:
        return f"name -> {shown(arguments[1])}"
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        return f"[{name}](#{name.lower()})"
    return WORDS[hint]


def table(cls: type) -> str:
    """One record's fields, in the order of the text."""
    hints = typing.get_type_hints(cls)
    op = getattr(cls, "op", None)
    title = f"### {cls.__name__}\n\n"
    if op is not None:
        title += f"`op` is `{op}`.\n\n"
    rows = [
        f"| `{RENAMED.get(field.name, field.name)}` | {shown(hints[field.name])} |"
        for field in dataclasses.fields(cls)
    ]
    return title + "\n".join(["| field | type |", "|---|---|", *rows]) + "\n"


def section() -> str:
    """All records, in the order in which a reader meets them."""
    return BEGIN + "\n" + "\n".join(table(cls) for cls in records(Plan)) + "\n" + END


def written(document: str) -> str:
    """The document with the section made anew."""
    before, rest = document.split(BEGIN)
    return before + section() + rest.split(END)[1]


def test_the_document_lists_every_field() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == written(document), f"run python {Path(__file__).name}"


def test_the_document_explains_every_field_of_the_top_level() -> None:
    prose = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[0]
    named = set(re.findall(r"`([a-z_]+)(?:\[\])?`", prose))
    top = {field.name for cls in (Plan, Prediction) for field in dataclasses.fields(cls)}
    assert (top - {"prediction"} | OWN) - named == set()


def test_every_kind_of_record_is_found() -> None:
    found = {cls.__name__ for cls in records(Plan)}
    assert found >= {"Plan", "Limits", "Slice", "Attention", "Prediction", "Predicted"}


def documented_formats() -> dict[str, float]:
    """name -> bits per weight, as docs/weights.md has them."""
    text = (DOCUMENT.parent / "weights.md").read_text(encoding="utf-8")
    found: dict[str, float] = {}
    for names, bits in re.findall(r"^\| (`.*?) \| ([\d., ]+) \|", text, re.M):
        listed = re.findall(r"`([a-z]+\d+c?(?:\.\w+)?)`", names)
        both = [(name, "b") if "with `b`" in names else (name, "") for name in listed]
        for (name, wide), value in zip(both, bits.split(", "), strict=True):
            found |= {name: float(value), name + wide: float(value)}
    return found


def test_the_document_lists_every_format_with_its_size() -> None:
    rows, cols = 1024, 4096
    sizes = {name: 8 * parse(name).read_bytes(rows, cols) / (rows * cols) for name in FORMAT_NAMES}
    documented = documented_formats()
    assert documented.keys() == sizes.keys()
    assert {
        name: bits for name, bits in documented.items() if abs(bits - sizes[name]) > 0.005
    } == {}


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
