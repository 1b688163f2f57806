"""Measures this machine with the engine's own stages and makes its profile, which names the
quantities that found too few undisturbed runs. Keeps no file."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from helm.base.formats import DTYPES, KV_DTYPES
from helm.base.sizes import counted
from helm.machine.memory_nodes import far_nodes
from helm.machine.profile import MOST_COMPRESSED_RATIO, MOST_MAPPED_RATIO, Profile
from helm.machine.rates import PACKED_CLASSES, CpuProfile
from helm.machine.resources import (
    cpu_affinity,
    cpu_model,
    default_threads,
    last_level_cache_bytes,
    memory_available,
    one_cpu_per_core,
    physical_cores,
    thread_candidates,
)
from helm.measure.quantity import Progress, Quantity, rate_ratio, visit
from helm.measure.tiers import measure_tiers
from helm.measure.tiny_model import TinyModel

BUDGET_S = 10.5
TOKENS = (1, 2, 4, 8, 16, 64, 128, 512)
DECODE_CONTEXT, DECODE_KV_HEADS = 4096, 8
DECODE_GROUPS = (1, 2, 4, 8)  # query heads per KV head
# In prefill, late in a long prompt: where attention takes a share of the time that matters.
PREFILL_QUERIES, PREFILL_CONTEXT, PREFILL_GROUP = 128, 2048, 2
_MOST_KV_HEADS = 32  # that a probe takes
ELEMENTWISE_TOKENS = 512
SWEEP_DTYPE = "bf16"
# Class of weights -> the format that is measured for it.
WEIGHT_FORMATS = {**{dtype: dtype for dtype in DTYPES}, **PACKED_CLASSES}

# Of products with compressed weights: bound by memory; by arithmetic from few tokens on; the most
# that one tile takes; where a weight is made plain for few of them, and where it is for many.
COMPRESSED_TOKENS = (1, 4, 8, 16, 128)

_SWEEP_SHARE = 0.15  # of the budget
_EMPTY_OPS = 16
_HANDOVERS = 24
# Times the last-level caches. A visit reads half of the memory over and over: of a half twice as
# large as the cache enough stays cached that products measured 15 % too fast.
_CACHES = 16
_LEAST_BYTES, _MOST_BYTES = 1 << 29, 1 << 31


def measure_profile(
    progress: Progress | None = None, *, budget_s: float = BUDGET_S, threads: int | None = None
) -> Profile:
    """Measures this machine in little more than `budget_s` seconds. Quantities for which the time
    brought fewer than three undisturbed runs are in the profile's `unsettled`. threads: that many
    of the CPU, else the best number is found.

    Raises OutOfMemoryError when the memory for the probes is refused, and InvalidError when
    HELM_CPU_ISA or HELM_CPU_INT names what the machine lacks. `helm.measure.accelerator` measures
    the rest.
    """
    report = progress or (lambda _what, _share: None)
    cpu, unsettled = _measure_cpu(report, budget_s, threads)
    report("done", 1.0)
    return Profile(
        name="this machine",
        estimated=False,
        identity={**identity(), "date": datetime.date.today().isoformat()},
        cpu=cpu,
        accelerator=None,
        link=None,
        unsettled=unsettled,
    )


def identity() -> dict[str, str | int | float]:
    """What a profile's rates depend on, besides the thread limits."""
    import helm
    from helm import _helm

    return {
        "cpu": cpu_model(),
        "isa": _helm.isa_choice()[0],
        "integer_isa": _helm.integer_isa_choice()[0],
        "cores": physical_cores(cpu_affinity()),
        "helm": helm.__version__,
    }


def probe_bytes(affinity: Collection[int]) -> int:
    """Memory that probes should read from, so that they find nothing of it in caches."""
    wanted = max(_CACHES * last_level_cache_bytes(affinity), _LEAST_BYTES)
    return min(wanted, _MOST_BYTES, memory_available() // 4)


def _measure_cpu(
    report: Progress, budget_s: float, threads: int | None
) -> tuple[CpuProfile, tuple[str, ...]]:
    """The profile, and what is unsettled in it."""
    from helm import _helm

    start = time.perf_counter()
    affinity = cpu_affinity()
    most = default_threads(affinity)
    memory_bytes = memory_available()
    report("memory", 0.0)
    probe = _helm.StageProbe(probe_bytes(affinity), one_cpu_per_core(affinity)[:most])
    budget_s = max(0.1 * budget_s, budget_s - (time.perf_counter() - start))

    sweep_s = budget_s * _SWEEP_SHARE
    counts = thread_candidates(affinity) if threads is None else [threads]
    matvec, matmul = sweep_quantities(probe, counts)
    visit((*matvec.values(), *matmul.values()), sweep_s, report, 0.0, _SWEEP_SHARE)
    sweep = {count: quantity.bytes_per_s for count, quantity in matvec.items()}
    chosen = choose_threads(sweep, {n: quantity.flops_per_s for n, quantity in matmul.items()})

    rates = _Rates(probe, chosen)
    visit(rates.all(), budget_s - sweep_s, report, _SWEEP_SHARE, 1.0)
    near = one_cpu_per_core(affinity)[:most]
    del probe  # its memory is wanted
    tiers, left_out = measure_tiers(
        far_nodes(affinity), chosen, near, probe_bytes(affinity), report
    )
    measured = [*matvec.values(), *matmul.values(), *rates.all()]
    unsettled = dict.fromkeys(quantity.name for quantity in measured if not quantity.trusted)
    cpu = rates.profile(memory_bytes, sweep)
    return dataclasses.replace(cpu, tiers=tiers, left_out=left_out), tuple(unsettled)


def choose_threads(matvec: Mapping[int, float], matmul: Mapping[int, float]) -> int:
    """The thread count to use, by both sweeps (threads -> rate).

    Decode comes first: only counts `near_best`. Of those the best matrix-matrix rate, as prefill
    still gains where bandwidth no longer does; within 3 % of it the fewest threads. `matmul` has
    those counts at least, and need not have the only one.
    """
    near = near_best(matvec)
    if len(near) == 1:
        return near[0]
    enough = 0.97 * max(matmul[count] for count in near)
    return min(count for count in near if matmul[count] >= enough)


def near_best(matvec: Mapping[int, float]) -> list[int]:
    """Counts within 5 % of the best matrix-vector rate, none slower than one thread."""
    least = max(0.95 * max(matvec.values()), matvec[min(matvec)])
    return [count for count, rate in matvec.items() if rate >= least]


def sweep_quantities(
    probe: Any, counts: Iterable[int]
) -> tuple[dict[int, Quantity], dict[int, Quantity]]:
    """What decides on the number of threads: products of one token, and of 64."""

    def quantity(count: int, tokens: int) -> Quantity:
        return _products(probe, count, SWEEP_DTYPE, tokens)

    counts = list(counts)
    return {n: quantity(n, 1) for n in counts}, {n: quantity(n, 64) for n in counts}


def _products(probe: Any, threads: int, kind: str, tokens: int) -> Quantity:
    return Quantity(
        f"{kind} products, {counted(tokens, 'token')}, {counted(threads, 'thread')}",
        lambda seconds: probe.matmul(threads, WEIGHT_FORMATS[kind], tokens, seconds),
    )


def _attention(
    probe: Any, threads: int, dtype: str, heads: tuple[int, int], queries: int, context: int
) -> Quantity:
    """heads: KV heads, and query heads of each."""
    return Quantity(
        f"{dtype} attention, {counted(queries * heads[1], 'row')}, {context:,} positions",
        lambda seconds: probe.attention(threads, dtype, *heads, queries, context, seconds),
    )


class _Rates:
    """Everything measured with the chosen number of threads."""

    def __init__(self, probe: Any, threads: int) -> None:
        self.threads = threads
        self.matmul = {
            kind: {tokens: _products(probe, threads, kind, tokens) for tokens in TOKENS}
            for kind in WEIGHT_FORMATS
        }
        # Bound by arithmetic: no more heads than keep all threads busy.
        prefill_heads = min(threads, _MOST_KV_HEADS), PREFILL_GROUP

        def decode(dtype: str, group: int) -> Quantity:
            return _attention(probe, threads, dtype, (DECODE_KV_HEADS, group), 1, DECODE_CONTEXT)

        def prefill(dtype: str, context: int) -> Quantity:
            return _attention(probe, threads, dtype, prefill_heads, PREFILL_QUERIES, context)

        self.attention = {
            dtype: {
                **{group: decode(dtype, group) for group in DECODE_GROUPS},
                PREFILL_QUERIES * PREFILL_GROUP: prefill(dtype, PREFILL_CONTEXT),
            }
            for dtype in KV_DTYPES
        }
        self.short_prefill = prefill(SWEEP_DTYPE, PREFILL_QUERIES)
        self.prefill_heads = prefill_heads
        self.elementwise = Quantity(
            "elementwise ops", lambda s: probe.elementwise(threads, ELEMENTWISE_TOKENS, s)
        )
        self.handovers = Quantity("ops", lambda s: probe.handovers(threads, _HANDOVERS, s))
        self.bare = Quantity("bare steps", lambda s: probe.empty_ops(threads, 0, s))
        self.mapped = Quantity(
            f"{SWEEP_DTYPE} products, 1 token, mapped weights",
            lambda s: probe.mapped_matvec(threads, SWEEP_DTYPE, s),
        )
        self.copy = Quantity("copying weights", lambda s: probe.copy(threads, s))
        self.compressed = compressed_quantities(probe, threads, COMPRESSED_TOKENS)
        self.compress = Quantity("compressing weights", lambda s: probe.compress(threads, s))
        self.tiny = TinyModel()
        self.step = Quantity("engine steps", self.tiny.steps)
        self.lone_op = Quantity("ops, 1 thread", lambda s: probe.empty_ops(1, _EMPTY_OPS, s))

    def all(self) -> list[Quantity]:
        tables = (*self.matmul.values(), *self.attention.values())
        return [
            *(quantity for table in tables for quantity in table.values()),
            self.elementwise,
            self.mapped,
            self.copy,
            *self.compressed.values(),
            self.compress,
            self.short_prefill,
            self.handovers,
            self.bare,
            self.step,
            self.lone_op,
        ]

    def profile(self, memory_bytes: int, sweep: Mapping[int, float]) -> CpuProfile:
        wake_s = self.bare.seconds
        op_s = max(0.0, (self.handovers.seconds - wake_s) / _HANDOVERS)
        engine_s = self.step.seconds - self.tiny.ops * self.lone_op.seconds / _EMPTY_OPS
        return CpuProfile(
            memory_bytes=memory_bytes,
            threads=self.threads,
            thread_sweep=dict(sweep),
            matvec_bytes_per_s={k: self.matmul[k][1].bytes_per_s for k in WEIGHT_FORMATS},
            matmul_flops=flops_by_rows(self.matmul),
            attention_bytes_per_s={d: self.attention[d][1].bytes_per_s for d in KV_DTYPES},
            attention_flops=flops_by_rows(self.attention),
            op_s=op_s,
            step_s=wake_s + max(0.0, engine_s),
            activation_bytes_per_s=self.elementwise.bytes_per_s,
            attention_query_s=self._attention_query_s(),
            mapped_matvec_ratio=min(rate_ratio(self.mapped.shapes), MOST_MAPPED_RATIO),
            copy_bytes_per_s=self.copy.bytes_per_s,
            lone_op_s=self.lone_op.seconds / _EMPTY_OPS,
            compressed_ratio=compressed_ratio(self.compressed),
            compress_bytes_per_s=self.compress.bytes_per_s,
        )

    def _attention_query_s(self) -> float:
        """What a query and head of a short prompt cost beside what causality asks for."""
        rate = self.attention[SWEEP_DTYPE][PREFILL_QUERIES * PREFILL_GROUP].flops_per_s
        short = self.short_prefill
        late = short.seconds - sum(shape.flops for shape in short.shapes) / rate
        return max(0.0, late / (PREFILL_QUERIES * math.prod(self.prefill_heads)))


def compressed_quantities(probe: Any, threads: int, counts: Iterable[int]) -> dict[int, Quantity]:
    """By number of tokens, for `compressed_ratio`."""

    def quantity(tokens: int) -> Quantity:
        return Quantity(
            f"bf16 products, {counted(tokens, 'token')}, compressed weights",
            lambda seconds: probe.compressed_matmul(threads, tokens, seconds),
        )

    return {tokens: quantity(tokens) for tokens in counts}


def compressed_ratio(quantities: Mapping[int, Quantity]) -> dict[int, float]:
    """See CpuProfile.compressed_ratio."""
    return {
        tokens: min(rate_ratio(quantity.shapes), MOST_COMPRESSED_RATIO)
        for tokens, quantity in quantities.items()
    }


def flops_by_rows(
    tables: Mapping[str, Mapping[int, Quantity]],
) -> dict[str, dict[int, float]]:
    """dtype -> rows -> FLOP/s."""
    return {
        dtype: {rows: quantity.flops_per_s for rows, quantity in table.items()}
        for dtype, table in tables.items()
    }
