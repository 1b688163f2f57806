"""Programs of plans by hand, as the engine lowers them: what a step of each kind enqueues.

Qwen3-0.6B with three layers: every site of embedding and head, layers that visit, KV pages that do
not fit, a layer on two devices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from plans import make_plan

from engine_helpers import partitioned
from helm import _helm
from helm.model.families import parse_config
from helm.plan.schema import Plan

SHAPES = Path(__file__).resolve().parents[2] / "bench" / "shapes.json"
# Of the embedding, every layer and the head, or of every unit: c or a, the accelerator.
PLACES = ("ccccc", "cccac", "cccaa", "accac", "accaa", "cacac", "aaaaa", "cacaccac")


def cases() -> list[str]:
    """Their names, in a fixed order: places and what else the plan says."""
    changes = ("rest", "visits-overflow-cpu")
    return [f"{places}/{change}" for places in PLACES for change in changes]


def outcome(case: str) -> dict[str, Any]:
    """The lines of each program by its first line."""
    places, change = case.split("/")
    plan = partitioned(_plan(), [{"c": "cpu", "a": "accelerator"}[at] for at in places])
    texts = _helm.program(_changed(plan, change).to_json())
    return {lines[0]: lines[1:] for lines in (text.split("\n") for text in texts)}


@functools.cache
def _plan() -> Plan:
    shape = {**json.loads(SHAPES.read_text())["qwen3-0.6b"], "num_hidden_layers": 3}
    return make_plan(
        parse_config(shape, "qwen3"), None, threads=2, context=1024, page_tokens=64,
        memory_bytes=16 << 30, step_tokens=256, max_sequences=4,
    )  # fmt: skip


def _changed(plan: Plan, change: str) -> Plan:
    schedule = plan.schedule
    if "visits" in change:
        schedule = dataclasses.replace(
            schedule, prefill="visit", visit_tokens=4, visit_pages=plan.kv.pages
        )
    if "overflow" in change:
        own = schedule.pages["accelerator"] // 2
        pages = {"cpu": plan.kv.pages - own, "accelerator": own}
        site = change.rpartition("-")[2]
        schedule = dataclasses.replace(schedule, pages=pages, overflow=site)
    return dataclasses.replace(plan, schedule=schedule)
