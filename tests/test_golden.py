"""A sample of plans and logits, and all programs, are what was recorded.

`tests/golden/run --check` looks at all.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from golden import compare


def test_a_sample_is_what_was_recorded() -> None:
    found = compare.outcomes(compare.KINDS, "scalar", compare.SHORT)
    assert len(found["plans"]) > 20
    assert len(found["programs"]) > 10
    assert len(found["logits"]) > 5
    assert compare.differences(compare.read(compare.RECORDED), found) == []


@pytest.mark.parametrize("kind", compare.KINDS)
def test_a_change_is_named(kind: str, tmp_path: Path) -> None:
    recorded = compare.read(compare.RECORDED)
    compare.write(tmp_path / "copy.json", recorded)
    assert (tmp_path / "copy.json").read_bytes() == compare.RECORDED.read_bytes()
    changed = copy.deepcopy(recorded)
    case = next(c for c, outcome in recorded[kind].items() if "refused" not in outcome)
    if kind == "plans":
        changed[kind][case]["fields"]["units"] = "another"
        changed[kind][case]["figures"]["ttft_s"] *= 1 + 1e-12
        name = "fields.units"
    else:
        name = next(iter(changed[kind][case]))
        changed[kind][case][name] = "another"
    (line,) = compare.differences(recorded, changed)
    assert line.startswith(f"{kind} {case}: {name} was ")
    del recorded[kind][case]
    assert compare.differences(recorded, changed) == [f"{kind} {case}: not recorded"]


def test_predicted_figures_have_a_tolerance() -> None:
    recorded = compare.read(compare.RECORDED)
    changed = json.loads(json.dumps(recorded))
    outcome = next(o for o in changed["plans"].values() if "figures" in o)
    outcome["figures"]["decode_s"] *= 1 + 1e-6
    assert len(compare.differences(recorded, changed)) == 1
