"""How many threads to use on this machine: by its profile, or by a short measurement that is kept.

Decode is bound by memory, prefill by arithmetic, and neither grows with every core: a few threads
may take all the bandwidth, efficiency cores may make the others wait. So both are measured, with
the engine's own products: decode for the few counts that may be best, prefill, which takes longer,
for those among which decode does not decide; for the best counts also what compressed weights
bring, to one sequence and to several.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from helm.base import own_folder
from helm.base.jsonio import parse
from helm.errors import HelmError, OutOfMemoryError, ProfileError
from helm.machine.profile import read_compressed_ratio
from helm.machine.resources import (
    cpu_affinity,
    cpus_to_pin,
    last_level_cache_bytes,
    memory_available,
    one_cpu_per_core,
    thread_candidates,
)
from helm.measure.cpu import (
    COMPRESSED_TOKENS,
    choose_threads,
    compressed_quantities,
    compressed_ratio,
    near_best,
    sweep_quantities,
)
from helm.measure.profile_cache import cached_file, cached_profile, keep, outdated
from helm.measure.quantity import Quantity, visit

_FORMAT, _VERSION = "helm-threads", 4
_COMPRESSED_TOKENS = COMPRESSED_TOKENS[:-1]  # of decode
_BUDGET_S = 0.1  # of each kind; filling the memory that is read takes as long
# Enough that products read from memory; how fast that is to the percent matters to a profile only.
_CACHES = 4
_LEAST_BYTES, _MOST_BYTES = 1 << 27, 1 << 30
_MEMORY_SHARE = 8  # takes at most so small a part of what is free


@dataclass(frozen=True)
class Rates:
    """What some number of threads reached: bytes/s of matrix-vector products, FLOP/s of products of
    many tokens, None where they do not matter; see CpuProfile for compressed_ratio, None where
    other counts are better."""

    matvec_bytes_per_s: float
    matmul_flops: float | None
    compressed_ratio: Mapping[int, float] | None = None


@dataclass(frozen=True)
class ThreadChoice:
    """threads: how many. cpus: on which each stays, empty where the system places them. reason:
    why so many, for people. compressed_ratio: see CpuProfile; None: not measured."""

    threads: int
    cpus: tuple[int, ...]
    reason: str
    compressed_ratio: Mapping[int, float] | None = None


Measured = tuple[dict[int, Rates], bool]  # by number of threads; whether undisturbed
Measure = Callable[[Sequence[int], Collection[int]], Measured]


def choose_here(measure: Measure | None = None) -> ThreadChoice:
    """The number of threads for this machine, as far as this process may use it; never slower than
    one thread. Measures for some 0.6 s unless there is no choice, a profile, or an earlier
    measurement; `measure` stands in for that."""
    affinity = cpu_affinity()
    counts = thread_candidates(affinity)
    choice = _choice(counts, affinity, measure or measure_rates)
    return dataclasses.replace(choice, cpus=tuple(cpus_to_pin(affinity, choice.threads)))


def _choice(counts: Sequence[int], affinity: Collection[int], measure: Measure) -> ThreadChoice:
    if len(counts) == 1:
        return ThreadChoice(counts[0], (), "this process may use no more")
    profile = cached_profile()
    if profile is not None and profile.cpu.threads in counts:
        cpu, reason = profile.cpu, "the best of those in this machine's profile"
        return ThreadChoice(cpu.threads, (), reason, cpu.compressed_ratio)
    rates = _cached(counts)
    if rates is None:
        try:
            rates, settled = measure(counts, affinity)
        except OutOfMemoryError:
            return ThreadChoice(counts[-1], (), "all cores, as memory to measure with is short")
        keep(cached_file("threads"), _to_json(rates, settled))
    threads = choose_threads(
        {n: rate.matvec_bytes_per_s for n, rate in rates.items()},
        {n: rate.matmul_flops for n, rate in rates.items() if rate.matmul_flops is not None},
    )
    ratio = rates[threads].compressed_ratio
    return ThreadChoice(threads, (), f"measured: {_said(rates)}", ratio)


def measure_rates(counts: Sequence[int], affinity: Collection[int]) -> Measured:
    """Measures each count of threads in turn, and whether other programs left enough undisturbed
    runs of each. Raises OutOfMemoryError where little memory is free."""
    from helm import _helm

    wanted = min(max(_CACHES * last_level_cache_bytes(affinity), _LEAST_BYTES), _MOST_BYTES)
    if wanted > memory_available() // _MEMORY_SHARE:
        raise OutOfMemoryError(
            f"[threads] measuring takes {wanted} bytes, a {_MEMORY_SHARE}th of the free memory is "
            "less; state the number of threads instead"
        )
    probe = _helm.StageProbe(wanted, one_cpu_per_core(affinity)[: max(counts)])
    matvec, matmul = sweep_quantities(probe, counts)
    _visit(matvec.values())
    bytes_per_s = {n: quantity.bytes_per_s for n, quantity in matvec.items()}
    near = near_best(bytes_per_s)
    flops: dict[int, float] = {}
    if len(near) > 1:
        _visit(matmul[n] for n in near)
        flops = {n: matmul[n].flops_per_s for n in near}
    compressed = {n: compressed_quantities(probe, n, _COMPRESSED_TOKENS) for n in near}
    for tokens in _COMPRESSED_TOKENS:
        _visit(compressed[n][tokens] for n in near)
    ratios = {n: compressed_ratio(quantities) for n, quantities in compressed.items()}
    few = (quantity for quantities in compressed.values() for quantity in quantities.values())
    measured = (*matvec.values(), *(matmul[n] for n in flops), *few)
    rates = {n: Rates(bytes_per_s[n], flops.get(n), ratios.get(n)) for n in counts}
    return rates, all(quantity.trusted for quantity in measured)


def _visit(quantities: Iterable[Quantity]) -> None:
    visit(tuple(quantities), _BUDGET_S, lambda _what, _share: None, 0.0, 1.0)


def _said(rates: dict[int, Rates]) -> str:
    parts = []
    for n, rate in sorted(rates.items()):
        part = f"{n} thread{'s' * (n > 1)} {rate.matvec_bytes_per_s / 1e9:,.1f} GB/s"
        if rate.matmul_flops is not None:
            part += f" and {rate.matmul_flops / 1e9:,.0f} GFLOP/s"
        parts.append(part)
    return ", ".join(parts)


def _to_json(rates: dict[int, Rates], settled: bool) -> str:
    found = {str(n): vars(rate) for n, rate in rates.items()}
    document = {"format": _FORMAT, "version": _VERSION, "settled": settled, "rates": found}
    return json.dumps(document, indent=2)


def _cached(counts: Sequence[int]) -> dict[int, Rates] | None:
    """An earlier measurement of the same counts, if it holds."""
    path = cached_file("threads")
    try:
        content, written_s = own_folder.read(path)
        root = parse(content, str(path), ProfileError)
        root["format"].choice([_FORMAT])
        root["version"].integer(_VERSION, _VERSION)
        if outdated(written_s, root["settled"].boolean()):
            return None
        table = root["rates"]
        rates = {}
        for key in table.names():
            flops, ratio = table[key]["matmul_flops"], table[key]["compressed_ratio"]
            rates[int(key)] = Rates(
                table[key]["matvec_bytes_per_s"].number(1.0, 1e18),
                None if flops.null else flops.number(1.0, 1e18),
                None if ratio.null else read_compressed_ratio(ratio),
            )
    except (OSError, HelmError, ValueError):
        return None
    near = near_best({n: rate.matvec_bytes_per_s for n, rate in rates.items()}) if rates else []
    whole = len(near) == 1 or all(rates[n].matmul_flops is not None for n in near)
    return rates if whole and sorted(rates) == sorted(counts) else None
