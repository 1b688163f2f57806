"""What accuracy.py runs its cases on: the CPU, or the CPU and an accelerator, and their drift.

A simulated accelerator computes with the CPU's kernels on the cores of the same machine. So both
devices get one thread each, on a core of its own, and are profiled so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helm import _helm
from helm.machine.devices import CPU, open_accelerator
from helm.machine.profile import Profile
from helm.machine.rates import DeviceProfile
from helm.machine.resources import cpu_affinity, one_cpu_per_core
from helm.measure.accelerator import measure_accelerator
from helm.measure.cpu import WEIGHT_FORMATS, measure_profile, probe_bytes
from helm.measure.quantity import Quantity

PROBE_S = 0.01
SIM = "sim:link=8GB/s,latency=20us,threads=1"


@dataclass(frozen=True)
class Setup:
    """profile: as measured first. measure: measures it again. cpus: a core for each of the CPU's
    threads. accelerator_cpus: where the accelerator's threads go, if they are to go anywhere.
    simulated: whether drift of the CPU is drift of both."""

    device: str
    profile: Profile
    measure: Callable[[], Profile]
    cpus: tuple[int, ...]
    accelerator_cpus: frozenset[int] = frozenset()
    simulated: bool = False


def cpu_setup(given: Profile | None) -> Setup:
    """given: a profile to go by instead of measuring any."""

    def measure() -> Profile:
        found = given or measure_profile()
        return dataclasses.replace(found, accelerator=None, link=None)

    profile = measure()
    threads = profile.cpu.threads
    cpus = tuple(one_cpu_per_core(cpu_affinity())[:threads])
    return Setup(CPU, profile, lambda: _with_threads(measure(), threads), cpus)


def partitioned_setup(specification: str, given: Profile | None) -> Setup:
    """With the device, its link and, if it is simulated, the CPU measured with one thread.
    given: the CPU's profile otherwise, instead of measuring it. Raises DeviceError."""
    cores = one_cpu_per_core(cpu_affinity())
    if open_accelerator(specification).kind == "sim":
        one, other = (cores[0],), frozenset(cores[1:2] or cores)

        def measure_both() -> Profile:
            with only_on(one):
                alone = measure_profile()
            with only_on(other):
                return _with_device(alone, specification, one)

        return Setup(specification, measure_both(), measure_both, one, other, simulated=True)

    def measure() -> Profile:
        return _with_device(given or measure_profile(), specification)

    profile = measure()
    threads = profile.cpu.threads
    cpus = tuple(cores[:threads])
    return Setup(specification, profile, lambda: _with_threads(measure(), threads), cpus)


@contextmanager
def only_on(cpus: Sequence[int] | frozenset[int]) -> Iterator[None]:
    """The calling thread, and those it starts, on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _with_threads(profile: Profile, threads: int) -> Profile:
    return dataclasses.replace(profile, cpu=profile.cpu.with_threads(threads))


def _with_device(
    profile: Profile, specification: str, cpus: Sequence[int] | None = None
) -> Profile:
    device = open_accelerator(specification)
    own, link, unsettled = measure_accelerator(device, profile.cpu, cpus=cpus)
    unsettled = (*profile.unsettled, *unsettled)
    return dataclasses.replace(profile, accelerator=own, link=link, unsettled=unsettled)


class Probe:
    """Times products on the cores of one device, which is the CPU or made of it."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._threads = len(cpus)
        self._probe = _helm.StageProbe(probe_bytes(cpu_affinity()), list(cpus))

    def slowness(self, profile: DeviceProfile, kind: str, tokens: int) -> float:
        """Time of the product now over its time in the profile."""
        format = WEIGHT_FORMATS[kind]
        quantity = Quantity("", lambda s: self._probe.matmul(self._threads, format, tokens, s))
        quantity.visit(PROBE_S)
        return float(profile.matmul_rate(kind, tokens)) / quantity.flops_per_s


def probes_of(setup: Setup) -> dict[str, Probe]:
    """Of the devices whose drift can be told apart from here."""
    found = {"cpu": Probe(setup.cpus)}
    if setup.simulated:
        found["accelerator"] = Probe(sorted(setup.accelerator_cpus))
    return found


class Threads:
    """The threads of this process that compute, each kept where `setup` says. Made in two steps:
    before the engine starts its own and after."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._free = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {*setup.cpus, *setup.accelerator_cpus})  # new threads inherit it
        self._before = _thread_ids()
        self.ids = [os.getpid()]

    def started(self) -> None:
        setup = self._setup
        self.ids = [os.getpid(), *sorted(_thread_ids() - self._before)]
        if setup.device != CPU and not setup.simulated:
            return  # a driver's threads are among them
        for thread, cpu in zip(self.ids, setup.cpus, strict=False):
            os.sched_setaffinity(thread, {cpu})
        for thread in self.ids[len(setup.cpus) :]:
            os.sched_setaffinity(thread, setup.accelerator_cpus or set(setup.cpus))

    def measure_again(self) -> Profile:
        """The setup's profile now, the engine idle."""
        with only_on(self._free):
            return self._setup.measure()

    def release(self) -> None:
        """The calling thread runs again where it did."""
        os.sched_setaffinity(0, self._free)

    def waited_s(self) -> float:
        """Time that they were ready to run and did not; 0 where the kernel does not tell."""
        return sum(_waited_ns(thread) for thread in self.ids) * 1e-9


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _waited_ns(thread: int) -> int:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
