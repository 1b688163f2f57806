"""The table of formats: sizes as in tests/data/format_bytes.json, names that lead back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helm.base import formats
from helm.errors import InvalidError

CASES = json.loads((Path(__file__).parents[1] / "data" / "format_bytes.json").read_text())[
    "formats"
]


def test_every_format_has_sizes() -> None:
    assert [case["format"] for case in CASES] == list(formats.FORMAT_NAMES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["format"])
def test_sizes_and_units(case: dict) -> None:
    format = formats.parse(case["format"])
    assert (format.row_unit, format.col_unit) == (case["row_unit"], case["col_unit"])
    for rows, cols, total, read in case["sizes"]:
        assert (format.bytes(rows, cols), format.read_bytes(rows, cols)) == (total, read)


@pytest.mark.parametrize("name", formats.FORMAT_NAMES)
def test_a_name_leads_to_its_format_and_back(name: str) -> None:
    assert formats.name(formats.parse(name)) == name


def test_what_names_say() -> None:
    assert formats.parse("bf16") == formats.Format("bf16")
    assert formats.parse("c4.s128b") == formats.Format("c4", "s", 128, 8, True)
    assert formats.parse("c4.k16o4") == formats.Format("c4", "k", 16, 4)
    assert formats.parse("c6.k16") == formats.Format("c6", "k", 16, 32)
    assert formats.parse("c5.km32") == formats.Format("c5", "km", 32)
    assert formats.parse("c8.r") == formats.Format("c8", "r", 0, 128)
    assert formats.parse("nl4.k32") == formats.Format("nl4", "k", 32)


@pytest.mark.parametrize("name", ["", "c4", "c4.s31", "c4.km32o0", "C4.S32", "f64", "c8.r0"])
def test_other_names_are_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(InvalidError, match=f'"{name}"; known: f32, .*c4.km32.*mx4.e32'):
        formats.parse(name)


def test_bf16c_has_a_widest_matrix() -> None:
    assert formats.parse("bf16c").takes(65536)
    assert not formats.parse("bf16c").takes(65537)
    assert formats.parse("bf16").takes(65537)
