"""Tools told in words."""

from __future__ import annotations

from typing import Any

from helm.serve.tools.description import described

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now, in a city"}}]
CHATML = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
SYSTEM = CHATML + "{% if messages[0].role != 'system' %}default{% endif %}"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def test_tools_stand_before_the_system_s_text() -> None:
    for first in ([], [{"role": "system", "content": "Be brief."}]):
        system, user = described([*first, USER], TOOLS, SYSTEM)
        assert system["role"] == "system"
        assert '{"name": "weather", "description": "Now, in a city"}' in system["content"]
        assert "<tool_call>" in system["content"]
        assert system["content"].endswith("\n\nBe brief.") is bool(first)
        assert user == USER


def test_tools_stand_before_the_user_s_text_where_there_is_no_system() -> None:
    (user,) = described([USER], TOOLS, CHATML)
    assert '"weather"' in user["content"]
    assert user["content"].endswith("\n\nHi")
    parts = [{"type": "text", "text": "Hi"}]
    (user,) = described([{"role": "user", "content": parts}], TOOLS, CHATML)
    assert user["content"][1:] == parts
    assert '"weather"' in user["content"][0]["text"]
    assert USER["content"] == "Hi"


def test_templates_that_know_tools_show_them_themselves() -> None:
    for template in ("{{ tools }}", "{{ '<tool_call>' }}", "{{ '[TOOL_CALLS]' }}"):
        assert described([USER], TOOLS, template) == [USER]
    assert described([USER], None, CHATML) == [USER]
