"""The machine's memory nodes: those that cores of ours share, and others, which hold memory alone
(such as CXL's) or are other cores'. Measures nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from helm.machine.rates import CpuProfile
from helm.machine.sysfs import ROOT, cpu_list, number, text

_SPARED = 16  # of what is free a part stays so, as the system takes from there, too


@dataclass(frozen=True)
class MemoryNode:
    """near: it has CPUs that this process may use. free_bytes: nobody has them now."""

    node: int
    near: bool
    total_bytes: int
    free_bytes: int

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.free_bytes // _SPARED


def memory_nodes(affinity: Collection[int], root: Path = ROOT) -> list[MemoryNode]:
    """Those with memory, by number; none where the kernel does not tell."""
    found = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node, told = number(path.name.removeprefix("node")), text(path / "meminfo")
        total, free = (_size(told, name) for name in ("MemTotal", "MemFree"))
        if node is not None and total:
            near = not cpu_list(text(path / "cpulist")).isdisjoint(affinity)
            found.append(MemoryNode(node, near, total, min(free, total)))
    return sorted(found, key=lambda one: one.node)


def far_nodes(affinity: Collection[int], root: Path = ROOT) -> list[MemoryNode]:
    """Those that are not near, where others are."""
    every = memory_nodes(affinity, root)
    return [one for one in every if not one.near] if any(one.near for one in every) else []


def tiers_here(
    cpu: CpuProfile, memory_bytes: int, affinity: Collection[int], root: Path = ROOT
) -> CpuProfile:
    """With what is free now: of memory_bytes in all, and of its tiers those that this machine
    has."""
    usable = {one.node: one.usable_bytes for one in far_nodes(affinity, root)}
    tiers = (
        dataclasses.replace(tier, memory_bytes=min(usable[tier.node], memory_bytes))
        for tier in cpu.tiers
        if tier.node in usable
    )
    return dataclasses.replace(cpu, memory_bytes=memory_bytes, tiers=tuple(tiers))


def _size(told: str, name: str) -> int:
    """Bytes of a line of a node's meminfo, 0 where there is none."""
    found = re.search(rf"^Node \d+ {name}:\s+(\d{{1,18}}) kB$", told, re.M)
    return int(found[1]) * 1024 if found else 0
