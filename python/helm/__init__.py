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
    from helm.compiler.format_choice import FormatRow
    from helm.compiler.solve import Study
    from helm.plan.schema import Plan
    from helm.session.async_llm import AsyncLLM
    from helm.session.calls import TextStream
    from helm.session.llm import LLM
    from helm.session.quantize import Quantized, quantize
    from helm.session.saved_kv import SavedKV
    from helm.session.study import formats, study
    from helm.text.completion import Completion, TextChunk, Timings
    from helm.text.sampling import SamplingParams
    from helm.text.tokenizer import Tokenizer

    __version__: str

# Looked up when first used: importing helm stays cheap.
_LAZY = {
    "LLM": "helm.session.llm",
    "SamplingParams": "helm.text.sampling",
    "SavedKV": "helm.session.saved_kv",
    "Completion": "helm.text.completion",
    "TextChunk": "helm.text.completion",
    "Timings": "helm.text.completion",
    "AsyncLLM": "helm.session.async_llm",
    "TextStream": "helm.session.calls",
    "Tokenizer": "helm.text.tokenizer",
    "Plan": "helm.plan.schema",
    "Quantized": "helm.session.quantize",
    "quantize": "helm.session.quantize",
    "FormatRow": "helm.compiler.format_choice",
    "Study": "helm.compiler.solve",
    "formats": "helm.session.study",
    "study": "helm.session.study",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "CompressionError",
    "ConfigError",
    "DeviceError",
    "FormatRow",
    "HelmError",
    "InvalidError",
    "NoDeviceError",
    "OutOfMemoryError",
    "Plan",
    "PlanError",
    "ProfileError",
    "Quantized",
    "SamplingParams",
    "SavedKV",
    "Study",
    "TextChunk",
    "TextStream",
    "Timings",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
    "formats",
    "quantize",
    "study",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("helm-llm")
    elif name in _LAZY:
        try:
            value = getattr(importlib.import_module(_LAZY[name]), name)
        except ImportError as reason:
            from helm.base.import_name import clash

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
