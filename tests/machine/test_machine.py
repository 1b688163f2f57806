"""The machine's resources, read from faked /proc and /sys trees."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest

from cgroup import memory_cgroup, needs_cgroup
from helm.errors import HelmError
from helm.machine.resources import (
    cpu_affinity,
    cpu_quota,
    default_threads,
    huge_pages,
    memory_available,
    memory_limit,
    nvidia_driver,
    physical_cores,
    read_machine,
    useful_threads,
)

MIB = 1 << 20
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable:    8388608 kB\nSwapFree: 0 kB"


def fake(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(group="", **files):
    base = f"sys/fs/cgroup{group}/"
    return {base + name.replace("__", "."): text for name, text in files.items()}


V2 = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/box/inner"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8192 * MIB),
        (v2("/box/inner", memory__max="max", memory__current="5"), 8192 * MIB),
        (v2("/box/inner", memory__max=600 * MIB, memory__current=100 * MIB), 500 * MIB),
        (v2("/box", memory__max=600 * MIB, memory__current=100 * MIB), 500 * MIB),
        (v2("", memory__max=600 * MIB, memory__current=100 * MIB), 500 * MIB),
        (
            v2(
                "/box",
                memory__max=600 * MIB,
                memory__current=500 * MIB,
                memory__stat=f"anon 1\ninactive_file {300 * MIB}\nslab 7\nshmem 9",
            ),
            400 * MIB,
        ),
        (
            v2(
                "/box",
                memory__max=600 * MIB,
                memory__current=500 * MIB,
                memory__stat=f"inactive_file {MIB}\nactive_file {300 * MIB}\n"
                f"slab_reclaimable {9 * MIB}\nslab_unreclaimable {50 * MIB}",
            ),
            410 * MIB,
        ),
        (v2("/box", memory__high=600 * MIB, memory__current=100 * MIB), 500 * MIB),
        (
            v2("/box", memory__max=600 * MIB, memory__high=500 * MIB, memory__current=MIB),
            499 * MIB,
        ),
        (v2("/box", memory__max=600 * MIB, memory__high="max", memory__current=MIB), 599 * MIB),
        (v2("/box", memory__max=10 * MIB, memory__current=20 * MIB), 0),
        (v2("/box", memory__max=2**50, memory__current=0), 8192 * MIB),
        (v2("/box", memory__max="junk", memory__current="junk"), 8192 * MIB),
    ],
)
def test_memory_under_cgroup_v2(tmp_path, files, expected):
    assert memory_available(fake(tmp_path, {**V2, **files})) == expected


@pytest.mark.parametrize("group", ["/docker/abc", ""])
def test_memory_under_cgroup_v1(tmp_path, group):
    base = f"sys/fs/cgroup/memory{group}/"
    root = fake(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc",
            base + "memory.limit_in_bytes": 700 * MIB,
            base + "memory.usage_in_bytes": 300 * MIB,
            base + "memory.stat": f"active_file 7\ntotal_inactive_file {60 * MIB}\n"
            f"total_active_file {40 * MIB}",
        },
    )
    assert memory_available(root) == 500 * MIB
    assert memory_limit(root) == 700 * MIB
    fake(root, {base + "memory.limit_in_bytes": 9223372036854771712})
    assert memory_available(root) == 8192 * MIB
    assert memory_limit(root) is None


_READ = """
import os, sys
from helm.machine.resources import memory_available
before = memory_available()
with open(sys.argv[1], "w+b", buffering=0) as file:
    for _ in range(150):
        file.write(os.urandom(1 << 20))
    os.fsync(file)
    for _ in range(4):
        file.seek(0)
        while file.read(1 << 20):
            pass
print(before - memory_available())
"""


@needs_cgroup
def test_files_that_a_container_has_read_leave_its_memory_free(tmp_path):
    with memory_cgroup(400 * MIB) as group:
        result = group.run([sys.executable, "-c", _READ, tmp_path / "file"])
        stat = (group.folder / "memory.stat").read_text()
    assert result.returncode == 0, result.stderr
    if int(re.search(r"^active_file (\d+)$", stat, re.M)[1]) < 100 * MIB:
        pytest.skip("files of the temporary folder do not lie in the page cache")
    assert int(result.stdout) < 20 * MIB


def test_a_limit_that_slows_down_is_one(tmp_path):
    root = fake(tmp_path, {**V2, **v2("/box", memory__max=600 * MIB, memory__high=500 * MIB)})
    assert memory_limit(root) == 500 * MIB


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB", "MemAvailable: x kB"])
def test_memory_unknown(tmp_path, text):
    with pytest.raises(HelmError, match="MemAvailable"):
        memory_available(fake(tmp_path, {"proc/meminfo": text}))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (v2("/box", cpu__max="max 100000"), None),
        (v2("/box", cpu__max="250000 100000"), 2.5),
        ({**v2("/box", cpu__max="300000 100000"), **v2("", cpu__max="50000 100000")}, 0.5),
        (v2("/box", cpu__max="-1 100000"), None),
        (v2("/box", cpu__max="10 0"), None),
        (v2("/box", cpu__max=""), None),
    ],
)
def test_quota_under_cgroup_v2(tmp_path, files, expected):
    assert cpu_quota(fake(tmp_path, {**V2, **files})) == expected


def test_quota_under_cgroup_v1(tmp_path):
    base = "sys/fs/cgroup/cpu/docker/"
    root = fake(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker",
            base + "cpu.cfs_quota_us": 150000,
            base + "cpu.cfs_period_us": 100000,
        },
    )
    assert cpu_quota(root) == 1.5
    assert cpu_quota(fake(root, {base + "cpu.cfs_quota_us": -1})) is None


def topology(cores):
    """cores: (package, core) of logical CPU 0, 1, ..."""
    base = "sys/devices/system/cpu/cpu"
    return {
        f"{base}{cpu}/topology/{name}": value
        for cpu, pair in enumerate(cores)
        for name, value in zip(("physical_package_id", "core_id"), pair, strict=True)
    }


def test_physical_cores_within_affinity(tmp_path):
    two_sockets_smt = [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    root = fake(tmp_path, topology(two_sockets_smt))
    assert physical_cores(range(8), root) == 4
    assert physical_cores({0, 4}, root) == 1
    assert physical_cores({0, 2, 3}, root) == 3
    assert physical_cores({0, 1, 99}, root) == 3, "a CPU without topology is its own core"
    assert physical_cores(set(), root) == 1


@pytest.mark.parametrize(
    ("quota", "threads"), [("max", 4), ("1000000", 4), ("250000", 2), ("50000", 1)]
)
def test_default_threads(tmp_path, quota, threads):
    files = {**topology([(0, 0), (0, 1), (0, 2), (0, 3)] * 2), **V2}
    root = fake(tmp_path, {**files, **v2("/box", cpu__max=f"{quota} 100000")})
    assert default_threads(range(8), root) == threads


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never", "madvise"),
        ("[always] madvise never", "always"),
        ("always madvise [never]", "never"),
        (None, "absent"),
        ("garbage", "absent"),
    ],
)
def test_huge_pages(tmp_path, text, expected):
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    assert huge_pages(fake(tmp_path, {} if text is None else {name: text})) == expected


def test_nvidia_driver(tmp_path):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    assert not nvidia_driver(tmp_path, absent).found
    assert "no kernel driver" in nvidia_driver(tmp_path, lambda name: None).reason
    hidden = fake(tmp_path / "sandbox", {"dev/nvidiactl": ""})
    assert nvidia_driver(hidden, lambda name: None).version == "unknown"
    assert "cannot be loaded" in nvidia_driver(hidden, absent).reason
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 2024"
    root = fake(tmp_path, {"proc/driver/nvidia/version": version})
    found = nvidia_driver(root, lambda name: None)
    assert (found.found, found.version, found.reason) == (True, "550.54.14", "")
    missing = nvidia_driver(root, absent)
    assert not missing.found
    assert "libcuda.so.1 cannot be loaded" in missing.reason
    open_module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release"
    fake(root, {"proc/driver/nvidia/version": open_module})
    assert nvidia_driver(root, lambda name: None).version == "570.86.15"


def test_the_stub_of_a_cuda_toolkit_is_no_driver(tmp_path):
    root = fake(tmp_path, {"dev/nvidiactl": ""})

    def answering(status):
        return lambda _name: SimpleNamespace(cuDriverGetVersion=lambda _version: status)

    assert nvidia_driver(root, answering(0)).found
    assert "stub" in nvidia_driver(root, answering(34)).reason
    assert not nvidia_driver(root, answering(34)).found


def test_this_machine():
    machine = read_machine()
    assert machine.memory_bytes > 16 * MIB
    assert 1 <= machine.threads <= machine.physical_cores <= machine.logical_cpus
    assert machine.logical_cpus == len(os.sched_getaffinity(0)) == len(cpu_affinity())
    assert machine.huge_pages in ("always", "madvise", "never", "absent")
    assert machine.nvidia.found or machine.nvidia.reason


@pytest.mark.parametrize(
    ("weights_bytes", "expected"),
    [(0, 1), (1 << 20, 1), ((8 << 20) - 1, 1), (8 << 20, 2), (1 << 30, 6)],
)
def test_small_models_get_fewer_threads(weights_bytes, expected):
    assert useful_threads(weights_bytes, 6) == expected
