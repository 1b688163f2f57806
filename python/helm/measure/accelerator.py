"""Measures an accelerator and its link with the engine's own stages and copies. Keeps no file.

What `helm.measure.cpu` does for the CPU, through the device's own interface: runs are enqueued one
after the other, so a rate is what the device does while it is kept busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from helm.base.formats import DTYPES, KV_DTYPES
from helm.base.sizes import counted
from helm.machine.devices import SIM, Accelerator
from helm.machine.rates import AcceleratorProfile, CpuProfile, LinkProfile
from helm.machine.resources import cpu_affinity, one_cpu_per_core
from helm.measure.cpu import (
    DECODE_CONTEXT,
    DECODE_GROUPS,
    ELEMENTWISE_TOKENS,
    PREFILL_CONTEXT,
    PREFILL_GROUP,
    PREFILL_QUERIES,
    SWEEP_DTYPE,
    WEIGHT_FORMATS,
    flops_by_rows,
    probe_bytes,
)
from helm.measure.quantity import Measure, Progress, Quantity, Timing, visit

BUDGET_S = 5.0
TOKENS = (1, 2, 4, 8, 16, 64, 512)
_EMPTY_OPS = 16
_SMALL_COPIES = 64
_MOST_BYTES = 1 << 29  # half of it is read at a time: several times a GPU's cache
_MEANWHILE_S = 0.005


def measure_accelerator(
    device: Accelerator,
    cpu: CpuProfile,
    progress: Progress | None = None,
    *,
    budget_s: float = BUDGET_S,
    cpus: Sequence[int] | None = None,
) -> tuple[AcceleratorProfile, LinkProfile, tuple[str, ...]]:
    """Measures in little more than `budget_s` seconds, with the CPU's threads of `cpu` on `cpus`
    (by default a core each). The last are the names of quantities that are unsettled, see
    `helm.machine.profile.Profile`.

    Raises DeviceError when the device cannot be had or fails, and OutOfMemoryError when it or the
    host lacks the memory for the probes.
    """
    from helm import _helm

    report = progress or (lambda _what, _share: None)
    report(f"{device.name}: memory", 0.0)
    affinity = cpu_affinity()
    wanted = min(probe_bytes(affinity), _MOST_BYTES)
    probe = _helm.DeviceProbe(device.rates_specification, wanted)
    own = one_cpu_per_core(affinity) if cpus is None else list(cpus)
    host = _helm.StageProbe(wanted, own[: cpu.threads])
    rates, link = _Rates(probe, device.kind), _Link(probe, host, cpu.threads)
    measured = (*rates.all(), *link.all())
    visit(measured, budget_s, report, 0.0, 1.0)
    report("done", 1.0)
    unsettled = tuple(quantity.name for quantity in measured if not quantity.trusted)
    return rates.profile(device), link.profile(rates.step.seconds, device.locks_mapped), unsettled


def _quantity(name: str, measure: Callable[[float], Timing]) -> Quantity:
    return Quantity(f"GPU: {name}", lambda seconds: [measure(seconds)])


class _Rates:
    """What the device does by itself."""

    def __init__(self, probe: Any, kind: str) -> None:
        kv_dtypes = KV_DTYPES if kind == SIM else DTYPES  # CUDA has no attention for i8

        def products(kind: str, tokens: int) -> Quantity:
            return _quantity(
                f"{kind} products, {counted(tokens, 'token')}",
                lambda s: probe.matmul(WEIGHT_FORMATS[kind], tokens, s),
            )

        def attention(dtype: str, group: int, queries: int, context: int) -> Quantity:
            return _quantity(
                f"{dtype} attention, {counted(queries * group, 'row')}, {context:,} positions",
                lambda s: probe.attention(dtype, group, queries, context, s),
            )

        prefill_rows = PREFILL_QUERIES * PREFILL_GROUP
        self.matmul = {
            k: {tokens: products(k, tokens) for tokens in TOKENS} for k in WEIGHT_FORMATS
        }
        self.attention = {
            d: {
                **{group: attention(d, group, 1, DECODE_CONTEXT) for group in DECODE_GROUPS},
                prefill_rows: attention(d, PREFILL_GROUP, PREFILL_QUERIES, PREFILL_CONTEXT),
            }
            for d in kv_dtypes
        }
        self.elementwise = _quantity(
            "elementwise ops", lambda s: probe.elementwise(ELEMENTWISE_TOKENS, s)
        )
        self.empty = _quantity("ops", lambda s: probe.empty_ops(_EMPTY_OPS, s))
        self.bare = _quantity("stages", lambda s: probe.empty_ops(0, s))
        self.step = _quantity("steps", lambda s: probe.empty_step(False, s))

    def all(self) -> list[Quantity]:
        tables = (*self.matmul.values(), *self.attention.values())
        rates = [quantity for table in tables for quantity in table.values()]
        return [*rates, self.elementwise, self.empty, self.bare, self.step]

    def profile(self, device: Accelerator) -> AcceleratorProfile:
        return AcceleratorProfile(
            name=device.name,
            memory_bytes=device.free_bytes,
            reserve_bytes=device.reserve_bytes,
            matvec_bytes_per_s={k: q[1].bytes_per_s for k, q in self.matmul.items()},
            matmul_flops=flops_by_rows(self.matmul),
            attention_bytes_per_s={d: q[1].bytes_per_s for d, q in self.attention.items()},
            attention_flops=flops_by_rows(self.attention),
            op_s=max(0.0, (self.empty.seconds - self.bare.seconds) / _EMPTY_OPS),
            step_s=self.step.seconds,
            stage_s=self.bare.seconds,
            activation_bytes_per_s=self.elementwise.bytes_per_s,
        )


class _Link:
    """Copies, and what they cost the CPU."""

    def __init__(self, probe: Any, host: Any, threads: int) -> None:
        def copies(to_device: bool, page_locked: bool) -> Quantity:
            memory = "page-locked" if page_locked else "pageable"
            direction = "to" if to_device else "from"
            return _quantity(
                f"copies {direction} it, {memory}", lambda s: probe.copy(to_device, page_locked, s)
            )

        def products(seconds: float) -> list[_AllRuns]:
            timings = host.matmul(threads, SWEEP_DTYPE, 1, seconds)
            return [_AllRuns(t.flops, t.bytes, t.run_s, t.run_s) for t in timings]

        def beside(work: Callable[[], object]) -> Measure:
            def measure(seconds: float) -> list[_AllRuns]:
                with _Meanwhile(work):
                    return products(seconds)

            return measure

        self.copies = {key: copies(*key) for key in _COPIES}
        self.crossings = _quantity("crossings", lambda s: probe.empty_step(True, s))
        self.queued = _quantity("small copies", lambda s: probe.queued_copies(_SMALL_COPIES, s))
        self.alone = Quantity("CPU products", products)
        self.copying = Quantity(
            "CPU products beside copies", beside(lambda: probe.copy(True, True, _MEANWHILE_S))
        )
        self.computing = Quantity(
            "CPU products beside the accelerator's",
            beside(lambda: probe.matmul(SWEEP_DTYPE, 1, _MEANWHILE_S)),
        )

    def all(self) -> list[Quantity]:
        return [
            *self.copies.values(), self.crossings, self.queued, self.alone, self.copying,
            self.computing,
        ]  # fmt: skip

    def profile(self, step_s: float, locks_mapped: bool) -> LinkProfile:
        """step_s: of a step that crosses nothing."""
        rates = {key: quantity.bytes_per_s for key, quantity in self.copies.items()}
        return LinkProfile(
            to_accelerator_bytes_per_s=rates[True, True],
            to_host_bytes_per_s=rates[False, True],
            pageable_to_accelerator_bytes_per_s=rates[True, False],
            pageable_to_host_bytes_per_s=rates[False, False],
            latency_s=max(0.0, (self.crossings.seconds - step_s) / 2),
            cpu_rate_while_copying=min(1.0, self.alone.seconds / self.copying.seconds),
            rate_while_both_compute=min(1.0, max(0.5, self.alone.seconds / self.computing.seconds)),
            locks_mapped=locks_mapped,
            queued_copy_s=self.queued.seconds / _SMALL_COPIES,
        )


_COPIES = ((True, True), (False, True), (True, False), (False, False))  # to it, page-locked


@dataclass
class _AllRuns:
    """Runs of which none counts as disturbed: by how much they are is the question."""

    flops: float
    bytes: float
    run_s: list[float]
    undisturbed_s: list[float]


class _Meanwhile:
    """Does something again and again in another thread while in scope, which ends with the error
    of that, if any."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def _repeat(self) -> None:
        try:
            while not self._stop.is_set():
                self._work()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
