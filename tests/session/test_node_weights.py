"""Weights that memory near the cores does not hold lie on another node: the same tokens, and on the
node the bytes that were planned. This machine's only node stands for a slower one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import helm
from helm import _helm
from helm.errors import OutOfMemoryError
from helm.machine.profile import Profile, load_profile
from helm.machine.rates import CpuProfile, MemoryTier
from helm.session import here
from synthetic_folder import synthetic_folder

PROMPT = list(range(3, 40))
NODE = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_folder(tmp_path_factory.mktemp("nodes"))


def machine(accelerator: bool = False) -> Profile:
    found = load_profile("thesis-3090")
    return found if accelerator else dataclasses.replace(found, accelerator=None, link=None)


def options(**more: Any) -> dict[str, Any]:
    return {"context": 128, "max_sequences": 2, "threads": 2, "device": "cpu", "weights": "copied",
            "profile": machine(), "speculate": "off", **more}  # fmt: skip


def tokens(llm: helm.LLM) -> list[int]:
    return llm.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens


def with_tier(monkeypatch: pytest.MonkeyPatch, near: int, size: int, node: int = NODE) -> None:
    """As if the machine had `near` bytes near its cores, and `size` on the node."""

    def found(cpu: CpuProfile, memory_bytes: int, affinity: Collection[int]) -> CpuProfile:
        assert memory_bytes > 0
        assert affinity
        tiers = (MemoryTier(node, size, 5e9),)
        return dataclasses.replace(cpu, memory_bytes=near + size, tiers=tiers)

    monkeypatch.setattr(here, "tiers_here", found)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[list[int], int]:
    """Tokens of the run in near memory, and what it takes of that."""
    with helm.LLM(folder, **options()) as llm:
        use = llm.plan.memory["cpu"]
        assert llm.stats["node_bytes"] == {}
        return tokens(llm), use.total_bytes + use.reserve_bytes


def needs_binding() -> None:
    if why := _helm.memory_node_refusal(NODE):
        pytest.skip(f"memory cannot be placed on a node here: {why}")


def test_tokens_are_the_same_and_bytes_lie_where_they_were_planned(
    folder: Path, whole: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_binding()
    expected, needed = whole
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    near = needed - weights * 3 // 5
    with_tier(monkeypatch, near, weights)
    with helm.LLM(folder, **options(memory_bytes=near + weights)) as llm:
        plan, stats = llm.plan, llm.stats
        assert tokens(llm) == expected
        assert stats["node_bytes"] == plan.node_bytes
        assert weights // 2 < plan.node_bytes[NODE] < weights * 3 // 4
        use = plan.memory["cpu"]
        assert use.total_bytes + use.reserve_bytes - plan.node_bytes[NODE] <= near
        assert stats["devices"][0]["weights_bytes"] == use.weights_bytes
        assert any("lie on memory node 0" in notice for notice in plan.notices)
        maps = Path("/proc/self/numa_maps")
        if maps.exists():
            assert f"bind:{NODE} " in maps.read_text()


def test_beside_an_accelerator_the_cpu_s_part_of_cut_layers_lies_there(
    folder: Path, whole: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_binding()
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    given = options(
        device="sim:vram=1GiB,threads=1", profile=machine(accelerator=True),
        vram_bytes=(512 << 20) + weights // 2, policy="cut",
    )  # fmt: skip
    with helm.LLM(folder, **given) as llm:
        use = llm.plan.memory["cpu"]
        expected, needed = tokens(llm), use.total_bytes + use.reserve_bytes
        held = use.weights_bytes
    near = needed - held // 2
    with_tier(monkeypatch, near, weights)
    with helm.LLM(folder, **{**given, "memory_bytes": near + weights}) as llm:
        assert llm.plan.units_cut > 0
        assert llm.plan.node_bytes[NODE] >= 0.9 * (held // 2)
        assert llm.stats["node_bytes"] == llm.plan.node_bytes
        assert tokens(llm) == expected


def test_a_node_that_the_system_refuses_is_named(
    folder: Path, whole: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, needed = whole
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    near = needed - weights // 2
    with_tier(monkeypatch, near, weights, node=1023)
    with pytest.raises(OutOfMemoryError, match=r"memory node 1023 \("):
        helm.LLM(folder, **options(memory_bytes=near + weights))
