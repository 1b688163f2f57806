"""OpenAI's own client against the bundled model: sync, async, streams, schemas, tools, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

import helm
from helm.serve.llm_backend import LlmBackend
from scripted_backend import served

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with helm.LLM() as llm, served(LlmBackend.over(llm)) as (address, _):
        yield f"{address}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> str:
    with helm.LLM() as llm:
        return llm.chat(HELLO, max_tokens=12, temperature=0).text


def test_a_chat_is_what_the_model_says_alone(client: openai.OpenAI, alone: str) -> None:
    answer = client.chat.completions.create(model="bundled", messages=HELLO, max_tokens=12,
                                            temperature=0)  # fmt: skip
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (alone, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 12)
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream_has_the_same_text_and_usage_last(client: openai.OpenAI, alone: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="bundled", messages=HELLO, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == alone
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_streaming_helper_takes_the_events(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="bundled", messages=HELLO, max_tokens=60, temperature=0, stop="storyteller"
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "Hello! I am a small "
    assert final.choices[0].finish_reason == "stop"


def test_async_clients_share_the_server(url: str, alone: str) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            asked = [
                client.chat.completions.create(
                    model="bundled", messages=HELLO, max_tokens=12, temperature=0
                )
                for _ in range(12)
            ]
            return [a.choices[0].message.content for a in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [alone] * 12


def test_an_answer_of_a_schema_is_parsed(client: openai.OpenAI) -> None:
    class Pet(BaseModel):
        kind: str = Field(pattern="^(cat|dog)$")
        age: int = Field(ge=0, le=30)

    found = client.chat.completions.parse(
        model="bundled", messages=HELLO, response_format=Pet, max_tokens=60, seed=1, temperature=1
    )
    parsed = found.choices[0].message.parsed
    assert parsed is not None
    assert parsed.kind in ("cat", "dog")
    assert 0 <= parsed.age <= 30


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_loop_of_tools(client: openai.OpenAI, choice: object) -> None:
    messages: list = list(HELLO)
    first = client.chat.completions.create(
        model="bundled", messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=80,
        parallel_tool_calls=False,
    ).choices[0]  # fmt: skip
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    (call,) = first.message.tool_calls or []
    assert call.function.name == "weather"
    assert 0 <= json.loads(call.function.arguments)["days"] <= 9
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = client.chat.completions.create(
        model="bundled", messages=messages, max_tokens=5, temperature=0
    )
    assert second.choices[0].message.content


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_named_tool_may_have_the_name_of_a_choice(client: openai.OpenAI, name: str) -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "name": name}}
    wanted = {"type": "function", "function": {"name": name}}
    answer = client.chat.completions.create(
        model="bundled", messages=HELLO, tools=[TOOL, tool], tool_choice=wanted, max_tokens=80
    ).choices[0]  # fmt: skip
    (call,) = answer.message.tool_calls or []
    assert call.function.name == name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "parallel", "several"),
    [("required", True, True), ("required", False, False), (NAMED, True, False)],
)
def test_required_calls_may_be_several(
    client: openai.OpenAI, choice: Any, parallel: bool, several: bool, stream: bool
) -> None:
    """A list of them, as long as the model likes; a named tool is called once."""
    asked: dict[str, Any] = {
        "model": "bundled", "messages": HELLO, "tools": [TOOL], "max_tokens": 100,
        "temperature": 1, "seed": 2, "tool_choice": choice, "parallel_tool_calls": parallel,
    }  # fmt: skip
    if stream:
        found: dict[int, str] = {}
        content = ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            content += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason
            for piece in chunk.choices[0].delta.tool_calls or []:
                text = (piece.function.arguments if piece.function else None) or ""
                found[piece.index] = found.get(piece.index, "") + text
        arguments = [found[i] for i in range(len(found))]
    else:
        answer = client.chat.completions.create(**asked).choices[0]
        reason = answer.finish_reason
        calls = answer.message.tool_calls or []
        content = answer.message.content or ""
        assert len({call.id for call in calls}) == len(calls)
        arguments = [call.function.arguments for call in calls]
    if several and reason == "length":  # within the last one, which is content
        arguments = arguments[:3]
    else:
        assert content == ""
    assert all(0 <= json.loads(text)["days"] <= 9 for text in arguments)
    assert len(arguments) > 1 if several else (len(arguments), reason) == (1, "tool_calls")


def test_a_streamed_call_has_its_name_once(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="bundled", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=80,
        stream=True, parallel_tool_calls=False,
    )  # fmt: skip
    pieces = [p for c in chunks for p in (c.choices[0].delta.tool_calls or [])]
    assert [p.function.name for p in pieces if p.function and p.function.name] == ["weather"]
    assert [p.id is not None for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert {p.index for p in pieces} == {0}
    text = "".join(p.function.arguments or "" for p in pieces if p.function)
    assert set(json.loads(text)) == {"days"}


def test_choices_draw_by_seeds_of_their_own(client: openai.OpenAI) -> None:
    asked = {"model": "bundled", "messages": HELLO, "max_tokens": 20, "temperature": 1.5}
    three = client.chat.completions.create(**asked, n=3, seed=7)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    second = client.chat.completions.create(**asked, seed=8)
    assert second.choices[0].message.content == texts[1]
    assert three.usage is not None
    assert three.usage.prompt_tokens == 7


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="bundled", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    for token in logprobs.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2
        assert token.logprob <= 0
    assert "".join(t.token for t in logprobs.content) == answer.choices[0].message.content


def test_an_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    echo = client.completions.create(
        model="bundled", prompt="Once upon a time", echo=True, max_tokens=0, logprobs=1
    ).choices[0]
    assert echo.text == "Once upon a time"
    assert echo.logprobs is not None
    tokens, values = echo.logprobs.tokens, echo.logprobs.token_logprobs
    assert tokens is not None
    assert values is not None
    assert tokens[1:] == ["Once", " upon", " a", " time"]
    assert values[0] is None
    import numpy

    with helm.LLM() as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("Once upon a time")
        rows = llm.logits(ids).astype(numpy.float64)
    expected = [
        float(row[i] - row.max() - numpy.log(numpy.exp(row - row.max()).sum()))
        for row, i in zip(rows[:-1], ids[1:], strict=True)
    ]
    assert values[1:] == pytest.approx(expected, abs=1e-5)


def test_completions_of_texts_and_ids(client: openai.OpenAI) -> None:
    texts = client.completions.create(
        model="bundled", prompt=["Once upon", "The fox"], max_tokens=4, temperature=0
    )
    with helm.LLM() as llm:
        expected = [llm.generate(p, max_tokens=4, temperature=0).text
                    for p in ("Once upon", "The fox")]  # fmt: skip
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("The fox")
    assert [choice.text for choice in texts.choices] == expected
    again = client.completions.create(model="bundled", prompt=ids, max_tokens=4, temperature=0)
    assert again.choices[0].text == expected[1]
    streamed = client.completions.create(
        model="bundled", prompt="The fox", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected[1]


def test_models_are_listed_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").owned_by == "helm"
    with pytest.raises(openai.NotFoundError, match="bundled"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bundled", prompt=[5] * 513)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in str(caught.value)
    assert "513" in str(caught.value)
    whole = client.completions.create(model="bundled", prompt=[5] * 512, max_tokens=9)
    assert whole.choices[0].finish_reason in ("length", "stop")


def test_what_is_not_there_says_so(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.embeddings.create(model="bundled", input="x"),
        lambda: client.responses.create(model="bundled", input="x"),
    ):
        with pytest.raises(openai.APIStatusError, match="not implemented") as caught:
            call()
        assert caught.value.status_code == 501


def test_choices_are_the_same_with_guesses() -> None:
    """Of greedy choices and drawn ones, which share a prompt that repeats itself."""

    def choices(speculate: str) -> tuple[list[str], int]:
        with (
            helm.LLM(speculate=speculate, threads=1) as llm,
            served(LlmBackend.over(llm)) as (address, _),
            openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
        ):
            found = []
            for temperature in (0.0, 0.7):
                answer = client.completions.create(
                    model="bundled", prompt="one two three four " * 9, max_tokens=40, n=3, seed=7,
                    temperature=temperature, presence_penalty=0.1,
                )  # fmt: skip
                found += [choice.text for choice in answer.choices]
            metrics = dict(
                line.split()
                for line in httpx.get(f"{address}/metrics").text.splitlines()
                if line.startswith("helm_engine_guessed_tokens_total ")
            )
            return found, int(metrics["helm_engine_guessed_tokens_total"])

    plain, none = choices("off")
    guessed, some = choices("ngram")
    assert guessed == plain
    assert len(set(plain)) > 3
    assert none == 0
    assert some > 0
