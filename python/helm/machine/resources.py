"""What this machine offers: memory, cores, huge pages, driver. Knows nothing of models or plans.

Every function takes the root under which /proc and /sys lie, so that other machines can be faked.
What a kernel does not report counts as no limit.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from helm.errors import HelmError
from helm.machine.grants import Claim, claims, pending_bytes
from helm.machine.sysfs import ROOT
from helm.machine.sysfs import number as _number
from helm.machine.sysfs import text as _text
from helm.machine.topology import cores, pinned_cpus, thread_counts

_BYTES_PER_THREAD = 4 << 20
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY, with which a toolkit's stub answers every call
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
_V2_LIMITS = ("memory.max", "memory.high")
_DROPPABLE = ("inactive_file", "active_file", "slab_reclaimable")  # of what a cgroup uses


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: its version, or the reason why there is none."""

    found: bool
    version: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Machine:
    """memory_bytes: free for this process. memory_limit_bytes: the tightest cgroup limit, None
    without one. threads: the most that can help, see default_threads."""

    memory_bytes: int
    memory_limit_bytes: int | None
    physical_cores: int
    logical_cpus: int
    cpu_quota: float | None
    huge_pages: str
    nvidia: Driver
    threads: int


def read_machine(root: Path = ROOT) -> Machine:
    """All of the below at once. Raises HelmError if the memory cannot be read."""
    affinity = cpu_affinity()
    return Machine(
        memory_bytes=memory_available(root),
        memory_limit_bytes=memory_limit(root),
        physical_cores=physical_cores(affinity, root),
        logical_cpus=len(affinity),
        cpu_quota=cpu_quota(root),
        huge_pages=huge_pages(root),
        nvidia=nvidia_driver(root),
        threads=default_threads(affinity, root),
    )


def memory_available(root: Path = ROOT, shared: Collection[str] = ()) -> int:
    """Bytes this process can still take: the kernel's MemAvailable, or what is left of the
    tightest cgroup limit if that is less, without what loaded models were granted and have not
    taken yet. Page cache and slabs that the kernel can drop count as free. shared: keys of mapped
    files (`grants.file_key`) that the caller is going to read, too."""
    found = re.search(r"^MemAvailable:\s+(\d{1,18}) kB$", _text(root / "proc/meminfo"), re.M)
    if found is None:
        raise HelmError(
            f"[machine] {root / 'proc/meminfo'} has no MemAvailable line; expected Linux 3.14 or "
            "later; state the memory to use instead"
        )
    granted = [(claim, _cgroup_folders("memory", root, claim.pid)) for claim in claims(root)]
    left = [int(found[1]) * 1024 - pending_bytes((claim for claim, _ in granted), shared)]
    for folder in _cgroup_folders("memory", root):
        within: Iterable[Claim] = (claim for claim, folders in granted if folder in folders)
        pending = pending_bytes(within, shared)
        left.extend(size - pending for size in _memory_left(folder))
    return max(0, min(left))


def memory_granted(root: Path = ROOT) -> int:
    """Bytes by which `memory_available` is less for models that are loaded."""
    return pending_bytes(claims(root), ())


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the tightest memory cgroup allows in all, or beyond which it slows down; None
    without a limit."""
    names = (*_V2_LIMITS, "memory.limit_in_bytes")
    found = [_number(_text(f / name)) for f in _cgroup_folders("memory", root) for name in names]
    return min((n for n in found if n is not None and n < _UNLIMITED), default=None)


def memory_capacity(root: Path = ROOT) -> int:
    """Bytes this process could take on an idle machine: all memory, or the tightest cgroup limit.
    0 when neither is reported."""
    found = re.search(r"^MemTotal:\s+(\d{1,18}) kB$", _text(root / "proc/meminfo"), re.M)
    total = int(found[1]) * 1024 if found else None
    return min((size for size in (total, memory_limit(root)) if size is not None), default=0)


def _memory_left(folder: Path) -> list[int]:
    """Limits minus use of one cgroup; empty if it has none."""
    left: list[int] = []
    for limit_files, usage_file, prefix in (
        (_V2_LIMITS, "memory.current", ""),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    ):
        usage = _number(_text(folder / usage_file))
        limits = [_number(_text(folder / name)) for name in limit_files]
        if usage is None:
            continue
        names = "|".join(prefix + name for name in _DROPPABLE)
        found = re.findall(rf"^(?:{names}) (\d{{1,18}})$", _text(folder / "memory.stat"), re.M)
        used = max(0, usage - sum(map(int, found)))
        left += [limit - used for limit in limits if limit is not None and limit < _UNLIMITED]
    return left


def _cgroup_folders(controller: str, root: Path, process: int | str = "self") -> list[Path]:
    """A process's cgroup and its ancestors, in the v2 and the v1 hierarchy of `controller`."""
    folders: list[Path] = []
    mount = root / "sys/fs/cgroup"
    for line in _text(root / f"proc/{process}/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3 or ".." in fields[2].split("/"):
            continue
        if fields[1] == "":
            top = mount / "unified" if (mount / "unified").is_dir() else mount
        elif controller in fields[1].split(","):
            top = mount / controller
        else:
            continue
        folder = top / fields[2].strip("/")
        folders += [folder, *(p for p in folder.parents if p == top or top in p.parents)]
    return folders or [mount, mount / controller]


def cpu_affinity() -> set[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the tightest cgroup grants; None without a limit."""
    quotas = []
    for folder in _cgroup_folders("cpu", root):
        fields = _text(folder / "cpu.max").split()
        if len(fields) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            fields = [_text(folder / name) for name in names]
        quota, period = _number(fields[0]), _number(fields[1])
        if quota is not None and period is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas) if quotas else None


def physical_cores(affinity: Collection[int], root: Path = ROOT) -> int:
    """Physical cores with at least one logical CPU in `affinity`, at least 1."""
    return max(1, len(one_cpu_per_core(affinity, root)))


def one_cpu_per_core(affinity: Collection[int], root: Path = ROOT) -> list[int]:
    """The first logical CPU in `affinity` of each physical core, the fastest type of core first,
    in each type node by node."""
    return [core.cpu for core in cores(affinity, root)]


def useful_threads(weights_bytes: int, threads: int) -> int:
    """`threads`, or fewer for a model so small that meeting costs more than sharing saves.

    A step meets some dozen times per block; a thread's share should take well over that, which
    4 MiB at tens of GB/s do.
    """
    return max(1, min(threads, weights_bytes // _BYTES_PER_THREAD))


def default_threads(affinity: Collection[int], root: Path = ROOT) -> int:
    """One thread per physical core in `affinity`, within the whole CPUs of the quota: the most
    that can help. helm.measure.threads knows how many do."""
    most, quota = physical_cores(affinity, root), cpu_quota(root)
    return most if quota is None else max(1, min(most, int(quota)))


def thread_candidates(affinity: Collection[int], root: Path = ROOT) -> list[int]:
    """Numbers of threads worth measuring, at least one."""
    return thread_counts(cores(affinity, root), default_threads(affinity, root))


def cpus_to_pin(affinity: Collection[int], threads: int, root: Path = ROOT) -> list[int]:
    """The CPU on which each of `threads` should stay, or none of them; see topology.pinned_cpus.
    Not under a quota of less than all cores: whoever shares them has one, too, and any may be
    idle."""
    if default_threads(affinity, root) < physical_cores(affinity, root):
        return []
    return pinned_cpus(cores(affinity, root), threads)


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name, or the architecture where the kernel does not tell."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def last_level_cache_bytes(affinity: Collection[int], root: Path = ROOT) -> int:
    """Bytes of the last-level caches that the CPUs of `affinity` use; 0 when not reported."""
    caches: dict[tuple[str, str], int] = {}
    for cpu in affinity:
        for index in range(9, 0, -1):
            folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            found = re.fullmatch(r"(\d{1,9})([KM])", _text(folder / "size"))
            if found:
                shared = _text(folder / "shared_cpu_list") or str(cpu)
                caches[str(index), shared] = int(found[1]) << (10 if found[2] == "K" else 20)
                break
    return sum(caches.values())


def huge_pages(root: Path = ROOT) -> str:
    """Transparent huge pages: "always", "madvise", "never", or "absent"."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else "absent"


def nvidia_driver(
    root: Path = ROOT, load: Callable[[str], object] = ctypes.CDLL, library: str = "libcuda.so.1"
) -> Driver:
    """Whether a kernel driver and a user-mode driver of NVIDIA's are present; `load` opens the
    library, raising OSError if it cannot."""
    text = _text(root / "proc/driver/nvidia/version")
    if not text and not (root / "dev/nvidiactl").exists():  # some sandboxes hide the /proc entry
        return Driver(
            False,
            reason=f"no kernel driver: {root / 'proc/driver/nvidia/version'} and "
            f"{root / 'dev/nvidiactl'} are absent",
        )
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)*)", text)
    version = found[1] if found else "unknown"
    try:
        driver = load(library)
    except OSError as reason:
        return Driver(False, version, f"{library} cannot be loaded: {reason}")
    ask = getattr(driver, "cuDriverGetVersion", None)
    if ask is not None and ask(ctypes.byref(ctypes.c_int())) == _STUB_LIBRARY:
        return Driver(False, version, f"the {library} that is found is the CUDA toolkit's stub")
    return Driver(True, version)
