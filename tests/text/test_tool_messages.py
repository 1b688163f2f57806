"""Calls of tools and their answers in conversations, for each kind of chat template."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import helm.text.tool_messages
from helm.errors import TokenizerError
from helm.text.tokenizer import Tokenizer
from small_tokenizers import byte_level

ARGUMENTS = {"city": "Zürich", "days": 2}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
# As templates of each family write calls, in short.
QWEN = """{%- for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' %}{{ '' + m.content }}
{%- for c in m.tool_calls or [] %}{%- set c = c.function %}
{{- '<tool_call>{"name": "' + c.name + '", "arguments": ' }}{{ c.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
EITHER = QWEN.replace(
    "c.arguments | tojson", "c.arguments if c.arguments is string else c.arguments | tojson"
)
LLAMA = """{%- for m in messages %}[{{ m.role }}]
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
{%- set c = m.tool_calls[0].function %}
{{- '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL = """{%- for m in messages %}[{{ m.role }}]
{%- if m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}
{{- c.function | tojson }}{{ c.id }}{% endfor %}]
{%- elif m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
JOINS = """{%- for m in messages %}[{{ m.role }}]
{%- for c in m.tool_calls or [] %}{{ c.function.name + ':' + c.function.arguments }}{% endfor %}
{%- if m.content %}{{ m.content }}{% endif %}{% endfor %}"""
PRINTS = JOINS.replace("' + c.function.arguments", "' ~ c.function.arguments")
NO_TOOLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def conversation(calls: list[dict[str, Any]], content: Any = None) -> list[dict[str, Any]]:
    answers = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"result {i}"}
        for i, c in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *answers,
        {"role": "assistant", "content": "A"},
    ]


def render(template: str, messages: list[dict[str, Any]]) -> str:
    before = json.dumps(messages)
    text = Tokenizer(byte_level(), chat_templates={"default": template}).render_chat(messages)
    assert json.dumps(messages) == before
    return text


ONE = f'{{"name": "weather", "arguments": {TEXT}}}'
SHOWN = {
    "qwen": (QWEN, f"[user]Q[assistant]<tool_call>{ONE}</tool_call>[tool]result 0[assistant]A"),
    "either": (EITHER, f"[user]Q[assistant]<tool_call>{ONE}</tool_call>[tool]result 0[assistant]A"),
    "llama": (
        LLAMA,
        f'[user]Q[assistant]{{"name": "weather", "parameters": {TEXT}}}[tool]result 0[assistant]A',
    ),
    "joins": (JOINS, f"[user]Q[assistant]weather:{TEXT}[tool]result 0[assistant]A"),
    "prints": (PRINTS, f"[user]Q[assistant]weather:{TEXT}[tool]result 0[assistant]A"),
    "no tools": (
        NO_TOOLS,
        f"[user]Q[assistant]<tool_call>\n{ONE}\n</tool_call>"
        "[user]<tool_response>\nresult 0\n</tool_response>[assistant]A",
    ),
}


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("arguments", [ARGUMENTS, TEXT], ids=["object", "text"])
@pytest.mark.parametrize("content", [None, ""])
def test_a_call_is_shown_as_json(kind: str, arguments: Any, content: Any) -> None:
    template, expected = SHOWN[kind]
    assert render(template, conversation([call("weather", arguments)], content)) == expected


def test_what_a_template_takes_as_it_is_is_given_as_transformers_gives_it() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    messages = conversation([call("weather", ARGUMENTS), call("other", {}, 2)], "Let me see.")
    for template in (QWEN, EITHER, PRINTS.replace("arguments }}", "arguments | tojson }}")):
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level(), chat_template=template
        )
        assert render(template, messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_text_that_a_template_takes_stays_as_the_model_wrote_it() -> None:
    text = '{"city":"Paris"}'
    assert text in render(EITHER, conversation([call("weather", text)]))
    assert '{"city": "Paris"}' in render(QWEN, conversation([call("weather", text)]))


def test_ids_fit_templates_that_want_nine_letters() -> None:
    text = render(MISTRAL, conversation([call("weather", ARGUMENTS, 1), call("other", {}, 2)]))
    ids = re.findall(r"\[tool\](\w+)=", text)
    assert [len(i) for i in ids] == [9, 9]
    assert len(set(ids)) == 2
    assert all(text.count(i) == 2 for i in ids)  # of the call, and of its answer
    kept = {**call("weather", ARGUMENTS), "id": "a1B2c3D4e"}
    assert render(MISTRAL, conversation([kept])).count("a1B2c3D4e") == 2


def test_calls_go_one_by_one_where_the_template_wants_it() -> None:
    messages = conversation([call("a", {}, 1), call("b", {}, 2)], "Both.")
    messages[2:4] = reversed(messages[2:4])  # answers in another order
    assert render(LLAMA, messages) == (
        '[user]Q[assistant]{"name": "a", "parameters": {}}[tool]result 0'
        '[assistant]{"name": "b", "parameters": {}}[tool]result 1[assistant]A'
    )
    messages[2] = {"role": "tool", "content": "nameless"}
    messages[3]["tool_call_id"] = "of no call"
    text = render(LLAMA, messages)
    assert text.index("nameless") < text.index('"b"') < text.index("result 0")


def test_answers_of_one_turn_are_one_message_where_tools_are_unknown() -> None:
    messages = conversation([call("a", {}, 1), call("b", "no JSON", 2)], "Both.")
    parts = [{"type": "text", "text": "result"}, {"type": "text", "text": " 0"}]
    messages[2]["content"] = parts
    assert render(NO_TOOLS, messages) == (
        '[user]Q[assistant]Both.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": "no JSON"}\n</tool_call>'
        "[user]<tool_response>\nresult 0\n</tool_response>\n"
        "<tool_response>\nresult 1\n</tool_response>[assistant]A"
    )


def test_the_template_s_refusal_is_told() -> None:
    refusing = "{{ raise_exception('no tools') if messages[1].tool_calls }}"
    with pytest.raises(TokenizerError, match="no tools"):
        render(refusing, conversation([call("weather", ARGUMENTS)]))


def test_messages_without_calls_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "Q"}]
    assert list(helm.text.tool_messages.versions(messages, QWEN)) == [messages]
    assert helm.text.tool_messages.folded(messages, NO_TOOLS) is messages


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ("x", "message 1: tool_calls must be a list, got 'x'"),
        (["x"], "message 1, call 0 must be {'type': 'function'"),
        ([{"function": "f"}], "message 1, call 0 must be"),
        ([{"function": {"arguments": {}}}], "message 1, call 0 must be"),
        ([call("f", {}), call("f", 5)], "message 1, call 1: arguments must be an object or"),
    ],
)
def test_what_is_no_call_is_refused(calls: Any, error: str) -> None:
    messages = conversation([])
    messages[1]["tool_calls"] = calls
    with pytest.raises(TokenizerError, match=error):
        render(QWEN, messages)
    named = [{"role": "tool", "content": "x", "tool_call_id": 5}]
    with pytest.raises(TokenizerError, match="message 0: tool_call_id must be text, got 5"):
        render(QWEN, named)
