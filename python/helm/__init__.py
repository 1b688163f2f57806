"""HELM, an inference engine for large language models: the names that users import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from helm.errors import (
    CapacityError,
    CheckpointError,
    CompressionError,
    ConfigError,
    DeviceError,
    HelmError,
    InvalidError,
    NoDeviceError,
    OutOfMemoryError,
    PlanError,
    ProfileError,
    TokenizerError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from helm.batch import TextStream
    from helm.completion import Completion, TextChunk, Timings
    from helm.llm import LLM
    from helm.plan import Plan
    from helm.sampling import SamplingParams
    from helm.saved_kv import SavedKV
    from helm.tokenizer import Tokenizer

    __version__: str

# Looked up when first used: importing helm stays cheap.
_LAZY = {
    "LLM": "helm.llm",
    "SamplingParams": "helm.sampling",
    "SavedKV": "helm.saved_kv",
    "Completion": "helm.completion",
    "TextChunk": "helm.completion",
    "Timings": "helm.completion",
    "TextStream": "helm.batch",
    "Tokenizer": "helm.tokenizer",
    "Plan": "helm.plan",
}

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "CompressionError",
    "ConfigError",
    "DeviceError",
    "HelmError",
    "InvalidError",
    "NoDeviceError",
    "OutOfMemoryError",
    "Plan",
    "PlanError",
    "ProfileError",
    "SamplingParams",
    "SavedKV",
    "TextChunk",
    "TextStream",
    "Timings",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("helm-llm")
    elif name in _LAZY:
        try:
            value = getattr(importlib.import_module(_LAZY[name]), name)
        except ImportError as reason:
            from helm.import_name import clash

            problem = clash()
            if problem is None:
                raise
            raise ImportError(problem) from reason
    else:
        raise AttributeError(f"module 'helm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
