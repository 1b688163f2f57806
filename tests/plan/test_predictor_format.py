"""A plan's tables of seconds: the round trip, and hostile ones."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from plans import study

from helm import _helm
from helm.errors import PlanError
from helm.machine.profile import load_profile
from helm.plan.schema import Plan
from search_cases import config_of


@functools.cache
def text_of() -> str:
    """A plan with tables, as JSON."""
    found = study(
        "qwen3-8b", config_of("qwen3-8b"), None, load_profile("rtx-3090-24gb-ddr4"),
        objective="decode", batch=8, context=16384, kv_vram_bytes=2 << 30, kv_overflow="cpu",
    )  # fmt: skip
    return found.plan.to_json()


def test_tables_survive_the_text_of_a_plan() -> None:
    text = text_of()
    plan = Plan.from_json(text)
    assert plan.predictor is not None
    assert plan.to_json() == text
    assert _helm.program(text)  # the runtime reads them, too


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("rows",), [], "predictor.rows: expected 1 to 64 counts of rows, found 0"),
        (("rows", 0), 2, r"predictor.rows\[0\]: expected counts that rise from 1, found 2"),
        (("rows", 1), 1, r"predictor.rows\[1\]: expected counts that rise"),
        (("rows", 1), 1.5, r"predictor.rows\[1\]: expected an integer"),
        (("cpu_s",), [1.0], "predictor.cpu_s: expected .* entries, as rows has, found 1"),
        (("head_s", 1), -1.0, r"predictor.head_s\[1\]: expected a number from 0"),
        (("attention",), [], "predictor.attention: expected 1 to 16 kinds"),
        (("attention", 0, "near_s"), -1.0, r"attention\[0\].near_s: expected a number from 0"),
        (("attention", 0, "pair_s"), [1.0], r"attention\[0\].pair_s: expected .* entries"),
        (("attention", 0, "window"), -1, r"attention\[0\].window: expected an integer"),
        (("attention", 0, "more"), 1, r"attention\[0\]: unknown key 'more'"),
        (("answer_row_s",), "1", "predictor.answer_row_s: expected a finite number"),
        (("step_s",), 1e299, "predictor.step_s: expected a number from 0 to 1e"),
        (("attention", 0, "far_beside_s"), 0.0, r"far_beside_s: expected no less than far_s"),
        (("accelerator_beside_s", 1), 0.0, r"beside_s\[1\]: expected no less than accelerator_s"),
    ],
)
def test_hostile_tables_are_refused_by_name(path: Any, value: Any, said: str) -> None:
    document = json.loads(text_of())
    node = document["predictor"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(PlanError, match=said):
        Plan.from_json(json.dumps(document))


def test_a_plan_for_the_cpu_alone_has_no_tables() -> None:
    profile = load_profile("cpu-desktop-64gb-ddr5")
    document = study("qwen3-8b", config_of("qwen3-8b"), None, profile).plan.to_dict()
    assert "predictor" not in document
    document["predictor"] = json.loads(text_of())["predictor"]
    with pytest.raises(PlanError, match="expected null, as all units lie on the CPU"):
        Plan.from_json(json.dumps(document))
