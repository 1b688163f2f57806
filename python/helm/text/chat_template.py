"""A model's chat templates: the prompt text of a conversation; knows nothing of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.arguments import shown
from helm.base.files import present, read_text
from helm.errors import TokenizerError
from helm.text.added_tokens import read_object
from helm.text.tool_messages import check_calls, folded, shows_calls, versions

if TYPE_CHECKING:
    import jinja2

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; its space shows whether a template trims
_SHOWN = 500  # characters of a template's own error


class ChatTemplates:
    """Jinja templates by name, compiled when first used."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        name: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text; `name`: of the template, None: the one that transformers takes.

        Content given as text parts is given to a template that shows them, and joined for others.
        Calls of tools are given as the template takes them, see tool_messages.py.
        """
        check_messages(messages)
        name = self._name(tools) if name is None else name
        template = self._template(name)
        source = self.sources[name]
        asked = folded([_plain(message) for message in messages], source)
        final = _tag(asked) if continue_final_message else ""
        scope = {**variables, "tools": tools, "documents": variables.get("documents")}
        scope["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        text = None
        if any(isinstance(message.get("content"), list) for message in asked):
            text = _render_parts(template, asked, scope, source)
            asked = [_joined(message) for message in asked]
        if text is None:
            text = _render_calls(template, asked, scope, source)
        return _cut(text, final) if continue_final_message else text

    def _name(self, tools: Sequence[Any] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self.sources else "default"

    def _template(self, name: str) -> jinja2.Template:
        if name in self._compiled:
            return self._compiled[name]
        if name not in self.sources:
            raise TokenizerError(f"[chat] the model {self._lacks(name)}")
        from helm.text.template_limits import metered
        from helm.text.template_sandbox import Sandbox

        try:
            with metered():
                compiled = Sandbox().from_string(self.sources[name])
        except Exception as error:  # beside TemplateError what compiling Python raises
            raise TokenizerError(
                f"[chat] the model's chat template {name!r} is malformed: {_reason(error)}"
            ) from error
        self._compiled[name] = compiled
        return compiled

    def _lacks(self, name: str) -> str:
        if not self.sources:
            return (
                "has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); use an instruction-tuned model, add a template, "
                "or generate from plain text instead"
            )
        return (
            f"has no chat template named {name!r} (it has: {', '.join(sorted(self.sources))}); "
            "name one of them with chat_template="
        )


def check_messages(messages: Any) -> None:
    """TokenizerError unless `messages` is a non-empty sequence of objects with a role, whose
    content, where it is a list, consists of text parts, and whose calls of tools are such."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"[chat] messages must be a list of {{'role', 'content'}}, got "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise TokenizerError("[chat] messages is empty; give at least one user message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(
                f"[chat] message {index} must be an object with a 'role' ('system', 'user', "
                f"'assistant', 'tool') and a 'content', got {shown(message)}"
            )
        check_calls(message, f"message {index}")
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            _check_part(part, f"message {index}, part {place}")


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise TokenizerError(f"[chat] {where} is of type {kind!r}; HELM takes parts of text only")
    if kind is None or not isinstance(part.get("text"), str):
        raise TokenizerError(
            f"[chat] {where} must be {{'type': 'text', 'text': ...}}, got {shown(part)}"
        )


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: .jinja files, else tokenizer_config.json, else chat_template.json."""
    files = {"default": directory / "chat_template.jinja"}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    found = {
        name: read_text(path, TokenizerError, "tokenizer")
        for name, path in files.items()
        if present(path, TokenizerError, "tokenizer")
    }
    legacy = read_object(directory / "chat_template.json")
    return found or templates_of(config) or templates_of(legacy)


def templates_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, as tokenizer_config.json states them."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {e.get("name"): e.get("template") for e in value if isinstance(e, Mapping)}
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {n: text for n, text in pairs if isinstance(n, str) and isinstance(text, str)}


def _render(template: jinja2.Template, scope: dict[str, Any]) -> str:
    from helm.text.template_limits import metered

    try:
        with metered(scope):
            return template.render(scope)
    except Exception as error:  # a template is a program
        raise TokenizerError(
            f"[chat] the model's chat template refused the messages: {_reason(error)}; use a model "
            "with a template that works, or generate from plain text"
        ) from error


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _render_calls(
    template: jinja2.Template, messages: list[dict[str, Any]], scope: dict[str, Any], source: str
) -> str:
    """The text of the first version of the messages that the template takes and shows as JSON;
    without such a one, of the first that it takes."""
    refused: TokenizerError | None = None
    fallback: str | None = None
    for version in versions(messages, source):
        try:
            text = _render(template, {**scope, "messages": version})
        except TokenizerError as error:
            refused = refused or error
            continue
        if shows_calls(version, text):
            return text
        fallback = text if fallback is None else fallback
    if fallback is None:
        assert refused is not None
        raise refused
    return fallback


def _render_parts(
    template: jinja2.Template, messages: list[dict[str, Any]], scope: dict[str, Any], source: str
) -> str | None:
    """The text of a template that shows the parts of contents as text; None for others, which
    fail, leave text out or print the list."""
    try:
        text = _render_calls(template, messages, scope, source)
    except TokenizerError:
        return None
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            printed = (repr(part), json.dumps(part, ensure_ascii=False, default=str))
            if part["text"].strip() not in text or any(form in text for form in printed):
                return None
    return text


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without keys that have no value: as in transformers they are as good as missing."""
    found = {key: value for key, value in message.items() if value is not None}
    if isinstance(found.get("content"), tuple):
        found["content"] = list(found["content"])
    return found


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _tag(messages: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's text, which is returned as it was."""
    content = messages[-1].get("content")
    text = content[-1]["text"] if isinstance(content, list) and content else content
    if not isinstance(text, str):
        raise TokenizerError(
            "[chat] the final message has no text to continue; end with the message to go on with"
        )
    messages[-1] = extended(messages[-1], _TAG)
    return text


def extended(message: Mapping[str, Any], more: str) -> dict[str, Any]:
    """A message whose text goes on."""
    content = message["content"]
    if isinstance(content, list):
        last = {**content[-1], "text": content[-1]["text"] + more}
        return {**message, "content": [*content[:-1], last]}
    return {**message, "content": content + more}


def _cut(text: str, final: str) -> str:
    """The text up to the mark; without the space at its end where the template trims."""
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise TokenizerError(
            "[chat] the model's chat template does not show the final message as it is, so it "
            "cannot be continued; end with a user message instead"
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
