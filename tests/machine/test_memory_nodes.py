"""Memory nodes of machines that this one is not: found under a root of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from helm.machine.memory_nodes import MemoryNode, far_nodes, memory_nodes, tiers_here
from helm.machine.profile import load_profile
from helm.machine.rates import MemoryTier

GIB = 1 << 30


def machine(root: Path, nodes: dict[int, tuple[str, int, int]]) -> Path:
    """nodes: number -> (CPUs, GiB in all, GiB free)."""
    for node, (cpus, total, free) in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        sizes = {"MemTotal": total, "MemFree": free, "MemUsed": total - free}
        lines = [f"Node {node} {name}:  {size << 20} kB\n" for name, size in sizes.items()]
        (folder / "meminfo").write_text("".join(lines))
    return root


def test_memory_without_cores_is_far(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: ("0-3", 64, 60), 1: ("4-7", 64, 61), 2: ("", 128, 128)})
    assert memory_nodes({0, 1}, root) == [
        MemoryNode(0, True, 64 * GIB, 60 * GIB),
        MemoryNode(1, False, 64 * GIB, 61 * GIB),
        MemoryNode(2, False, 128 * GIB, 128 * GIB),
    ]
    assert [one.node for one in far_nodes({0, 1}, root)] == [1, 2]
    assert [one.node for one in far_nodes({0, 7}, root)] == [2]
    assert far_nodes({9}, root) == []  # of no node that is known


def test_what_the_kernel_does_not_tell_is_no_node(tmp_path: Path) -> None:
    assert memory_nodes({0}, tmp_path) == []
    root = machine(tmp_path, {0: ("0", 4, 2), 1: ("", 0, 0)})
    (root / "sys/devices/system/node/node2").mkdir()
    (root / "sys/devices/system/node/node2/meminfo").write_text("Node 2 MemTotal: much kB\n")
    assert [one.node for one in memory_nodes({0}, root)] == [0]


def test_tiers_have_what_is_free_now(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: ("0-3", 64, 60), 2: ("", 128, 32)})
    kept = (MemoryTier(5, 8 * GIB, 2e10), MemoryTier(2, 100 * GIB, 1e10))
    cpu = dataclasses.replace(load_profile("thesis-3090").cpu, tiers=kept)
    found = tiers_here(cpu, 90 * GIB, {0}, root)
    assert found.memory_bytes == 90 * GIB
    assert found.tiers == (MemoryTier(2, 30 * GIB, 1e10),)
    assert tiers_here(cpu, 90 * GIB, {0}, tmp_path / "none").tiers == ()
