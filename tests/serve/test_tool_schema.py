"""The schema that forces a call."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from helm.errors import InvalidError
from helm.serve.tools.deltas import ToolDelta
from helm.serve.tools.families import FAMILIES
from helm.serve.tools.parser import parser_for

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NESTED = {
    "type": "object",
    "properties": {
        "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "inner": {"$ref": "#"},
        "$ref": {"enum": [{"$ref": "#/kept"}]},  # a property of that name, and data
    },
    "required": ["places"],
    "$defs": {"Place": PLACE},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "travel", "parameters": NESTED}},
    {"type": "function", "function": {"name": "now"}},
]
GOOD = {
    "weather": {"city": "Paris"},
    "travel": {"places": [{"city": "Rome"}], "inner": {"places": []}, "$ref": {"$ref": "#/kept"}},
    "now": {},
}
BAD = {
    "weather": {"town": "Paris"},
    "travel": {"places": [{"town": "Rome"}]},
    "now": {"zone": "UTC"},
}


def schema(choice: Any, form: str = "hermes", parallel: bool = False) -> dict[str, Any] | None:
    parser = parser_for("", TOOLS, form)
    assert parser is not None
    return parser.required_schema(choice, parallel)


def valid(instance: Any, found: dict[str, Any] | None) -> bool:
    assert found is not None
    jsonschema.Draft202012Validator.check_schema(found)
    return bool(jsonschema.Draft202012Validator(found).is_valid(instance))


@pytest.mark.parametrize("form", sorted(FAMILIES))
def test_required_calls_are_what_the_parser_takes(form: str) -> None:
    key = FAMILIES[form].key
    found = schema("required", form)
    for name, arguments in GOOD.items():
        call = {"name": name, key: arguments}
        assert valid(call, found)
        assert not valid({"name": name, key: BAD[name]}, found)
        assert not valid({"name": name}, found)
        assert not valid({**call, "more": 1}, found)
        parser = parser_for("", TOOLS, form)
        assert parser is not None
        first, more = parser.feed(json.dumps(call), last=True)
        assert isinstance(first, ToolDelta)
        assert isinstance(more, ToolDelta)
        assert first.name == name
        assert json.loads(more.arguments) == arguments
    assert not valid({"name": "else", key: {}}, found)


@pytest.mark.parametrize(
    "choice", ["travel", {"type": "function", "function": {"name": "travel"}}, {"name": "travel"}]
)
def test_a_named_tool(choice: Any) -> None:
    found = schema(choice)
    assert valid({"name": "travel", "arguments": GOOD["travel"]}, found)
    assert not valid({"name": "travel", "arguments": BAD["travel"]}, found)
    assert not valid({"name": "weather", "arguments": GOOD["weather"]}, found)


def test_calls_in_parallel() -> None:
    found = schema("required", parallel=True)
    calls = [{"name": name, "arguments": arguments} for name, arguments in GOOD.items()]
    assert valid(calls, found)
    assert not valid([], found)
    assert valid(calls * 5, found)
    assert not valid(calls * 6, found)  # 18: a model that never ends is cut off at 16
    assert not valid([*calls, {"name": "now", "arguments": BAD["now"]}], found)


def test_no_schema_where_nothing_is_forced() -> None:
    assert [schema(choice) for choice in (None, "auto", "none")] == [None] * 3


def test_a_tool_that_is_not_there() -> None:
    with pytest.raises(InvalidError, match="names 'fly', the tools are 'weather', 'travel', 'now'"):
        schema({"type": "function", "function": {"name": "fly"}})


def test_llguidance_takes_the_schemas() -> None:
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed (serve)")
    for choice in ("required", "travel"):
        for parallel in (False, True):
            text = json.dumps(schema(choice, parallel=parallel))
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
            assert llguidance.LLMatcher.validate_grammar(grammar) == ""
