"""The keys of one architecture in a GGUF header, checked; knows no architecture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from helm.base.jsonio import Reader
from helm.errors import UnsupportedModelError
from helm.model.gguf.cursor import Array
from helm.model.gguf.file import Gguf, needed

MOST = 2**31


class Keys:
    """The keys of one architecture, which begin with its name."""

    def __init__(self, gguf: Gguf, name: str) -> None:
        self._gguf = gguf
        self._node = gguf.node()
        self._name = name

    def get(self, key: str, default: Any = None) -> Reader:
        return self._node.get(f"{self._name}.{key}", default)

    def needed(self, key: str) -> Reader:
        return needed(self._node, f"{self._name}.{key}")

    def has_tensor(self, name: str) -> bool:
        return name in self._gguf.tensors

    def integer(self, key: str) -> int:
        return self.needed(key).integer(1, MOST)

    def uniform(self, key: str, default: int | None = None) -> int:
        """An integer that may be stated per layer, where all layers agree."""
        node = self.get(key, default)
        if not isinstance(node.value, Array):
            return self.integer(key) if default is None else node.integer(1, MOST)
        values = set(node.value.numbers().tolist())
        if len(values) != 1:
            raise UnsupportedModelError(
                f"[{node.subject}] {node.path}: differs between layers ({len(values)} values), "
                "which HELM does not run; take another model"
            )
        return Reader(values.pop(), node.subject, node.error, node.path).integer(1, MOST)

    def decimal(self, key: str, default: float | None = None) -> float:
        """The shortest number that is stored so in f32, as it stands in config.json."""
        node = self.get(key, default)
        value = self.needed(key).number() if node.null else node.number()
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        if not math.isfinite(narrow):
            node.reject(f"{value:g} is no number of 32 bits; download the file again")
        return float(str(narrow))
