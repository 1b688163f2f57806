"""Random weights of any size out of a few megabytes of noise, to be bound from memory.

Tensors are windows of one buffer. They are stored in another dtype than they are placed in, so the
engine converts each into memory of its own: what is measured reads as many bytes as real weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from helm.model.checkpoint import TensorInfo

_NOISE = (1 << 22) - 3  # elements; no multiple of a row, so that rows of a tensor differ
_SHIFT = 4096  # elements between the windows, so that tensors differ; keeps them aligned
_SCALE = np.float32(0.03)
_NUMPY = {"f16": np.float16, "f32": np.float32}


def stored_dtype(placed: str) -> str:
    """What weights placed in `placed` are stored in: not the same, and small where it can be."""
    return "f32" if placed == "f16" else "f16"


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], placed: str
) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """What the planner and the engine want of tensors in memory. Vectors, the scales of norms
    mostly, are ones; they are placed in f32."""
    stored = stored_dtype(placed)
    most = max(math.prod(shape) for shape in shapes.values()) + _SHIFT * len(shapes)
    noise = _SCALE * np.random.default_rng(0).standard_normal(_NOISE, dtype=np.float32)
    numbers = np.resize(noise.astype(_NUMPY[stored]), most)
    ones = np.ones(max(shape[0] for shape in shapes.values()), _NUMPY["f16"])
    tensors = {}
    for i, (name, shape) in enumerate(shapes.items()):
        window = numbers[_SHIFT * i : _SHIFT * i + math.prod(shape)].reshape(shape)
        tensors[name] = ones[: shape[0]] if len(shape) == 1 else window
    infos = {
        name: TensorInfo.in_memory(name, "f16" if t.ndim == 1 else stored, t.shape)
        for name, t in tensors.items()
    }
    return infos, tensors
