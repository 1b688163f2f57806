"""An op says what it is, what it does with values and what it weighs, or nothing is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from helm.compiler.counts import check_counted
from helm.model.graph import OPS, Select

ROOT = Path(__file__).resolve().parents[2]
OPS_H = ROOT / "cpp" / "include" / "helm" / "ops.h"
FACTS = {
    "kKind": r"  static constexpr OpKind kKind = OpKind::kSelect;\n",
    "values": r"  template <typename Width, typename Use>\n  void values\([^}]*}\n",
    "tensors": r"  template <typename Use>\n  void tensors\([^}]*}",
}


def compiles(header: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "helm").mkdir()
    (folder / "helm" / "ops.h").write_text(header)
    (folder / "use.cc").write_text('#include "helm/ops.h"\n')
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-I", folder, "-I", OPS_H.parents[1]]
    return subprocess.run([*command, folder / "use.cc"], capture_output=True, text=True)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
@pytest.mark.parametrize("fact", [None, *FACTS])
def test_an_op_without_a_fact_does_not_compile(fact: str | None, tmp_path: Path) -> None:
    header = OPS_H.read_text()
    if fact is not None:
        begin = header.index("struct SelectOp")
        end = header.index("\n};\n", begin)
        body, count = re.subn(FACTS[fact], "", header[begin:end])
        assert count == 1
        header = header[:begin] + body + header[end:]
    result = compiles(header, tmp_path)
    assert (result.returncode == 0) == (fact is None), result.stderr
    if fact is not None:
        assert "every op says its kind, values and tensors" in result.stderr


def test_an_op_without_a_cost_does_not_import() -> None:
    class Sort(Select):
        op = "sort"

    check_counted(OPS.values())
    with pytest.raises(TypeError, match="does not say what Sort cost"):
        check_counted([*OPS.values(), Sort])


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_names_are_fields(op: type) -> None:
    assert set(op.names) <= set(op.__dataclass_fields__)  # type: ignore[attr-defined]
