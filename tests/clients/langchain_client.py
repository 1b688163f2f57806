"""langchain-openai against a server: `langchain_client.py URL MODEL`."""

from __future__ import annotations

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from report import run

URL, MODEL = sys.argv[1:]
HELLO = "Hello"


class Days(BaseModel):
    """A number of days."""

    days: int = Field(ge=0, le=9)


@tool(args_schema=Days)
def weather(days: int) -> str:
    """The weather of a number of days."""
    return f"sun for {days} days"


def chat(max_tokens: int = 24, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=URL, api_key="any", model=MODEL, temperature=0, max_tokens=max_tokens,
        max_retries=0, **options,
    )  # fmt: skip


def plain() -> str:
    answer = chat().invoke(HELLO)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    return answer.content


def streaming() -> str:
    whole = chat().invoke(HELLO).content
    chunks = list(chat(stream_usage=True).stream(HELLO))
    text = "".join(chunk.content for chunk in chunks)
    assert text == whole, (text, whole)
    assert len(chunks) > 2
    assert any(chunk.usage_metadata for chunk in chunks)
    return f"{len(chunks)} chunks"


def several() -> str:
    async def both() -> list[AIMessage]:
        return await chat().abatch([HELLO] * 6)

    answers = {answer.content for answer in asyncio.run(both())}
    assert len(answers) == 1, answers
    return "6 the same"


def schema() -> str:
    found = chat(100).with_structured_output(Days, method="json_schema").invoke("How many days?")
    assert isinstance(found, Days)
    return repr(found)


def tools() -> str:
    bound = chat(100).bind_tools([weather], tool_choice="required", strict=True)
    (call,) = bound.invoke("The weather of three days?").tool_calls[:1]
    assert call["name"] == "weather"
    assert isinstance(call["args"]["days"], int)
    return str(call["args"])


def tools_streaming() -> str:
    bound = chat(100).bind_tools([weather], tool_choice="weather", strict=True)
    whole = None
    for chunk in bound.stream("The weather of three days?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["name"] == "weather", whole
    assert isinstance(whole.tool_calls[0]["args"]["days"], int)
    return str(whole.tool_calls[0]["args"])


def tool_results() -> str:
    call = {"name": "weather", "args": {"days": 3}, "id": "call_1"}
    answer = chat().bind_tools([weather]).invoke(
        [HumanMessage("The weather?"), AIMessage("", tool_calls=[call]),
         ToolMessage("sun", tool_call_id="call_1"), HumanMessage("Thanks")]
    )  # fmt: skip
    assert answer.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")
    return answer.response_metadata["finish_reason"]


def completion() -> str:
    text = OpenAI(
        base_url=URL, api_key="any", model=MODEL, temperature=0, max_tokens=8, max_retries=0
    ).invoke("Once upon")
    assert text
    return text


run(
    {
        "plain": plain, "streaming": streaming, "six at once": several, "schema": schema,
        "tools": tools, "tools, streaming": tools_streaming, "tool results": tool_results,
        "completion": completion,
    }
)  # fmt: skip
