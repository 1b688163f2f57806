"""Shares several drives of what is read, by what they took. Reads nothing."""

from __future__ import annotations

from collections.abc import Sequence


def rebalanced(
    shares: Sequence[float], seconds: Sequence[float], strength: float = 0.5
) -> list[float]:
    """The shares of drives for the next round; they add up to what they did.

    seconds: that each drive took for its share, all reading at once. strength: of the correction,
    from 0 to 1. Park and Egger (CPU-GPU Workload Distribution) print the correction with the wrong
    sign: as printed the slowest drive is given more. Raises ValueError for a drive that took no
    time.
    """
    if min(seconds) <= 0.0:
        raise ValueError(f"drives took {list(seconds)} s; expected more than 0")
    mean = sum(seconds) / len(seconds)
    raw = [
        share * (1.0 + strength * (mean / took - 1.0))
        for share, took in zip(shares, seconds, strict=True)
    ]
    return [share * sum(shares) / sum(raw) for share in raw]
