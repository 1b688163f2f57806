"""Small models with their matrices in 8 or 4 bits, and how far logits lie from those of the same
rounded weights in f32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import helm
import small_models
from helm.compiler import tensors

# Of a row of logits: activations are rounded, too, and more of them where more is attended to. A
# mixture may choose other experts then, so that a few rows are far: the median counts.
NEAR = 0.08


def rounded_folder(name: str, policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of `small_models.CASES` as `helm.quantize` saves it. From now on the test's small
    matrices are held in as few bits as large ones."""
    monkeypatch.setattr(tensors, "_FEW_WEIGHTS", 0)
    monkeypatch.setattr(tensors, "_FEWEST_WEIGHTS", 0)
    helm.quantize(small_models.model_dir(name), folder, to=policy, compare_answers=False)
    return folder


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """[rows] the norm of the error, of that of the logits."""
    errors: np.ndarray = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return errors
