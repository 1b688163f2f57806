"""Measures how fast the CPU reads memory that lies on other nodes than its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from helm.errors import HelmError
from helm.machine.memory_nodes import MemoryNode
from helm.machine.rates import MemoryTier
from helm.measure.quantity import Progress, Quantity, visit

_LEAST_BYTES = 1 << 30  # of a node's free memory; less is not worth a plan
_SECONDS = 0.5  # of each node


def measure_tiers(
    nodes: Collection[MemoryNode],
    threads: int,
    cpus: Sequence[int],
    wanted_bytes: int,
    report: Progress,
    *,
    refusal: Callable[[int], str] | None = None,
    probe: Callable[[int, list[int], int], Any] | None = None,
) -> tuple[tuple[MemoryTier, ...], tuple[str, ...]]:
    """The tiers, the fastest first, and why other nodes are left out. wanted_bytes: to read from,
    beyond all caches. refusal, probe: the system's answer and `_helm.StageProbe`."""
    from helm import _helm

    refusal, probe = refusal or _helm.memory_node_refusal, probe or _helm.StageProbe
    tiers, left_out = list[MemoryTier](), list[str]()
    for one in nodes:
        if one.usable_bytes < _LEAST_BYTES:
            continue
        if why := refusal(one.node):
            left_out.append(f"memory node {one.node} is left out, the system says: {why}")
            continue
        report(f"memory node {one.node}", 1.0)
        try:
            stages = probe(min(wanted_bytes, one.usable_bytes // 2), list(cpus), one.node)
            rate = _rate(stages, threads, report)
        except HelmError as error:
            left_out.append(f"memory node {one.node} is left out: {error}")
            continue
        tiers.append(MemoryTier(one.node, one.usable_bytes, rate))
    return tuple(sorted(tiers, key=lambda tier: -tier.bytes_per_s)), tuple(left_out)


def _rate(stages: Any, threads: int, report: Progress) -> float:
    """Bytes per second of products of one token, as in the sweep of threads."""
    products = Quantity(
        "products from another memory node",
        lambda seconds: stages.matmul(threads, "bf16", 1, seconds),
    )
    visit([products], _SECONDS, report, 1.0, 1.0)
    return products.bytes_per_s
