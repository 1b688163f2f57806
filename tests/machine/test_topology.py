"""Cores in order, numbers of threads and where they stay, on machines faked below another root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from helm.machine.resources import (
    cpus_to_pin,
    default_threads,
    one_cpu_per_core,
    physical_cores,
    thread_candidates,
)
from helm.machine.sysfs import cpu_list
from helm.machine.topology import Core, cores, pinned_cpus, thread_counts

Files = Mapping[str, object]


def fake(root: Path, *parts: Files) -> Path:
    for files in parts:
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
    return root


def per_cpu(name: str, values: Iterable[object]) -> Files:
    return {f"sys/devices/system/cpu/cpu{cpu}/{name}": value for cpu, value in enumerate(values)}


def core_ids(ids: Iterable[int]) -> Files:
    known = list(ids)
    return {
        **per_cpu("topology/core_id", known),
        **per_cpu("topology/physical_package_id", [0] * len(known)),
    }


def nodes(**lists: str) -> Files:
    return {f"sys/devices/system/node/{name}/cpulist": cpus for name, cpus in lists.items()}


def quota(cpus: float) -> Files:
    return {
        "proc/self/cgroup": "0::/box",
        "sys/fs/cgroup/box/cpu.max": f"{int(cpus * 1e5)} 100000",
    }


# Two hyper-threaded P-cores (CPUs 0-3) and four E-cores.
HYBRID = core_ids([0, 0, 1, 1, 2, 3, 4, 5])
INTEL = {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}


def order(found: list[Core]) -> list[tuple[int, int, int]]:
    return [(core.cpu, core.kind, core.node) for core in found]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("0-2,8", {0, 1, 2, 8}), ("5", {5}), ("", set()), ("0-x", set()), ("3-1", set())],
)
def test_cpu_list(content: str, expected: set[int]) -> None:
    assert cpu_list(content) == expected


def test_without_a_word_of_the_kernel_all_cores_are_alike(tmp_path: Path) -> None:
    assert order(cores({2, 0, 1}, tmp_path)) == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert cores(set(), tmp_path) == []
    assert (physical_cores(set(), tmp_path), thread_candidates(set(), tmp_path)) == (1, [1])


@pytest.mark.parametrize(
    "told",
    [
        INTEL,
        per_cpu("cpu_capacity", [1024] * 4 + [600] * 4),
        {**INTEL, **per_cpu("cpu_capacity", [1024] * 8)},  # equal where there are hyper-threads
        per_cpu("cpufreq/cpuinfo_max_freq", [5_100_000, 5_100_000, 5_500_000, 5_500_000]
                + [3_900_000] * 4),
    ],
)  # fmt: skip
def test_fast_cores_come_first(tmp_path: Path, told: Files) -> None:
    root = fake(tmp_path, HYBRID, told)
    expected = [(0, 0, 0), (2, 0, 0), (4, 1, 0), (5, 1, 0), (6, 1, 0), (7, 1, 0)]
    assert order(cores(range(8), root)) == expected
    assert one_cpu_per_core(range(8), root) == [0, 2, 4, 5, 6, 7]
    assert order(cores({1, 3, 7}, root)) == [(1, 0, 0), (3, 0, 0), (7, 1, 0)]


def test_fast_cores_come_first_wherever_they_are_numbered(tmp_path: Path) -> None:
    root = fake(tmp_path, per_cpu("cpu_capacity", [300, 300, 300, 300, 850, 850, 900, 1024]))
    assert order(cores(range(8), root)) == [
        (6, 0, 0), (7, 0, 0), (4, 1, 0), (5, 1, 0), (0, 2, 0), (1, 2, 0), (2, 2, 0), (3, 2, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        per_cpu("cpufreq/cpuinfo_max_freq", [4_900_000] * 6 + [4_700_000] * 2),  # favoured cores
        per_cpu("cpu_capacity", [1024] * 4),  # not told of all
        per_cpu("cpu_capacity", ["?", 1024, 500, 500, 1, 1, 1, 1]),
        {"sys/devices/cpu_core/cpus": "0-7"},
        {"sys/devices/cpu_core/cpus": "0-5", "sys/devices/cpu_atom/cpus": "4-7"},
    ],
)
def test_what_tells_no_types_apart_changes_nothing(tmp_path: Path, told: Files) -> None:
    root = fake(tmp_path, core_ids(range(8)), told)
    assert {core.kind for core in cores(range(8), root)} == {0}
    assert one_cpu_per_core(range(8), root) == list(range(8))


def test_nodes_are_filled_one_after_the_other(tmp_path: Path) -> None:
    root = fake(tmp_path, nodes(node0="0,2,4,6", node1="1,3,5,7"), {
        "sys/devices/system/node/has_cpu": "0-1",
    })  # fmt: skip
    assert order(cores(range(8), root)) == [
        (0, 0, 0), (2, 0, 0), (4, 0, 0), (6, 0, 0), (1, 0, 1), (3, 0, 1), (5, 0, 1), (7, 0, 1),
    ]  # fmt: skip


TWO_NODES = [Core(cpu, 0, cpu // 6) for cpu in range(12)]
P_AND_E = [Core(cpu, int(cpu >= 6), 0) for cpu in range(14)]


@pytest.mark.parametrize(
    ("found", "most", "expected"),
    [
        ([Core(0, 0, 0)], 1, [1]),
        (TWO_NODES, 12, [1, 2, 4, 6, 8, 12]),
        (TWO_NODES, 5, [1, 2, 4, 5]),
        (P_AND_E, 14, [1, 2, 4, 6, 8, 14]),
        (P_AND_E, 7, [1, 2, 4, 6, 7]),
    ],
)
def test_counts_worth_measuring(found: list[Core], most: int, expected: list[int]) -> None:
    assert thread_counts(found, most) == expected


def test_threads_stay_only_where_they_fill_types_or_nodes() -> None:
    for found, whole in ((TWO_NODES, (6, 12)), (P_AND_E, (6, 14))):
        for threads in range(1, 17):
            expected = list(range(threads)) if threads in whole else []
            assert pinned_cpus(found, threads) == expected, threads
    alike = [Core(cpu, 0, 0) for cpu in range(4)]
    assert [pinned_cpus(alike, threads) for threads in range(1, 6)] == [[]] * 5
    assert pinned_cpus([], 1) == []


def test_candidates_and_pinning_respect_affinity_and_quota(tmp_path: Path) -> None:
    root = fake(tmp_path, HYBRID, INTEL)
    assert thread_candidates(range(8), root) == [1, 2, 4, 6]
    assert cpus_to_pin(range(8), 6, root) == [0, 2, 4, 5, 6, 7]
    assert cpus_to_pin(range(8), 2, root) == [0, 2]
    assert cpus_to_pin({1, 5, 6}, 1, root) == [1]
    assert cpus_to_pin({4, 5, 6}, 3, root) == [], "E-cores alone are alike"
    fake(root, quota(2.5))
    assert default_threads(range(8), root) == 2
    assert thread_candidates(range(8), root) == [1, 2]
    assert cpus_to_pin(range(8), 2, root) == []
    fake(root, quota(6))
    assert cpus_to_pin(range(8), 2, root) == [0, 2]
