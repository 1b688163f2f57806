"""Requests of OpenAI's API, read and checked. Knows no model.

Fields that are unknown are named in `ignored`; known ones that HELM does not do are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from helm.base.jsonio import Reader, parse
from helm.serve.errors import RequestError
from helm.text.sampling import SamplingParams

MOST_CHOICES = 16
_MOST_STOPS = 16
_MOST_TOP = 20
_MOST_TOKENS = 2**31 - 1
_MOST_TOOLS = 128
_MOST_PROMPTS = 128
MOST_IDS = 1 << 20  # of one prompt; contexts are smaller
_MOST_MESSAGES = 1 << 16
_MOST_BIASES = 1 << 18
_MOST_IGNORED = 16  # names in the header
_PLAIN_COMPLETION = 16  # tokens of a completion whose request does not say, as OpenAI's

_COMMON = (
    "model", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "max_tokens", "logprobs", "stop_token_ids", "ignore_eos", "user",
    "priority",
)  # fmt: skip
_CHAT = (
    *_COMMON, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs",
    "continue_final_message", "add_generation_prompt", "functions", "function_call", "modalities",
    "audio", "prediction", "web_search_options",
)  # fmt: skip
_COMPLETION = (*_COMMON, "prompt", "echo", "suffix", "best_of", "response_format")
# Known, but of no effect on the answer.
_QUIET = frozenset(
    {
        "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "verbosity",
    }
)  # fmt: skip
_REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "this server answers in text",
    "prediction": "leave it out",
    "web_search_options": "this server searches nothing",
    "suffix": "text is only continued; leave it out",
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop_token_ids", "priority",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What both requests say. ignored: fields that are unknown. user: who asks, as the client names
    it; empty: it does not."""

    model: str | None
    stream: bool
    include_usage: bool
    choices: int
    sampling: SamplingParams
    ignored: tuple[str, ...]
    user: str


@dataclass(frozen=True)
class ChatRequest(Options):
    """Of /v1/chat/completions. tool_choice: "none", "auto", "required" or {"name": name}."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, str]
    parallel_tool_calls: bool
    variables: dict[str, Any]
    continue_final_message: bool


@dataclass(frozen=True)
class CompletionRequest(Options):
    """Of /v1/completions. prompts: texts or token ids. max_tokens 0: echo alone."""

    prompts: list[str | list[int]]
    echo: bool
    max_tokens: int


def read_body(body: bytes) -> Reader:
    """The object that a request's body is."""
    node = parse(body, "request", RequestError)
    node.names()
    return node


def read_chat(node: Reader) -> ChatRequest:
    """A request of /v1/chat/completions; RequestError names the field that is wrong."""
    most = node.get("max_completion_tokens")
    most = node.get("max_tokens") if most.null else most
    wanted = None if most.null else most.integer(1, _MOST_TOKENS)
    top = _optional(node, "top_logprobs", lambda c: c.integer(0, _MOST_TOP), None)
    logprobs = _optional(node, "logprobs", Reader.boolean, False)
    if top is not None and not logprobs:
        node["top_logprobs"].reject("needs logprobs: true")
    modalities = node.get("modalities")
    if not modalities.null and modalities.value != ["text"]:
        modalities.reject('this server answers in text: ["text"]')
    continues = _optional(node, "continue_final_message", Reader.boolean, False)
    tools = _tools(node.get("tools"))
    return ChatRequest(
        **_options(node, _CHAT, wanted, (top or 0) if logprobs else None),
        messages=_messages(node["messages"]),
        tools=tools,
        tool_choice=_tool_choice(node.get("tool_choice"), tools),
        parallel_tool_calls=_optional(node, "parallel_tool_calls", Reader.boolean, True),
        variables=_variables(node),
        continue_final_message=continues,
    )


def read_completion(node: Reader) -> CompletionRequest:
    """A request of /v1/completions; RequestError names the field that is wrong."""
    echo = _optional(node, "echo", Reader.boolean, False)
    most = _optional(
        node, "max_tokens", lambda c: c.integer(0 if echo else 1, _MOST_TOKENS), _PLAIN_COMPLETION
    )
    top = node.get("logprobs")
    flag = isinstance(top.value, bool)
    logprobs = None if top.null or top.value is False else 0 if flag else top.integer(0, _MOST_TOP)
    options = _options(node, _COMPLETION, max(most, 1), logprobs)
    best_of = _optional(node, "best_of", lambda c: c.integer(1, MOST_CHOICES), 1)
    if best_of not in (1, options["choices"]):
        node["best_of"].reject("answers are not ranked; leave it out")
    return CompletionRequest(
        **options, prompts=_prompts(node["prompt"]), echo=echo, max_tokens=most
    )


def read_prompt_of_template(
    node: Reader,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any], bool]:
    """Messages, tools, variables and whether the last message goes on, of a conversation."""
    return (
        _messages(node["messages"]),
        _tools(node.get("tools")),
        _variables(node),
        _optional(node, "continue_final_message", Reader.boolean, False),
    )


def _variables(node: Reader) -> dict[str, Any]:
    """What the chat template is given beside the messages."""
    variables = dict(_optional(node, "chat_template_kwargs", Reader.names, {}))
    effort = node.get("reasoning_effort")
    if not effort.null:
        variables.setdefault("reasoning_effort", effort.string())
    begins = node.get("add_generation_prompt")
    if not begins.null:
        variables.setdefault("add_generation_prompt", begins.boolean())
    return variables


def _options(
    node: Reader, known: Iterable[str], max_tokens: int | None, logprobs: int | None
) -> dict[str, Any]:
    for name, remedy in _REFUSED.items():
        if name in known and node.get(name).value not in (None, "", []):
            node[name].reject(f"is not supported; {remedy}")
    values = {name: node.get(name).value for name in _SAMPLING}
    values["stop"] = _stops(node.get("stop"))
    values["logit_bias"] = _logit_bias(node.get("logit_bias"))
    values["ignore_eos"] = _optional(node, "ignore_eos", Reader.boolean, False)
    values["json_schema"] = _response_schema(node.get("response_format"))
    given = {name: value for name, value in values.items() if value is not None}
    stream = _optional(node, "stream", Reader.boolean, False)
    stream_options = node.get("stream_options")
    if not stream_options.null and not stream:
        stream_options.reject("needs stream: true")
    usage = False
    if not stream_options.null:
        usage = _optional(stream_options, "include_usage", Reader.boolean, False)
    ignored = [name for name in node.names() if name not in known and name not in _QUIET]
    return {
        "model": _optional(node, "model", Reader.string, None),
        "stream": stream,
        "include_usage": usage,
        "choices": _optional(node, "n", lambda c: c.integer(1, MOST_CHOICES), 1),
        "sampling": SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given),
        "ignored": tuple(ignored[:_MOST_IGNORED]),
        "user": _optional(node, "user", Reader.string, ""),
    }


def _optional(node: Reader, key: str, read: Any, otherwise: Any) -> Any:
    """A child, or `otherwise` where it is absent or null."""
    child = node.get(key)
    return otherwise if child.null else read(child)


def _stops(node: Reader) -> tuple[str, ...] | None:
    if node.null:
        return None
    if isinstance(node.value, str):
        return (node.value,) if node.value else None
    items = node.items()
    if len(items) > _MOST_STOPS:
        node.reject(f"has {len(items)} strings, {_MOST_STOPS} at most")
    found = tuple(item.string() for item in items)
    if not all(found):
        node.reject("has an empty string")
    return found


def _logit_bias(node: Reader) -> dict[int, float]:
    found: dict[int, float] = {}
    if node.null:
        return found
    if len(node.names()) > _MOST_BIASES:
        node.reject(f"has {len(node.value)} tokens, {_MOST_BIASES} at most")
    for key in node.names():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            node.reject(f"{key[:20]!r} is no token id")
        found[int(key)] = node[key].number(-100, 100)
    return found


def _response_schema(node: Reader) -> dict[str, Any] | bool | None:
    """The JSON schema of the answer; None: any text."""
    if node.null:
        return None
    kind = node["type"].choice(("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = node["json_schema"]["schema"]
        if not isinstance(schema.value, (dict, bool)):
            schema.reject("expected a JSON schema")
        found: dict[str, Any] | bool = schema.value
        return found
    return None if kind == "text" else {"type": "object"}


def _prompts(node: Reader) -> list[str | list[int]]:
    if isinstance(node.value, str):
        return [node.value]
    if node.value == []:
        node.reject("is empty")
    if isinstance(node.value, list) and isinstance(node.value[0], int):
        return [_ids(node)]
    items = node.items(_MOST_PROMPTS)
    return [item.value if isinstance(item.value, str) else _ids(item) for item in items]


def _ids(node: Reader) -> list[int]:
    return node.integers(0, _MOST_TOKENS, MOST_IDS)


def _messages(node: Reader) -> list[dict[str, Any]]:
    items = node.items(_MOST_MESSAGES)
    if not items:
        node.reject("is empty; give at least one user message")
    return [_message(item) for item in items]


def _message(node: Reader) -> dict[str, Any]:
    node.names()
    message = {name: value for name, value in node.value.items() if name != "tokens"}
    role = node["role"].string()
    message["role"] = "system" if role == "developer" else role
    content = node.get("content")
    if not (content.null or isinstance(content.value, (str, list))):
        content.reject("expected text or a list of parts")
    for part in content.items(_MOST_MESSAGES) if isinstance(content.value, list) else ():
        kind = part["type"].string()
        if kind != "text":
            part.reject(f"is of type {kind[:40]!r}; this server takes parts of text only")
        part["text"].string()
    return message


def _tools(node: Reader) -> list[dict[str, Any]] | None:
    if node.null or node.value == []:
        return None
    items = node.items()
    if len(items) > _MOST_TOOLS:
        node.reject(f"has {len(items)} tools, {_MOST_TOOLS} at most")
    for item in items:
        item["type"].choice(("function",))
        name = item["function"]["name"]
        if not name.string() or len(name.value) > 128:
            name.reject("expected a name of 1 to 128 characters")
        _optional(item["function"], "description", Reader.string, None)
        _optional(item["function"], "parameters", Reader.names, {})
    return [item.value for item in items]


def _tool_choice(node: Reader, tools: list[dict[str, Any]] | None) -> str | dict[str, str]:
    if node.null:
        return "auto" if tools else "none"
    if isinstance(node.value, str):
        choice = node.choice(("none", "auto", "required"))
        if choice == "required" and not tools:
            node.reject("needs tools")
        return choice if tools else "none"
    node["type"].choice(("function",))
    name = node["function"]["name"]
    if name.string() not in {tool["function"]["name"] for tool in tools or ()}:
        name.reject("is none of the tools")
    return {"name": name.value}
