"""Slices of plans as JSON: which formats and which access they may have."""

from __future__ import annotations

import dataclasses

import pytest

from engine_helpers import partitioned
from helm.errors import PlanError
from helm.plan.schema import Plan
from small_plans import plan_of


def split_plan(**changes):
    """A tied model with its blocks on two devices: the embedding is a tensor of both."""
    plan = plan_of("llama_tied_sharded", "bf16", dtype="auto")
    devices = ("cpu",) * (len(plan.units) - 1) + ("accelerator",)
    return dataclasses.replace(partitioned(plan, devices), **changes)


def with_slice(plan, device, tensor_ending, **changes):
    """`plan` with one slice changed; all that end so, of that device."""
    slices = tuple(
        dataclasses.replace(held, **changes)
        if held.device == device and held.tensor.endswith(tensor_ending)
        else held
        for held in plan.slices
    )
    assert slices != plan.slices
    return dataclasses.replace(plan, slices=slices)


def test_a_tied_matrix_may_have_a_format_on_each_device():
    plan = split_plan()
    assert [held.device for held in plan.slices if "embed" in held.tensor] == ["cpu", "accelerator"]
    both = with_slice(plan, "cpu", "embed_tokens.weight", format="bf16c")
    assert Plan.from_json(both.to_json()) == both
    assert (plan.loading, both.loading) == ("copied", "compressed")


@pytest.mark.parametrize(
    ("device", "ending", "changes", "message"),
    [
        ("accelerator", "embed_tokens.weight", {"format": "bf16c"}, "bf16c is for the CPU alone"),
        ("accelerator", "embed_tokens.weight", {"access": "mapped"}, "are for the CPU alone"),
        ("cpu", "layernorm.weight", {"format": "bf16"}, "vectors are held as f32"),
        ("cpu", "layernorm.weight", {"access": "mapped"}, "cannot be mapped"),
        ("cpu", "embed_tokens.weight", {"format": "c4.km32", "access": "mapped"}, "cannot be"),
    ],
)
def test_what_a_slice_may_not_be(device, ending, changes, message):
    text = with_slice(split_plan(), device, ending, **changes).to_json()
    with pytest.raises(PlanError, match=rf"slices\[\d+\]\.(format|access): .*{message}"):
        Plan.from_json(text)


def test_weights_that_visit_are_not_compressed():
    schedule = split_plan().schedule
    visits = dataclasses.replace(schedule, prefill="visit", visit_tokens=4, visit_pages=1)
    for ending, allowed in (("embed_tokens.weight", True), ("up_proj.weight", False)):
        plan = with_slice(split_plan(), "cpu", ending, format="bf16c")
        assert Plan.from_json(plan.to_json()) == plan
        plan = dataclasses.replace(plan, schedule=visits)
        if allowed:
            assert Plan.from_json(plan.to_json()) == plan
            continue
        with pytest.raises(PlanError, match=r"format: weights that visit .* cannot be bf16c"):
            Plan.from_json(plan.to_json())


def test_mapped_weights_are_one_dense_aligned_run():
    plan = plan_of("llama", "f32")
    name = next(t.name for t in plan.tensors if len(t.shape) == 2)
    mapped = with_slice(plan, "cpu", name, access="mapped")
    assert Plan.from_json(mapped.to_json()) == mapped

    def stored(**source):
        tensors = tuple(
            dataclasses.replace(t, source=dataclasses.replace(t.source, **source))
            if t.name == name
            else t
            for t in mapped.tensors
        )
        return dataclasses.replace(mapped, tensors=tensors).to_json()

    rows, cols = plan.tensors[0].shape
    one = plan.tensors[0].source.extents[0]
    half = dataclasses.replace(one, rows=rows // 2)
    rest = dataclasses.replace(one, rows=rows - rows // 2, offset=one.offset + rows // 2 * cols * 4)
    for source in (
        {"extents": (half, rest)},
        {"extents": (dataclasses.replace(one, row_stride=4 * cols + 4),)},
        {"extents": (dataclasses.replace(one, offset=one.offset + 2),)},
        {"stored": "f16"},
    ):
        with pytest.raises(PlanError, match=r"slices\[\d+\]\.access: cannot be mapped"):
            Plan.from_json(stored(**source))
    wide = dataclasses.replace(one, row_stride=4 * cols)
    with pytest.raises(PlanError, match=r"slices\[\d+\]\.access: cannot be mapped"):
        Plan.from_json(stored(extents=(wide,)))  # side by side, but does not say so
    mapped = plan
    assert Plan.from_json(stored(extents=(half, rest))).slices == plan.slices
