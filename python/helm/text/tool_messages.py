"""Calls of tools, and what came of them, in the messages of a conversation: as each chat template
takes them. Knows nothing of jinja."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helm.base.arguments import shown
from helm.errors import TokenizerError

Messages = list[dict[str, Any]]
# Templates that write arguments given as text as they are, beside those given as objects.
_TAKES_TEXT = re.compile(r"arguments\s+is\s+(not\s+)?(string|mapping)")
_SHORT_IDS = re.compile(r"(length\s*(!=|==)\s*9\b)|alphanumeric strings with length 9")


def check_calls(message: Mapping[str, Any], where: str) -> None:
    """TokenizerError unless a message's "tool_calls", where it has any, are objects with a name
    and arguments that are an object or its JSON text, and "tool_call_id" is text."""
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise TokenizerError(f"[chat] {where}: tool_calls must be a list, got {shown(calls)}")
    for place, call in enumerate(calls or ()):
        function = _function(call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TokenizerError(
                f"[chat] {where}, call {place} must be {{'type': 'function', 'function': "
                f"{{'name': ..., 'arguments': ...}}}}, got {shown(call)}"
            )
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, Mapping)):
            raise TokenizerError(
                f"[chat] {where}, call {place}: arguments must be an object or its JSON text, got "
                f"{shown(arguments)}"
            )
    answered = message.get("tool_call_id")
    if answered is not None and not isinstance(answered, str):
        raise TokenizerError(f"[chat] {where}: tool_call_id must be text, got {shown(answered)}")


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tools were called, or answered."""
    return any(m.get("tool_calls") or m["role"] == "tool" for m in messages)


def folded(messages: Messages, source: str) -> Messages:
    """For a template whose text `source` knows no tools: calls become text of the assistant, what
    came of them messages of the user. The messages as they are for others."""
    if "tool" in source or not has_calls(messages):
        return messages
    found: Messages = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if found and found[-1].get("role") == "user" and "answers" in found[-1]:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "answers": True})
        elif message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            texts = [_text(message)] if message.get("content") else []
            texts += [_as_text(call) for call in message["tool_calls"]]
            found.append({**kept, "content": "\n".join(texts)})
        else:
            found.append(message)
    return [{key: m[key] for key in m if key != "answers"} for m in found]


def versions(messages: Messages, source: str) -> Iterator[Messages]:
    """The messages as a template may want them, the likeliest first; one where no tool is called.

    They differ in arguments (objects, or JSON text), in the content of a message that has none
    (missing, or empty), and in several calls of one message (together, or one after the other).
    """
    if not has_calls(messages):
        yield messages
        return
    if _SHORT_IDS.search(source):
        messages = [_with_short_ids(message) for message in messages]
    as_text = bool(_TAKES_TEXT.search(source))
    for one_by_one in (False, True):
        turns = _one_by_one(messages) if one_by_one else messages
        if one_by_one and len(turns) == len(messages):
            return
        for text in (as_text, not as_text):
            made = [_with_arguments(message, text) for message in turns]
            yield made
            if any(m.get("tool_calls") and "content" not in m for m in made):
                yield [{"content": "", **m} if m.get("tool_calls") else m for m in made]


def shows_calls(messages: Messages, text: str) -> bool:
    """Whether a rendered text has each call's arguments as JSON, not as Python prints them, nor as
    JSON within JSON."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = _function(call).get("arguments")
            if not arguments:
                continue
            wrong = [repr(arguments)] if isinstance(arguments, dict) else []
            if isinstance(arguments, str):
                wrong = [json.dumps(arguments, ensure_ascii=flag) for flag in (True, False)]
            if any(form in text for form in wrong):
                return False
    return True


def _function(call: Mapping[str, Any]) -> Any:
    return call.get("function", call)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _as_text(call: Mapping[str, Any]) -> str:
    function = _function(call)
    whole = {"name": function["name"], "arguments": _object(function.get("arguments") or {})}
    return f"<tool_call>\n{json.dumps(whole, ensure_ascii=False)}\n</tool_call>"


def _object(arguments: Any) -> Any:
    """Arguments as the object that their text is of, if it is of one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _with_arguments(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = _function(call)
        arguments = function.get("arguments")
        if as_text and isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text:
            arguments = _object(arguments)
        whole = dict(function) if arguments is None else {**function, "arguments": arguments}
        calls.append({**call, "function": whole} if "function" in call else whole)
    return {**message, "tool_calls": calls}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """With ids of nine letters and digits, equal for equal ids."""
    found = dict(message)
    if "tool_call_id" in message:
        found["tool_call_id"] = _short(message["tool_call_id"])
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "id": _short(call["id"])} if isinstance(call.get("id"), str) else call
            for call in message["tool_calls"]
        ]
    return found


def _short(name: str) -> str:
    if len(name) == 9 and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:9]


def _one_by_one(messages: Messages) -> Messages:
    """Each call in a message of its own, followed by its answers."""
    found: Messages = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if message["role"] != "tool" or not _taken(messages, place):
                found.append(message)
            continue
        answers = _answers(messages, place)
        for number, call in enumerate(calls):
            own = {k: v for k, v in message.items() if number == 0 or k != "content"}
            found.append({**own, "tool_calls": [call]})
            named = [a for a in answers if a.get("tool_call_id", "") == call.get("id")]
            mine = answers if number == len(calls) - 1 else named or answers[:1]
            found += mine
            answers = [a for a in answers if all(a is not one for one in mine)]
    return found


def _answers(messages: Messages, place: int) -> Messages:
    """The answers right after a message."""
    end = place + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return messages[place + 1 : end]


def _taken(messages: Messages, place: int) -> bool:
    """Whether an answer follows a message of several calls, with which it goes."""
    start = place
    while start >= 0 and messages[start]["role"] == "tool":
        start -= 1
    return start >= 0 and len(messages[start].get("tool_calls") or ()) > 1
