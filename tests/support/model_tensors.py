"""The weights of a model's folder as plans name them; imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from helm.model.checkpoint import TensorInfo
from helm.model.families import load_config
from helm.model.weight_names import read_weights


def tensors_of(folder: Path) -> dict[str, TensorInfo]:
    """By name, with their rows in the order that HELM needs."""
    return read_weights(folder, load_config(folder)).tensors
