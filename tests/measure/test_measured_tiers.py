"""How fast other memory nodes are, and what is said where they may not be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from helm.errors import OutOfMemoryError
from helm.machine.memory_nodes import MemoryNode
from helm.machine.rates import MemoryTier
from helm.measure.tiers import measure_tiers

GIB = 1 << 30
FREE = {1: 32, 2: 16, 3: 0, 4: 8}
NODES = [MemoryNode(node, False, 64 * GIB, free * GIB) for node, free in FREE.items()]


@dataclass
class Timing:
    flops: float
    bytes: float
    run_s: list[float]
    undisturbed_s: list[float]


class Probe:
    """Of a node that is read at so many bytes per second."""

    made: ClassVar[list[tuple[int, tuple[int, ...], int]]] = []

    def __init__(self, size: int, cpus: list[int], node: int) -> None:
        self.made.append((size, tuple(cpus), node))
        if node == 4:
            raise OutOfMemoryError("[probe] no memory on node 4: Cannot allocate memory")
        self.rate = {1: 1e10, 2: 2e10}[node]

    def matmul(self, threads: int, format: str, tokens: int, seconds: float) -> list[Timing]:
        assert (threads, format, tokens) == (3, "bf16", 1)
        runs = [1e8 / self.rate] * 4
        return [Timing(1.0, 1e8, runs, runs)]


def measured(refused: dict[int, str]) -> tuple[tuple[MemoryTier, ...], tuple[str, ...]]:
    Probe.made.clear()
    return measure_tiers(
        NODES, 3, [0, 1, 2], GIB, lambda what, share: None,
        refusal=lambda node: refused.get(node, ""), probe=Probe,
    )  # fmt: skip


def test_each_node_that_may_be_used_is_a_tier_the_fastest_first() -> None:
    tiers, left_out = measured({})
    assert [(tier.node, tier.memory_bytes) for tier in tiers] == [(2, 15 * GIB), (1, 30 * GIB)]
    assert [tier.bytes_per_s for tier in tiers] == pytest.approx([2e10, 1e10])
    assert Probe.made == [(GIB, (0, 1, 2), node) for node in (1, 2, 4)]
    assert len(left_out) == 1
    assert "memory node 4" in left_out[0]
    assert "Cannot allocate memory" in left_out[0]


def test_a_node_that_is_refused_is_left_out_and_why() -> None:
    tiers, left_out = measured({2: "Operation not permitted"})
    assert [tier.node for tier in tiers] == [1]
    assert left_out[0] == "memory node 2 is left out, the system says: Operation not permitted"
    assert all(node != 2 for *_, node in Probe.made)


def test_the_probe_reads_from_the_node_that_it_is_told() -> None:
    from helm import _helm

    with pytest.raises(OutOfMemoryError, match="no memory on node 1023"):
        _helm.StageProbe(1, [0], node=1023)
    assert _helm.memory_node_refusal(1023) != ""
    if why := _helm.memory_node_refusal(0):
        pytest.skip(f"memory cannot be placed here: {why}")
    node = MemoryNode(0, False, 4 * GIB, 4 * GIB)
    (tier,), left_out = measure_tiers([node], 1, [0], 1 << 27, lambda what, share: None)
    assert (tier.node, left_out) == (0, ())
    assert 1e8 < tier.bytes_per_s < 1e12
