"""What plans leave of an accelerator's memory, and what they say of one that is slow at bf16."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan, study

from helm.machine.devices import Accelerator
from helm.machine.profile import Profile, load_profile
from helm.machine.resources import read_machine
from helm.measure import profile_cache
from helm.model.checkpoint import TensorInfo
from helm.model.families import build_graph
from helm.plan.records import Workload
from helm.plan.schema import Plan
from helm.session.here import LoadOptions, Target, plan_here
from helm.session.host_memory import pageable
from search_cases import config_of

GIB, MIB = 1 << 30, 1 << 20
CONFIG = config_of("qwen3-8b")


def device(kind: str, free_gib: float) -> Accelerator:
    free_bytes = int(free_gib * GIB)
    return Accelerator(kind, kind, "a card", 8 * GIB, free_bytes)


def plan_of(found: Accelerator, **options: Any) -> Plan:
    graph = build_graph(CONFIG)
    infos = {n: TensorInfo.in_memory(n, "bf16", shape) for n, shape in graph.tensors.items()}
    machine = dataclasses.replace(read_machine(), memory_bytes=64 * GIB, threads=14)
    target = Target(machine, found, load_profile("thesis-4060"))
    return plan_here(CONFIG, infos, LoadOptions(context=4096, max_sequences=1, **options), target)


@pytest.mark.parametrize(
    ("kind", "vram_gib", "reserve_mib", "most_gib"),
    [
        ("cuda", None, 256, 7.5),  # free beside the context
        ("cuda", 20, 256, 7.5),
        ("cuda", 7.5, 512, 7.5),  # of the cap, the context takes its part
        ("cuda", 6, 512, 6),
        ("sim", None, 512, 7.5),  # stands for a card before there is a context
    ],
)
def test_the_context_is_not_reserved_twice(
    kind: str, vram_gib: float | None, reserve_mib: int, most_gib: float
) -> None:
    vram_bytes = None if vram_gib is None else int(vram_gib * GIB)
    use = plan_of(device(kind, 7.5), vram_bytes=vram_bytes).memory["accelerator"]
    assert use.reserve_bytes == reserve_mib * MIB
    assert use.total_bytes <= most_gib * GIB
    assert use.total_bytes > 0.85 * most_gib * GIB  # no more is left than a block takes


def test_a_profile_says_what_is_to_be_left_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    preset = load_profile("thesis-4060")
    own, link = preset.accelerator, preset.link
    assert own is not None
    for found, reserve in ((device("cuda", 7.5), 256), (device("sim", 7.5), 512)):
        profile = profile_cache.machine_profile(
            found,
            measure=lambda _progress: dataclasses.replace(preset, accelerator=None, link=None),
            measure_device=lambda *_: (own, link, ()),
        )
        assert Profile.from_json(profile.to_json()) == profile
        profile = dataclasses.replace(
            profile, cpu=dataclasses.replace(profile.cpu, memory_bytes=64 * GIB)
        )
        for request, expected in (({}, reserve), ({"vram_bytes": 6 * GIB}, 512)):
            made = study("model", CONFIG, None, profile, **request)
            assert made.plan.memory["accelerator"].reserve_bytes == expected * MIB
            assert made.best.memory["accelerator"]["reserve"] == expected * MIB


def with_bf16(share: float) -> Profile:
    """A machine whose accelerator multiplies bf16 at this share of its f16 rate."""
    profile = load_profile("thesis-4060")
    own = profile.accelerator
    assert own is not None
    rates = own.matmul_flops["f16"]
    slow = {tokens: rate * (share if tokens > 8 else 1.0) for tokens, rate in rates.items()}
    own = dataclasses.replace(own, matmul_flops={**own.matmul_flops, "bf16": slow})
    return dataclasses.replace(profile, accelerator=own)


def notices_and_ttft(profile: Profile, dtype: str = "auto") -> tuple[list[str], float]:
    plan = make_plan(
        CONFIG, None, profile=profile, workload=Workload(512, 128, 1, 4096), dtype=dtype,
        memory_bytes=64 * GIB, max_sequences=1,
    )  # fmt: skip
    assert plan.prediction is not None
    return [n for n in plan.notices if "bf16" in n], plan.prediction.predicted.ttft_s


def test_bf16_that_an_accelerator_is_slow_at_is_priced_and_told() -> None:
    notices, ttft_s = notices_and_ttft(with_bf16(0.1))
    assert len(notices) == 1
    assert "at 0.1 of its f16 rate" in notices[0]
    assert "dtype='f16'" in notices[0]
    assert ttft_s > notices_and_ttft(with_bf16(1.0))[1]
    assert notices_and_ttft(with_bf16(0.1), "f16")[0] == []
    assert notices_and_ttft(with_bf16(1.0))[0] == []


def test_memory_that_could_not_be_page_locked_is_told() -> None:
    assert pageable({"pageable_bytes": 0}) == []
    (notice,) = pageable({"pageable_bytes": 3 * GIB})
    assert notice.startswith("3.00 GiB of weights and KV pages")
