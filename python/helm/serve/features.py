"""What this HELM can do beside plain sampling: fields that may be missing say so with 501."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from helm.serve.errors import ApiError
from helm.text.sampling import SamplingKeywords, SamplingParams

_NEUTRAL: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}


def sampling_of(
    max_tokens: int | None, logprobs: int | None, values: Mapping[str, Any]
) -> SamplingParams:
    """Sampling parameters by their names; None is the model's own. InvalidError."""
    known = SamplingKeywords.__annotations__
    given = {}
    for name, value in values.items():
        if value is None or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        if name not in known:
            raise ApiError(501, f"{name} is not implemented", param=name)
        given[name] = value
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def constraint(kind: str, schema: Any, tokenizer: Any, param: str) -> object:
    """What holds an answer to a format: "json_object" or "json_schema". InvalidError with the
    reason for a schema that is not accepted; 501 where this HELM has none. param: the field."""
    name = "helm.text.structured"
    if importlib.util.find_spec(name) is None:
        raise ApiError(501, "structured output is not implemented", param=param)
    structured = importlib.import_module(name)
    if kind == "json_object":
        found: object = structured.json_object(tokenizer)
    else:
        found = structured.json_schema(schema, tokenizer)
    return found
