"""The JSON schema of an answer that must be a tool call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helm.errors import InvalidError
from helm.serve.tools.families import function_of

_DATA = ("const", "enum", "default", "examples")  # values, which hold no schemas
_MOST_CALLS = 16  # at once: some small models would never end their list
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def call_schema(
    tools: Sequence[Any], choice: Any, key: str, parallel: bool = False
) -> dict[str, Any] | None:
    """For tool_choice "required", or a named tool as OpenAI writes it or as its name alone; None
    for "auto" and "none". key: what the family calls the arguments. parallel: an array of calls,
    one at least and _MOST_CALLS at most. InvalidError for a tool that is not there."""
    if choice in (None, "auto", "none"):
        return None
    functions = [function_of(tool) for tool in tools]
    if choice != "required":
        functions = [_named(functions, choice)]
    definitions = {
        f"tool{i}": _moved(function.get("parameters") or _NOTHING, f"#/$defs/tool{i}")
        for i, function in enumerate(functions)
    }
    calls: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                key: {"$ref": f"#/$defs/tool{i}"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if parallel:
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": _MOST_CALLS}
    return {**call, "$defs": definitions}


def _named(functions: list[dict[str, Any]], choice: Any) -> dict[str, Any]:
    name = function_of(choice).get("name") if isinstance(choice, dict) else choice
    for function in functions:
        if function["name"] == name:
            return function
    known = ", ".join(repr(function["name"]) for function in functions)
    raise InvalidError(
        f"[chat] tool_choice names {name!r}, the tools are {known}; name one of them"
    )


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references into itself point to its new place."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in _DATA
        else _moved(value, root)
        for key, value in schema.items()
    }
