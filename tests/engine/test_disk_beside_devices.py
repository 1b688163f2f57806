"""Weights read from disk in every step while a device holds other layers: the bits are those of the
run in memory, the bytes those of the plan."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small_models
from engine_helpers import greedy, logits_in_chunks, partitioned, prompt_of
from helm import _helm
from helm.compiler.program import lower
from helm.errors import HelmError, InvalidError, PlanError
from helm.plan.disk import disk_units, on_disk
from helm.plan.schema import Plan
from small_plans import plan_of

NAME = "llama_deep"  # five layers
LETTERS = {"c": "cpu", "d": "cpu", "a": "accelerator"}  # d: of the CPU, with matrices on disk
PROMPTS = [prompt_of(n) for n in (37, 5, 61)]
# Of the embedding, the layers and the head; a layer on disk may come behind one of the device.
LAYOUTS = ("cddaaaa", "cdcdaaa", "cadadac", "cdaaadc", "aadaada")


@functools.cache
def whole() -> tuple[Plan, Path]:
    plan = plan_of(NAME, "f32", context=100, page_tokens=16, step_tokens=24, max_sequences=3)
    return plan, Path(small_models.model_dir(NAME, "f32"))


def beside(layout: str, rings: int = 1, visits: bool = False) -> Plan:
    """rings: how many of the largest units the ring holds. visits: in steps of many tokens layers
    of the CPU visit the accelerator."""
    plan, _ = whole()
    own = partitioned(plan, tuple(LETTERS[each] for each in layout))
    layers = {number - 1 for number, each in enumerate(layout) if each == "d"}
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    names = {
        name
        for unit in own.units if unit.layer in layers
        for op in unit.ops for name in op.weight_names() if len(shapes[name]) > 1
    }  # fmt: skip
    slices = on_disk(own.slices, names)
    ring = dataclasses.replace(own.schedule, disk_ring_bytes=1 << 40)
    sizes = disk_units(dataclasses.replace(own, slices=slices, schedule=ring))
    most = max(unit.read_bytes for unit in sizes)
    schedule = dataclasses.replace(own.schedule, disk_ring_bytes=rings * most)
    if visits:
        schedule = dataclasses.replace(
            schedule, prefill="visit", visit_tokens=5, visit_pages=plan.kv.blocks
        )
    return dataclasses.replace(own, slices=slices, schedule=schedule)


def outcome(plan: Plan, folder: Path, device: str) -> tuple[Any, list[list[int]], dict[str, Any]]:
    """Logits of a prompt in steps of 7 tokens, tokens of several requests, and what was done."""
    engine = _helm.Engine(plan.to_json(), str(folder), {}, device=device)
    logits = logits_in_chunks(engine, PROMPTS[0], 7)
    return logits, greedy(engine, PROMPTS, 6), engine.stats


@functools.cache
def in_memory() -> tuple[Any, list[list[int]]]:
    plan, folder = whole()
    return outcome(plan, folder, "cpu")[:2]


@pytest.mark.parametrize("visits", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_are_those_of_the_run_in_memory(layout: str, visits: bool) -> None:
    want, tokens = in_memory()
    for rings, device in ((1, "sim:jitter=100us"), (3, "sim")):
        plan = beside(layout, rings, visits)
        text = plan.to_json()
        assert Plan.from_json(text) == plan
        assert [program.text() for program in lower(plan)] == _helm.program(text)
        got, same, stats = outcome(plan, whole()[1], device)
        assert np.array_equal(got, want)
        assert same == tokens
        planned = sum(unit.read_bytes for unit in disk_units(plan))
        assert (stats["streamed_steps"] > len(PROMPTS[0]) // 7) == visits
        assert stats["disk_step_bytes"] == planned
        assert stats["disk_used_bytes"] % planned == 0
        assert stats["disk_used_bytes"] >= planned * (6 + len(PROMPTS[0]) // 7)
        ahead = stats["disk_read_bytes"] - stats["disk_used_bytes"]
        assert 0 <= ahead <= plan.schedule.disk_ring_bytes


def test_a_file_that_changes_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole()[1], folder)
    engine = _helm.Engine(beside("cddaaaa").to_json(), str(folder), {}, device="sim")
    greedy(engine, PROMPTS, 2)
    for file in folder.glob("*.safetensors"):
        before = file.stat()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    with pytest.raises(HelmError, match="was written to since the model was loaded"):
        greedy(engine, PROMPTS, 20)


def changed(name: str) -> str:
    plan = beside("cddaaaa")
    if name == "slices":
        held = {own.tensor for own in plan.slices if own.access == "disk"}
        units = tuple(
            dataclasses.replace(unit, device="accelerator")
            if held & {n for op in unit.ops for n in op.weight_names()} else unit
            for unit in plan.units
        )  # fmt: skip
        pages = {"cpu": 0, "accelerator": plan.kv.pages}
        order = dataclasses.replace(plan.schedule, pages=pages)
        slices = tuple(
            dataclasses.replace(own, device="accelerator")
            if len(next(t.shape for t in plan.tensors if t.name == own.tensor)) == 1
            and "layers" in own.tensor else own
            for own in plan.slices
        )  # fmt: skip
        return dataclasses.replace(plan, units=units, slices=slices, schedule=order).to_json()
    value = {"decode_groups": 2, "prefill_overlap": True}[name]
    schedule = dataclasses.replace(plan.schedule, **{name: value})
    return dataclasses.replace(plan, schedule=schedule).to_json()


@pytest.mark.parametrize("name", ["decode_groups", "prefill_overlap", "slices"])
def test_both_readers_refuse_what_cannot_be_read_in_order(name: str) -> None:
    text = changed(name)
    with pytest.raises(PlanError, match=rf"{name}.*(read from disk|read from there)"):
        Plan.from_json(text)
    with pytest.raises(InvalidError, match=rf"{name}.*(read from disk|read from there)"):
        _helm.program(text)
