"""Which values ops read and write. Knows no program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from helm.model.graph import Add, Linear, Norm, Op, PositionEmbedding, Rope
from helm.model.mixture_ops import Experts


def accesses(ops: Iterable[Op], widths: Mapping[str, int]) -> Iterator[tuple[str, bool, bool]]:
    """(value, whether it is read, whether it is written)"""
    for op in ops:
        *inputs, out = op.uses()
        yield from ((value, True, False) for value in inputs)
        keeps = isinstance(op, (PositionEmbedding, Rope, Add, Experts))
        keeps |= isinstance(op, Linear) and op.accumulate
        keeps |= isinstance(op, Norm) and op.groups * op.size != widths[out]
        yield out, keeps, True
