"""Chat templates: which is used, what it is given, and what it may use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helm.errors import TokenizerError
from helm.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, save

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('no tools here') }}
    {%- endif %}
    <|{{ message['role'] }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{%- endif %}"""


def with_template(directory: Path, template: object) -> Tokenizer:
    save(byte_level(), directory, chat_template=template, eos_token="<|end|>")
    return Tokenizer.from_directory(directory)


def test_templates_render_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    ours = with_template(tmp_path, TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|end|>", chat_template=TEMPLATE
    )
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.render_chat(MESSAGES, add_generation_prompt=prompt) == expected


TURNS = """{{ bos_token }}
{%- set first = '' %}{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\n\n' %}{%- set rest = messages[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('turns must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {%- if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def test_templates_of_turns_whose_system_message_goes_to_the_first_user(tmp_path: Path) -> None:
    """As Gemma's do."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    save(byte_level(), tmp_path, chat_template=TURNS, bos_token="<s>")
    ours = Tokenizer.from_directory(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", chat_template=TURNS
    )
    parts = [{"type": "text", "text": " And now? "}]
    talk = [*MESSAGES, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": parts}]
    for messages in (MESSAGES, talk):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(messages, add_generation_prompt=True) == expected
    with pytest.raises(TokenizerError, match="turns must alternate"):
        ours.render_chat([*MESSAGES, MESSAGES[1]])


def test_template_helpers(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path,
        "{{ tools | tojson }}{% generation %}é{% endgeneration %}{{ strftime_now('%Y') | length }}"
        "{% for m in messages %}{% break %}{% endfor %}{{ mood }}",
    )
    tools = [{"name": "<é>"}]
    assert tokenizer.render_chat(MESSAGES, tools=tools, mood="!") == '[{"name": "<é>"}]é4!'


def test_named_templates_and_files(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = with_template(tmp_path, entries)
    assert tokenizer.render_chat(MESSAGES) == "D"
    assert tokenizer.render_chat(MESSAGES, tools=[{}]) == "T"
    assert tokenizer.render_chat(MESSAGES, tools=[]) == "T"
    assert tokenizer.render_chat(MESSAGES, tools=[{}], template="default") == "D"
    with pytest.raises(TokenizerError, match=r"no chat template named 'rag'.*default, tool_use"):
        tokenizer.render_chat(MESSAGES, template="rag")
    (tmp_path / "chat_template.jinja").write_text("F")
    alone = Tokenizer.from_directory(tmp_path)
    assert alone.chat_templates == {"default": "F"}  # as transformers: files instead of the list
    assert alone.render_chat(MESSAGES, tools=[{}]) == "F"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.v2.jinja").write_text("R")
    assert Tokenizer.from_directory(tmp_path).render_chat(MESSAGES, template="rag.v2") == "R"


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    entries = [{"name": n, "template": n.upper()} for n in ("think", "rag")]
    tokenizer = with_template(tmp_path, entries)
    with pytest.raises(TokenizerError, match=r"it has: rag, think\); name one.*chat_template="):
        tokenizer.render_chat(MESSAGES)
    assert tokenizer.render_chat(MESSAGES, template="rag") == "RAG"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": {"rag": "J"}}))
    assert Tokenizer.from_directory(tmp_path).render_chat(MESSAGES, template="rag") == "J"


def test_no_template_is_a_clear_error() -> None:
    with pytest.raises(TokenizerError, match="has no chat template"):
        Tokenizer(byte_level()).render_chat(MESSAGES)


def test_a_template_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    with_template(tmp_path, "x")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "refused the messages: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refused the messages: .*recursion"),
        ("{% if %}", "malformed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
    ],
)
def test_bad_and_unsafe_templates_are_refused(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        with_template(tmp_path, template).render_chat(MESSAGES)


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, [1], [{"content": "x"}]])
def test_bad_messages_are_refused(tmp_path: Path, messages: object) -> None:
    with pytest.raises(TokenizerError, match="message"):
        with_template(tmp_path, "x").render_chat(messages)  # type: ignore[arg-type]


# --- contents and continuing, as transformers does ------------------------------------------------

PLAIN = TEMPLATE
PARTS = """{% for message in messages %}[{{ message.role }}]
    {%- if message.content is string %}{{ message.content }}{% else %}
        {%- for part in message.content %}<{{ part.text }}>{% endfor %}
    {%- endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
PARTS_ALONE = """{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}
{% endfor %}"""
TRIMS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}</s>{% endfor %}"


def theirs(template: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|end|>", chat_template=template
    )


def ours(template: str) -> Tokenizer:
    return Tokenizer(byte_level(), {"eos_token": "<|end|>"}, {"default": template})


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [PARTS, PARTS_ALONE])
def test_a_template_that_shows_parts_gets_them(template: str) -> None:
    messages = [{"role": "user", "content": parts("one ", "two")}]
    expected = theirs(template).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert "one" in expected
    assert ours(template).render_chat(messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        TRIMS,
        "{% for m in messages %}{{ 'a' + m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_text_parts_mean_their_text_to_other_templates(template: str) -> None:
    messages = [{"role": "user", "content": parts("one ", "two")}, {"role": "user", "content": []}]
    joined = [{"role": "user", "content": "one two"}, {"role": "user", "content": ""}]
    expected = ours(template).render_chat(joined)
    assert "one two" in expected
    assert ours(template).render_chat(messages) == expected
    messages[0]["content"] = tuple(messages[0]["content"])  # type: ignore[arg-type]
    assert ours(template).render_chat(messages) == expected


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {}}, "message 1, part 1 is of type 'image_url'"),
        ({"type": "image"}, "of type 'image'; HELM takes parts of text only"),
        ({"type": "text"}, "message 1, part 1 must be"),
        ({"type": "text", "text": 5}, "must be {'type': 'text'"),
        ({"text": "x"}, "must be {'type': 'text'"),
        ("x", "must be {'type': 'text'"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(part: Any, message: str) -> None:
    messages = [*MESSAGES[:1], {"role": "user", "content": [*parts("a"), part]}]
    with pytest.raises(TokenizerError, match=message):
        ours(PARTS).render_chat(messages)


def test_a_key_without_a_value_is_as_good_as_missing() -> None:
    template = "{% for m in messages %}{{ 'calls' if m.tool_calls is defined }}{% endfor %}"
    messages = [{"role": "assistant", "content": "x", "tool_calls": None}]
    assert ours(template).render_chat(messages) == ""
    assert theirs(template).apply_chat_template(messages, tokenize=False) == ""


@pytest.mark.parametrize("template", [PLAIN, PARTS, TRIMS])
@pytest.mark.parametrize(
    "content", ["The answer", "The answer is ", " x\n\n", "", parts("a ", "b "), "x</s>[user]x"]
)
def test_the_final_message_is_continued_as_in_transformers(template: str, content: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    if isinstance(content, list) and template != PARTS:
        messages = [*MESSAGES, {"role": "assistant", "content": "a b "}]
    expected = theirs(template).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    messages[-1] = {"role": "assistant", "content": content}
    before = json.dumps(messages)
    assert ours(template).render_chat(messages, continue_final_message=True) == expected
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("template", "message", "error"),
    [
        (PLAIN, {"role": "assistant"}, "no text to continue"),
        (PLAIN, {"role": "assistant", "content": []}, "no text to continue"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "x"}, "does not show"),
        ("{% for m in messages %}{{ m.content|upper }}{% endfor %}",
         {"role": "assistant", "content": "x"}, "does not show"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(
    template: str, message: dict[str, Any], error: str
) -> None:
    with pytest.raises(TokenizerError, match=error):
        ours(template).render_chat([*MESSAGES, message], continue_final_message=True)
