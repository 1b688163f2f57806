"""The cores that threads should run on, in order: the fastest type first, node after node."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helm.machine.sysfs import ROOT, cpu_list, number, text

# Cores of one type differ by some percent (favoured ones clock higher), those of the next type run
# at two thirds or less.
_SAME_TYPE = 0.85


@dataclass(frozen=True)
class Core:
    """A physical core. cpu: the logical CPU that stands for it; kind: 0 for the fastest type of
    core there is, 1 for the next; node: its memory node."""

    cpu: int
    kind: int
    node: int


def cores(affinity: Collection[int], root: Path = ROOT) -> list[Core]:
    """A core for each with a logical CPU in `affinity`, the fastest type first, in each type node
    by node, so that neighbours share a memory."""
    first = _first_cpus(affinity, root)
    kinds, nodes = _kinds(first, root), _nodes(root)
    found = [Core(cpu, kinds.get(cpu, 0), nodes.get(cpu, 0)) for cpu in first]
    return sorted(found, key=lambda core: (core.kind, core.node, core.cpu))


def thread_counts(found: Sequence[Core], most: int) -> list[int]:
    """Numbers of threads, up to `most`, of which one may be the best: powers of two, all cores of
    the faster types, all of a node, of two, ..., and `most`."""
    powers = {1 << i for i in range(most.bit_length())}
    return sorted(n for n in powers | {*_group_ends(found), most} if n <= most)


def pinned_cpus(found: Sequence[Core], threads: int) -> list[int]:
    """The CPU on which each thread should stay; empty where the system should place them.

    Where all cores are alike and reach the same memory, staying brings nothing, and a core that
    another program uses costs a pinned thread half its time, while the system moves a free one to
    an idle core. Elsewhere the system does not know that the slowest thread decides, or whose
    weights lie where. But a part of a type or node is left to it, too: another process of ours
    would choose the very same part.
    """
    alike = len({(core.kind, core.node) for core in found}) == 1
    if alike or threads not in _group_ends(found):
        return []
    return [core.cpu for core in found[:threads]]


def _group_ends(found: Sequence[Core]) -> list[int]:
    """How many cores, in order, are whole groups of one type and node."""
    groups = itertools.groupby(found, key=lambda core: (core.kind, core.node))
    return list(itertools.accumulate(len(list(group)) for _, group in groups))


def _first_cpus(affinity: Iterable[int], root: Path) -> list[int]:
    """The first logical CPU in `affinity` of each physical core."""
    cpus: dict[tuple[str, str] | int, int] = {}
    for cpu in sorted(affinity):
        folder = _cpu_folder(cpu, root) / "topology"
        core = (text(folder / "physical_package_id"), text(folder / "core_id"))
        cpus.setdefault(core if all(core) else cpu, cpu)
    return list(cpus.values())


def _cpu_folder(cpu: int, root: Path) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _kinds(cpus: Sequence[int], root: Path) -> dict[int, int]:
    """Types by the first source that tells any apart: the scheduler's capacities, which a kernel
    may leave equal on a CPU with hyper-threads, Intel's two kinds of core, the clocks."""
    for kinds in (
        _types({cpu: number(text(_cpu_folder(cpu, root) / "cpu_capacity")) for cpu in cpus}),
        _intel_kinds(cpus, root),
        _types(
            {cpu: number(text(_cpu_folder(cpu, root) / "cpufreq/cpuinfo_max_freq")) for cpu in cpus}
        ),
    ):
        if len(set(kinds.values())) > 1:
            return kinds
    return dict.fromkeys(cpus, 0)


def _types(speeds: Mapping[int, int | None]) -> dict[int, int]:
    """Numbers types from the fastest on; empty unless every CPU's speed is known."""
    known = {cpu: speed for cpu, speed in speeds.items() if speed is not None and speed > 0}
    if len(known) < len(speeds):
        return {}
    kinds: dict[int, int] = {}
    kind, fastest = -1, 0
    for cpu, speed in sorted(known.items(), key=lambda item: -item[1]):
        if kind < 0 or speed < _SAME_TYPE * fastest:
            kind, fastest = kind + 1, speed
        kinds[cpu] = kind
    return kinds


def _intel_kinds(cpus: Sequence[int], root: Path) -> dict[int, int]:
    large, small = (
        cpu_list(text(root / f"sys/devices/{name}/cpus")) for name in ("cpu_core", "cpu_atom")
    )
    if not all((cpu in large) != (cpu in small) for cpu in cpus):
        return {}
    return {cpu: 0 if cpu in large else 1 for cpu in cpus}


def _nodes(root: Path) -> dict[int, int]:
    """By logical CPU: its memory node."""
    nodes: dict[int, int] = {}
    folder = root / "sys/devices/system/node"
    for path in folder.glob("node[0-9]*"):
        node = number(path.name.removeprefix("node"))
        if node is not None:
            nodes.update(dict.fromkeys(cpu_list(text(path / "cpulist")), node))
    return nodes
