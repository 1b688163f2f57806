"""The error that is stated of HELM's own formats is the one that the encoder makes."""

from __future__ import annotations

import numpy as np
import pytest

import packed_oracle
from helm.base.formats import ROUNDING_RMS

_helm = pytest.importorskip("helm._helm", reason="the native module is not built")
ROWS, COLS = 512, 1024


@pytest.mark.parametrize(("policy", "format"), [("q8", "c8.s32"), ("q4", "c4.km32")])
def test_normally_distributed_weights_are_rounded_with_the_error_that_is_stated(
    policy: str, format: str
) -> None:
    weights = np.random.default_rng(7).standard_normal((ROWS, COLS)).astype(np.float16)
    stored = {"weight": ("u8", [ROWS, 2 * COLS], weights.view(np.uint8).reshape(-1))}
    packed = np.asarray(_helm.encode_weights("f16", stored, ROWS, COLS, format))
    exact = weights.astype(np.float64)
    error = packed_oracle.read_back(format, packed, ROWS, COLS).astype(np.float64) - exact
    relative = float(np.sqrt(np.sum(error**2) / np.sum(exact**2)))
    assert relative == pytest.approx(ROUNDING_RMS[policy], rel=0.02)
