"""Lexicographic order of scores, for all rows at once. Knows nothing of what they mean."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from helm.compiler.times import F64


def least(scores: F64) -> npt.NDArray[np.int64]:
    """[rows] the page of the lexicographically least scores[:, row, page], the first if equal."""
    allowed = np.ones(scores.shape[1:], bool)
    for score in scores:
        masked = np.where(allowed, score, np.inf)
        allowed &= masked == masked.min(axis=1, keepdims=True)
    return np.asarray(np.argmax(allowed, axis=1))


def less(score: F64, best: F64) -> npt.NDArray[np.bool_]:
    """[rows] whether score[:, row] comes before best[:, row] in lexicographic order."""
    found = np.zeros(score.shape[1], bool)
    equal = np.ones(score.shape[1], bool)
    for mine, other in zip(score, best, strict=True):
        found |= equal & (mine < other)
        equal &= mine == other
    return found
