"""Tool calls in answers of each family, however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helm.serve.tools.deltas import ContentDelta, ToolDelta
from helm.serve.tools.families import FAMILIES, family_of
from helm.serve.tools.parser import ToolParser, parser_for

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time.now"}},
]
PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
LLAMA = f'{{"name": "weather", "parameters": {PARIS}}}'
NOW = '{"name": "time.now", "arguments": {}}'


def parse(pieces: list[str], form: str, live: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the calls as (name, arguments); checks that deltas are strict."""
    ids = itertools.count()
    parser = parser_for("", TOOLS, form, live, lambda: f"id{next(ids)}")
    assert parser is not None
    content, calls = "", []
    deltas = [d for piece in pieces for d in parser.feed(piece, last=False)]
    for delta in [*deltas, *parser.feed("", last=True)]:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.index == len(calls):
            assert (delta.id, delta.arguments) == (f"id{delta.index}", "")
            assert delta.name in ("weather", "time.now")
            calls.append((delta.name, ""))
        else:
            assert delta.index == len(calls) - 1
            assert delta.id is None
            assert delta.name is None
            assert delta.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.calls == len(calls)
    return content, calls


WHOLE = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", PARIS)]),
    ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>", "I look.", [("weather", PARIS)]),
    (
        "hermes",
        f"\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>\n",
        "",
        [("weather", PARIS), ("time.now", "{}")],
    ),
    (
        "hermes",
        f"<tool_call>[{CALL}, {NOW}]</tool_call>",
        "",
        [("weather", PARIS), ("time.now", "{}")],
    ),
    ("hermes", f"<tool_call>{CALL}", "", [("weather", PARIS)]),  # its end never came
    ("hermes", f"<tool_call>{CALL}<tool_call>{NOW}", "", [("weather", PARIS), ("time.now", "{}")]),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done.", " Done.", [("weather", PARIS)]),
    ("hermes", CALL, "", [("weather", PARIS)]),  # as a schema forces it
    ("hermes", f"[{CALL}, {CALL}]", "", [("weather", PARIS), ("weather", PARIS)]),
    ("llama3", LLAMA, "", [("weather", PARIS)]),
    ("llama3", f"<|python_tag|>{LLAMA}", "", [("weather", PARIS)]),
    ("llama3", f"{LLAMA}; {LLAMA}", "", [("weather", PARIS), ("weather", PARIS)]),
    ("llama3", f"{LLAMA}\n{LLAMA}", "", [("weather", PARIS), ("weather", PARIS)]),
    (
        "llama3",
        f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}',
        "",
        [("weather", PARIS)],
    ),
    ("llama3", f'{{"type": "function", "function": {LLAMA}}}', "", [("weather", PARIS)]),
    ("llama3", f'{{"function": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", "", [("weather", PARIS)]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {NOW}]", "", [("weather", PARIS), ("time.now", "{}")]),
    ("mistral", f"Well. [TOOL_CALLS]weather[ARGS]{PARIS}", "Well.", [("weather", PARIS)]),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}", "", [("weather", PARIS)]),
    (
        "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}[TOOL_CALLS]time.now[ARGS]{{}}",
        "",
        [("weather", PARIS), ("time.now", "{}")],
    ),
    ("generic", f"<tool_call>{CALL}</tool_call>", "", [("weather", PARIS)]),
    ("generic", CALL, "", [("weather", PARIS)]),
    ("generic", f'{{"arguments": {PARIS}, "name": "weather"}}', "", [("weather", PARIS)]),
    ("generic", '{"name": "weather"}', "", [("weather", "{}")]),
    ("generic", '{"name": "weather", "arguments": null}', "", [("weather", "{}")]),
    ("generic", '{"id": 7, "name": "weather", "arguments": {}}', "", [("weather", "{}")]),
    (
        "generic",
        f'{{"name": "weather", "arguments": {json.dumps(PARIS)}}}',  # as a string
        "",
        [("weather", PARIS)],
    ),
    (
        "generic",
        '{"name": "weather", "arguments": {"city": "a\nb\\n\\u00e9", "x": [1.5e3, true, null]}}',
        "",
        [("weather", '{"city": "a\\nb\\n\\u00e9", "x": [1.5e3, true, null]}')],
    ),
]  # fmt: skip

# What is no call stays as it came.
CONTENT = [
    ("hermes", "Hello  world \n"),
    ("hermes", "a < b, <tool and <tool_calls> "),
    ("hermes", "<tool_call>weather</tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'),
    ("hermes", '<tool_call>{"name": "weather"'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", " <tool_call> "),
    ("hermes", f'<tool_call>{{"name": "weather", "x": {"[" * 80}'),
    ("llama3", '{"name": "Ada", "born": 1815}'),
    ("llama3", '{"city": "Paris"} is JSON'),
    ("llama3", "[1] says so"),
    ("llama3", '<|python_tag|>weather.call(city="Paris")'),
    ("llama3", f"Here: {LLAMA}"),  # alone at the beginning
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS] weather in Paris"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]"),
    ("mistral", "[TOOL"),
    ("generic", "{}"),
    ("generic", ""),
    ("generic", " \n"),
]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("form", "text", "content", "calls"), WHOLE)
def test_calls_of_each_family(
    form: str, text: str, content: str, calls: list[tuple[str, str]], live: bool
) -> None:
    assert parse([text], form, live) == (content, calls)
    assert parse(list(text), form, live) == (content, calls)
    for place in range(len(text)):
        assert parse([text[:place], text[place:]], form, live) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("form", "text"), CONTENT)
def test_what_is_no_call_stays_content(form: str, text: str, live: bool) -> None:
    assert parse([text], form, live) == (text, [])
    assert parse(list(text), form, live) == (text, [])


def test_a_call_that_breaks_off() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": ]} more'
    assert parse([text], "hermes") == ("]} more", [("weather", '{"city": ')])
    assert parse([text], "hermes", live=False) == (text, [])
    cut = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert parse([cut], "hermes") == ("", [("weather", '{"city": "Par')])
    assert parse([cut], "hermes", live=False) == (cut, [])
    second = f"[TOOL_CALLS] [{CALL}, oops"
    assert parse([second], "mistral", live=False) == (", oops", [("weather", PARIS)])


def test_arguments_come_as_they_are_made() -> None:
    parser = ToolParser(FAMILIES["hermes"], TOOLS, new_id=lambda: "c")
    assert parser.feed('Hm <tool_call>{"name": "weather",') == [ContentDelta("Hm")]
    assert parser.feed(' "arguments": {"ci') == [
        ToolDelta(0, "c", "weather", ""),
        ToolDelta(0, None, None, '{"ci'),
    ]
    assert parser.feed('ty": 1}') == [ToolDelta(0, None, None, 'ty": 1}')]
    assert parser.feed("}</tool_call>", last=True) == []


def test_deltas_as_openai_has_them() -> None:
    first, more = ToolDelta(1, "c", "weather", ""), ToolDelta(1, None, None, "{}")
    assert first.to_openai() == {
        "index": 1, "id": "c", "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }  # fmt: skip
    assert more.to_openai() == {"index": 1, "function": {"arguments": "{}"}}


WORDS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "weather", CALL, LLAMA, NOW, PARIS, '{"name": "weather", "arguments": ', '"', "{", "}", "[",
    "]", ",", ";", " ", "\n", "\\", "é", "<", "text", '{"name"', "1", "null",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=12),
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
    st.data(),
)
@example(["<tool_call>", CALL, "text", " "], "hermes", True, None)
def test_no_cut_matters(words: list[str], form: str, live: bool, data: Any) -> None:
    text = "".join(words)
    whole = parse([text], form, live)
    assert parse(list(text), form, live) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(pieces, form, live) == whole
    if not whole[1]:
        assert whole[0] == text  # nothing is lost


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
)  # fmt: skip
def test_any_arguments_come_through(value: Any, form: str, ascii_only: bool) -> None:
    family = FAMILIES[form]
    call = {"name": "weather", family.key: {"value": value}}
    opener = family.openers[0]
    text = opener + json.dumps(call, ensure_ascii=ascii_only) + family.closer
    content, [(name, arguments)] = parse([text], form, live=False)
    assert (content, name) == ("", "weather")
    assert json.loads(arguments) == {"value": value}


def test_long_answers_take_time_in_proportion() -> None:
    # Every opener within the string begins nothing: else this would take minutes.
    text = '<tool_call>{"name": "' + "<tool_call>{" * 20_000
    assert parse([text], "hermes") == (text, [])


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("For each call return <tool_call>{...}</tool_call>", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ('{{ \'ipython\' }} respond with {"name": ..., "parameters": ...}', "llama3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ messages[0].content }}", "generic"),
    ],
)
def test_the_family_of_a_template(template: str, family: str) -> None:
    assert family_of(template).name == family


def test_no_tools_no_parser() -> None:
    assert parser_for("<tool_call>", None) is None
    assert parser_for("<tool_call>", []) is None


def test_ids() -> None:
    ids = []
    for form in ("mistral", "hermes"):
        parser = ToolParser(FAMILIES[form], TOOLS)
        deltas = parser.feed(f"[{CALL}, {CALL}]", last=True)
        ids.append([d.id for d in deltas if isinstance(d, ToolDelta) and d.id])
    assert [len(i) for i in ids[0]] == [9, 9]  # what Mistral's templates insist on
    assert all(i.isalnum() for i in ids[0])
    assert all(i.startswith("call_") for i in ids[1])
    assert len({*ids[0], *ids[1]}) == 4
