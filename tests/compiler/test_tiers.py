"""Weights on slower memory nodes: which, how many bytes, and what that makes of the prediction."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import helm
from helm.compiler.solve import Study
from helm.compiler.tiers import shares_of
from helm.errors import OutOfMemoryError, ProfileError
from helm.machine.profile import Profile, load_profile
from helm.machine.rates import MemoryTier
from helm.plan.schema import Plan
from helm.plan.units import CPU
from helm.plan.weights import slice_bytes
from search_cases import GIB

MODEL = "tests/data/configs/qwen3-8b.json"  # 15.3 GiB, of which the embedding has 1.2


def machine(
    near: float, *tiers: MemoryTier, accelerator: bool = False, name: str = "thesis-4060"
) -> Profile:
    """With so many GiB near the cores."""
    profile = load_profile(name)
    size = int(near * GIB) + sum(tier.memory_bytes for tier in tiers)
    profile = dataclasses.replace(
        profile, cpu=dataclasses.replace(profile.cpu, memory_bytes=size, tiers=tiers)
    )
    return profile if accelerator else dataclasses.replace(profile, accelerator=None, link=None)


def cxl(size: float = 64, rate: float = 1e10, node: int = 2) -> MemoryTier:
    return MemoryTier(node, int(size * GIB), rate)


def study(profile: Profile, model: str = MODEL, **options: Any) -> Study:
    given = {"context": 1024, "max_sequences": 1, "weights": "copied", **options}
    return helm.study(model, profile=profile, **given)


def decode_s(found: Study) -> float:
    return found.best.predicted.decode_s


def near_bytes(plan: Plan) -> int:
    """That a plan takes near the cores, with what it leaves."""
    use = plan.memory[CPU]
    return use.total_bytes + use.reserve_bytes - sum(plan.node_bytes.values())


def test_near_memory_is_used_alone_where_a_plan_fits_there() -> None:
    alone, beside = study(machine(24)), study(machine(24, cxl()))
    assert beside.plan.node_bytes == {}
    assert beside.best == alone.best
    assert not any("memory node" in notice for notice in beside.plan.notices)


@pytest.mark.parametrize("near", [4.0, 6.5, 9.0])
def test_what_does_not_fit_near_lies_on_the_node_to_the_byte(near: float) -> None:
    found = study(machine(near, cxl()))
    plan = found.plan
    assert near_bytes(plan) <= near * GIB
    sizes = slice_bytes(plan.tensors, plan.slices, CPU)
    lying = {held.tensor for held in plan.slices if held.node == 2}
    assert plan.node_bytes == {2: sum(sizes[name] for name in lying)}
    least = min(size for name, size in sizes.items() if size > GIB >> 8)
    assert near_bytes(plan) > near * GIB - 0.1 * GIB - least  # and little more
    assert Plan.from_json(plan.to_json()) == plan
    assert "of weights lie on memory node 2" in " ".join(plan.notices)


def test_rows_of_an_embedding_are_the_first_to_go_and_cost_nothing() -> None:
    whole = study(machine(24))
    room = near_bytes(whole.plan) / GIB
    found = study(machine(room - 0.5, cxl()))
    names = {held.tensor for held in found.plan.slices if held.node == 2}
    assert names == {"model.embed_tokens.weight"}
    assert decode_s(found) == decode_s(whole)
    assert shares_of(found.plan, (cxl(),)) == (0.0,)


def test_a_step_reads_each_byte_at_the_rate_of_where_it_lies() -> None:
    whole = study(machine(24))
    cpu = whole.profile.cpu
    found = study(machine(8, cxl(rate=1e10)))
    (share,) = shares_of(found.plan, (cxl(),))
    assert 0.3 < share < 0.6
    own, wanted = (s.best.predicted.decode_terms["cpu_memory_s"] for s in (whole, found))
    ratio = cpu.thread_sweep[cpu.threads] / 1e10
    assert wanted == pytest.approx(own * (1 - share + share * ratio), rel=0.02)


def test_every_unit_has_the_same_part_there() -> None:
    plan = study(machine(8, cxl())).plan
    sizes = slice_bytes(plan.tensors, plan.slices, CPU)
    nodes = {held.tensor: held.node for held in plan.slices}
    parts = []
    for layers in (range(at, at + 9) for at in range(0, 36, 9)):
        names = {
            name
            for unit in plan.units
            if unit.layer in layers
            for op in unit.ops
            for name in op.weight_names()
        }
        there = sum(sizes[name] for name in names if nodes[name] == 2)
        parts.append(there / sum(sizes[name] for name in names))
    assert max(parts) - min(parts) < 0.1


def test_a_faster_node_is_never_worse_and_a_larger_one_neither() -> None:
    by_rate = [decode_s(study(machine(8, cxl(rate=rate)))) for rate in (2e9, 5e9, 2e10, 1e12)]
    assert by_rate == sorted(by_rate, reverse=True)
    assert by_rate[0] > 1.5 * by_rate[-1]
    assert decode_s(study(machine(24))) <= by_rate[-1] * (1 + 1e-9)
    by_room = [decode_s(study(machine(near, cxl()))) for near in (4, 8, 12, 24)]
    assert by_room == sorted(by_room, reverse=True)


def test_of_several_nodes_the_fastest_has_what_is_read_most() -> None:
    tiers = cxl(4, 2e10, 3), cxl(32, 5e9, 1)
    plan = study(machine(8, *tiers)).plan
    assert set(plan.node_bytes) == {1, 3}
    assert plan.node_bytes[3] <= 4 * GIB
    assert plan.node_bytes[3] > 3.8 * GIB
    embedding = next(h for h in plan.slices if h.tensor == "model.embed_tokens.weight")
    assert embedding.node == 1


def test_an_accelerator_takes_what_it_can_first() -> None:
    found = study(machine(4, cxl(), accelerator=True), vram_bytes=8 * GIB)
    alone = study(machine(24, accelerator=True), vram_bytes=8 * GIB)
    assert found.best.uses_accelerator
    assert 0 < found.plan.node_bytes[2] < 9 * GIB
    assert near_bytes(found.plan) <= 4 * GIB
    assert decode_s(alone) < decode_s(found)
    assert decode_s(found) < decode_s(study(machine(4, cxl())))


def test_what_comes_over_a_link_is_no_slower_from_a_node_that_is_as_fast() -> None:
    """Weights that visit in every step."""
    rates = {"near": 0.0, "fast": 5e10, "slow": 5e9}
    found = {}
    for name, rate in rates.items():
        tiers = (cxl(rate=rate),) if rate else ()
        profile = machine(8 if rate else 24, *tiers, accelerator=True)
        assert profile.link is not None
        assert 5e9 < profile.link.to_accelerator_bytes_per_s < 5e10
        found[name] = study(profile, policy="all-cpu")
    assert found["fast"].plan.node_bytes[2] > 6 * GIB
    assert decode_s(found["fast"]) == pytest.approx(decode_s(found["near"]), rel=0.02)
    assert decode_s(found["slow"]) > 1.3 * decode_s(found["near"])


def test_no_room_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match="lacks"):
        study(machine(4, cxl(4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"node": -1, "memory_bytes": 1, "bytes_per_s": 1e9}], r"cpu\.tiers\[0\]\.node"),
        ([{"node": 1, "memory_bytes": 1 << 50, "bytes_per_s": 1e9}], r"tiers\[0\]\.memory_bytes"),
        ([{"node": 1, "memory_bytes": 1, "bytes_per_s": 0}], r"tiers\[0\]\.bytes_per_s"),
        ([{"node": 1, "memory_bytes": 1}], r"tiers\[0\]"),
        ([{"node": 1, "memory_bytes": 1, "bytes_per_s": 1e9}] * 2, "node 1 is listed|1 is listed"),
        (
            [
                {"node": 1, "memory_bytes": 1, "bytes_per_s": 1e9},
                {"node": 2, "memory_bytes": 1, "bytes_per_s": 2e9},
            ],
            "the fastest first",
        ),
    ],
)
def test_tiers_of_a_profile_are_checked(changes: list[dict[str, Any]], message: str) -> None:
    profile = machine(8, cxl())
    assert Profile.from_json(profile.to_json()) == profile
    document = profile.to_dict()
    document["cpu"]["tiers"] = changes
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(json.dumps(document))


def test_why_a_node_is_left_out_is_told() -> None:
    profile = machine(24)
    why = "memory node 2 is left out, the system says: Operation not permitted"
    profile = dataclasses.replace(profile, cpu=dataclasses.replace(profile.cpu, left_out=(why,)))
    assert Profile.from_json(profile.to_json()) == profile
    assert why in profile.notices
    assert why in study(profile).plan.notices
