"""How the families of chat templates write a tool call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """openers: what stands before calls; an answer may also begin with the JSON itself.
    closer: what may stand after a call. key: of the arguments. named: whether `name[ARGS]{...}`
    may follow an opener. short_ids: whether templates take ids of nine letters and digits alone."""

    name: str
    openers: tuple[str, ...]
    closer: str = ""
    key: str = "arguments"
    named: bool = False
    short_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts to be shown to the parser even where they are special tokens."""
        named = ("[ARGS]", "[CALL_ID]") if self.named else ()
        return (*self.openers, *((self.closer,) if self.closer else ()), *named)


_TAG, _PYTHON, _CALLS = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
HERMES = Family("hermes", (_TAG,), "</tool_call>")
LLAMA3 = Family("llama3", (_PYTHON,), key="parameters")
MISTRAL = Family("mistral", (_CALLS,), named=True, short_ids=True)
GENERIC = Family("generic", (_TAG, _PYTHON, _CALLS), "</tool_call>", named=True)
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL, GENERIC)}


def family_of(template: str) -> Family:
    """The family of a chat template's text."""
    if _CALLS in template:
        return MISTRAL
    if _TAG in template:
        return HERMES
    if _PYTHON in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA3
    return GENERIC


def tool_names(tools: Sequence[Any]) -> list[str]:
    """Names of tools as OpenAI writes them, `{"type": "function", "function": {"name", ...}}`."""
    return [function_of(tool)["name"] for tool in tools]


def function_of(tool: Any) -> dict[str, Any]:
    """A tool's function, `{"name", "description", "parameters"}`."""
    found: dict[str, Any] = tool["function"] if isinstance(tool.get("function"), dict) else tool
    return found
