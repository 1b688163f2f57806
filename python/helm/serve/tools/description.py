"""Tools told in words, for chat templates that do not know them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helm.serve.tools.families import GENERIC, family_of, function_of


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, template: str
) -> list[dict[str, Any]]:
    """The messages with the tools before the first one's text, in a message of the system where
    the template's text knows those; as they are where it shows tools itself."""
    found = [dict(message) for message in messages]
    if not tools or "tools" in template or family_of(template) is not GENERIC:
        return found
    told = _told(tools)
    if found and found[0].get("role") == "system" and "system" in template:
        found[0]["content"] = _joined(told, found[0].get("content"))
    elif "system" in template:
        found.insert(0, {"role": "system", "content": told})
    else:
        user = next((m for m in found if m.get("role") == "user"), None)
        if user is not None:
            user["content"] = _joined(told, user.get("content"))
    return found


def _told(tools: Sequence[Any]) -> str:
    lines = [json.dumps(function_of(tool), ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "These functions can be called, one JSON object each:",
            *lines,
            "To call one, answer with nothing but",
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>',
            "What it returns comes back within <tool_response></tool_response>.",
        ]
    )


def _joined(told: str, content: Any) -> Any:
    if isinstance(content, (list, tuple)):
        return [{"type": "text", "text": f"{told}\n\n"}, *content]
    return f"{told}\n\n{content}" if content else told
