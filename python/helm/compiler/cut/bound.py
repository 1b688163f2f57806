"""What a step of any layout with cut layers takes at least. Knows no layout.

A layout has no more on the accelerator than there is room for. So let a byte there have a price in
seconds. Each unit alone then takes no less than its cheapest way, and all that the room is worth
comes back. That is a bound for any price, and a close one for the best (Lagrange).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helm.compiler.cut.price import StepPrice, Visiting
from helm.compiler.times import F64, I64

_PRICES = 33  # that are tried
_ROUNDED = 1 - 1e-9
Unit = tuple[F64, F64, I64]  # [classes] how many; [classes, ways] their seconds, bytes there


def least_s(price: StepPrice, there: tuple[I64, I64, I64], room: int) -> float:
    """there: bytes on the accelerator of attention, mlp and head, see `CutMemory.there`; room: for
    all of these."""
    cuts, layers, fixed_s = price.cuts, price.layers, float(price.ends.sum())
    counts = np.asarray(cuts.totals, np.float64)
    units: list[Unit] = [(np.ones(1), price.head.sum(axis=0)[None], there[2][None])]
    if isinstance(layers, Visiting):
        fixed_s += layers.least_s(room)
    else:
        units.append((counts, _by_way(layers.attention_s), _by_way(there[0])))
        units.append((counts, _by_way(layers.mlp_s), _by_way(there[1])))
    most = max(_worth(unit) for unit in units)
    prices = np.linspace(0.0, most, _PRICES)
    found = fixed_s - prices * room
    for many, seconds, size in units:
        found = found + (seconds + prices[:, None, None] * size).min(axis=2) @ many
    return float(found.max()) * _ROUNDED


def _by_way(of: Any) -> Any:
    """[classes, ways], whatever the home."""
    return of.reshape(len(of), -1)


def _worth(unit: Unit) -> float:
    """The most seconds that a byte on the accelerator saves."""
    _, seconds, size = unit
    saved = (seconds[:, -1] - seconds[:, 0]) / np.maximum(1, size[:, 0])
    return float(np.maximum(0.0, saved).max())
