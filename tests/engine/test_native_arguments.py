"""What the native objects say to arguments of other types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import helm
from helm import _helm

NO_TOKENS = [
    np.datetime64("NaT"), np.timedelta64(3), np.array(3, np.int32), np.zeros((2, 2), np.int32),
    np.array([1, 2], np.object_), np.str_("a"), "text", b"bytes", [1, 2], 3,
]  # fmt: skip


@pytest.mark.parametrize("tokens", NO_TOKENS, ids=lambda value: type(value).__name__)
def test_tokens_that_are_no_array_are_a_type_error(tokens: Any) -> None:
    with helm.LLM(threads=1) as llm:
        sequence = llm._engine.open(8)
        with pytest.raises(TypeError, match=r"tokens must be an int32 array \[n\], got"):
            llm._engine.forward(sequence, tokens)
        assert llm._engine.length(sequence) == 0
        assert llm._engine.forward(sequence, np.array([1, 2], np.int32)).shape == (1, 1024)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"a": np.datetime64("NaT")},
            r'tensor "a" must be a contiguous CPU array, got (numpy.)?datetime64',
        ),
        ({"a": 3}, r'tensor "a" must be a contiguous CPU array, got int'),
        ({3: np.zeros(3, np.float32)}, "names of tensors must be text"),
    ],
)
def test_weights_that_are_no_arrays_are_a_type_error(tensors: Any, message: str) -> None:
    with helm.LLM(threads=1) as llm, pytest.raises(TypeError, match=message):
        _helm.Engine(llm.plan.to_json(), str(llm.folder), tensors)
