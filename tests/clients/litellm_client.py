"""litellm against a server: `litellm_client.py URL MODEL`."""

from __future__ import annotations

import asyncio
import json
import sys

import litellm
from report import run

URL, MODEL = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello"}]
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": DAYS, "strict": True}}
OPTIONS = {
    "model": f"openai/{MODEL}", "api_base": URL, "api_key": "any", "temperature": 0,
    "max_tokens": 24, "num_retries": 0,
}  # fmt: skip
LONGER = {**OPTIONS, "max_tokens": 100}


def plain() -> str:
    answer = litellm.completion(messages=HELLO, **OPTIONS)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    return answer.choices[0].message.content


def streaming() -> str:
    whole = plain()
    chunks = list(
        litellm.completion(
            messages=HELLO, stream=True, stream_options={"include_usage": True}, **OPTIONS
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole, (text, whole)
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == whole
    return f"{len(chunks)} chunks"


def several() -> str:
    async def both() -> set[str]:
        asked = (litellm.acompletion(messages=HELLO, **OPTIONS) for _ in range(6))
        return {a.choices[0].message.content for a in await asyncio.gather(*asked)}

    answers = asyncio.run(both())
    assert len(answers) == 1, answers
    return "6 the same"


def schema() -> str:
    form = {"type": "json_schema", "json_schema": {"name": "days", "schema": DAYS, "strict": True}}
    answer = litellm.completion(messages=HELLO, response_format=form, **LONGER)
    found = json.loads(answer.choices[0].message.content)
    assert 0 <= found["days"] <= 9
    return str(found)


def tools() -> str:
    answer = litellm.completion(messages=HELLO, tools=[TOOL], tool_choice="required", **LONGER)
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert call.function.name == "weather"
    assert 0 <= json.loads(call.function.arguments)["days"] <= 9
    return call.function.arguments


def tools_streaming() -> str:
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(
        litellm.completion(messages=HELLO, tools=[TOOL], tool_choice=named, stream=True, **LONGER)
    )
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert 0 <= json.loads(call.function.arguments)["days"] <= 9
    return call.function.arguments


def completion() -> str:
    options = {**OPTIONS, "model": f"text-completion-openai/{MODEL}", "max_tokens": 8}
    text = litellm.text_completion(prompt="Once upon", **options).choices[0].text
    assert text
    return text


def error() -> str:
    try:
        litellm.completion(messages=[{"role": "user", "content": "a " * 40_000}], **OPTIONS)
    except litellm.ContextWindowExceededError:
        return "ContextWindowExceededError"
    raise AssertionError("no error")


run(
    {
        "plain": plain, "streaming": streaming, "six at once": several, "schema": schema,
        "tools": tools, "tools, streaming": tools_streaming, "completion": completion,
        "too long": error,
    }
)  # fmt: skip
