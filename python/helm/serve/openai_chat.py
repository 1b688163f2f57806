"""POST /v1/chat/completions: from a conversation to choices, whole or as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helm.serve import http_body
from helm.serve.errors import ApiError, too_long
from helm.serve.generation import Asked, Generation, Part, choices_of
from helm.serve.http_body import Json
from helm.serve.logprobs import TokenTexts, chat_logprobs
from helm.serve.openai_schema import ChatRequest, read_body, read_chat
from helm.serve.reasoning import ReasoningSplitter, opens_thought
from helm.serve.replies import collected, headers_of, stream_response
from helm.serve.serving import BYTES_A_CHARACTER, LONG, Record, Serving
from helm.serve.sse import DONE, WAIT, Chunks
from helm.serve.tools.deltas import ContentDelta
from helm.serve.tools.description import described
from helm.serve.tools.parser import ToolParser, parser_for
from helm.text.literal_text import literal_tokens
from helm.text.prompts import Job, Template
from helm.text.sampling import SamplingKeywords, SamplingParams, sampling_params
from helm.text.structured import json_after_thought
from helm.text.thinking import Marks
from helm.text.tokenizer import Tokenizer


async def chat(request: Request) -> Response:
    """The route."""
    serving: Serving = request.app.state.serving
    record: Record = request.scope["helm.record"]
    body = await http_body.read(request)
    serving.check_ready()
    asked = await serving.run(len(body) // BYTES_A_CHARACTER, lambda: read_chat(read_body(body)))
    serving.check_model(asked.model)
    serving.note_user(record, asked.user)
    answer = await _answer(serving, asked, record)
    headers = headers_of(record, asked.ignored)
    if asked.stream:
        return await stream_response(request, answer.events(), headers)
    whole = await collected(request, answer.whole())
    if record.timed_out:
        headers["x-helm-timeout"] = f"{serving.request_timeout_s:g}"
    return Json(whole, headers=headers)


async def _answer(serving: Serving, asked: ChatRequest, record: Record) -> ChatAnswer:
    tokenizer = chat_tokenizer(serving)
    tools = asked.tools if asked.tool_choice != "none" else None
    template = Template(tools, asked.variables, None, asked.continue_final_message)
    messages = described(asked.messages, tools, template_source(tokenizer, tools))
    characters = sum(len(str(message.get("content"))) for message in messages)
    serving.check_length(characters, "messages")
    text, tokens = await serving.run(
        characters, literal_tokens, tokenizer, messages,
        lambda messages: template.render(tokenizer, messages),
    )  # fmt: skip
    serving.note_prompt(record, text)
    backend = serving.backend
    if len(tokens) > backend.context:
        raise too_long(len(tokens), backend.context, "the conversation")
    parser = _parser(tokenizer, tools, asked.stream)
    sampling = _sampling(serving, asked, parser)
    bound = sampling.json_schema is not None
    thinks = not (bound and _thought_is_over(serving, text, asked))
    job = await serving.run(
        0 if not bound else LONG, _job, serving, tokens, sampling, template.continues,
        _splitter(serving, text, asked) if thinks else None,
    )  # fmt: skip
    states = [
        Choice(
            _splitter(serving, text, asked) if thinks else None,
            _parser(tokenizer, tools, asked.stream),
            asked.parallel_tool_calls,
        )
        for _ in range(asked.choices)
    ]
    splitter = states[0].splitter
    markers = (*(parser.markers if parser else ()), *(splitter.tags if splitter else ()))
    choices = choices_of(job, asked.choices, 0, shown_ids(tokenizer, markers))
    return ChatAnswer(serving, asked, record, choices, states)


def chat_tokenizer(serving: Serving) -> Tokenizer:
    """The tokenizer of a model that chats; 400 for others."""
    tokenizer = serving.backend.tokenizer
    if tokenizer is None or not tokenizer.chat_templates:
        raise ApiError(
            400,
            f"the model {serving.name!r} has no chat template; use /v1/completions",
            code="no_chat_template",
        )
    return tokenizer


def shown_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Special tokens that a parser needs to see."""
    found = (tokenizer.token_id(marker) for marker in markers if marker)
    return frozenset(i for i in found if i is not None)


def _parser(
    tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, live: bool
) -> ToolParser | None:
    if tools is None:
        return None
    return parser_for(template_source(tokenizer, tools), tools, live=live)


def template_source(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> str:
    """The text of the template that is taken."""
    sources = tokenizer.chat_templates
    return (sources.get("tool_use") if tools else None) or sources.get("default", "")


def _splitter(serving: Serving, text: str, asked: ChatRequest) -> ReasoningSplitter | None:
    marks = serving.marks
    if marks is None:
        return None
    return ReasoningSplitter(_opened(text, asked, marks), marks.begin, marks.end)


def _opened(text: str, asked: ChatRequest, marks: Marks) -> bool:
    last = asked.messages[-1].get("content") if asked.continue_final_message else ""
    return opens_thought(text, marks.begin, marks.end, last if isinstance(last, str) else "")


def _thought_is_over(serving: Serving, text: str, asked: ChatRequest) -> bool:
    """Whether the prompt ends behind a thought, as where thinking is turned off, or within an
    answer that has none."""
    marks = serving.marks
    if marks is None or asked.continue_final_message:
        return marks is None or not _opened(text, asked, marks)
    return text.rstrip().endswith(marks.end)


def _job(
    serving: Serving, tokens: list[int], sampling: SamplingParams, continues: bool,
    splitter: ReasoningSplitter | None,
) -> Job:  # fmt: skip
    """Of one choice. Where its answer is split, JSON may have a thought before it."""
    backend, schema = serving.backend, sampling.json_schema
    tokenizer, marks = backend.tokenizer, serving.marks
    if schema is None or splitter is None or marks is None or tokenizer is None:
        return backend.prompts.tokens_job(tokens, sampling, True, continues)
    free = dataclasses.replace(sampling, json_schema=None)
    job = backend.prompts.tokens_job(tokens, free, True, continues)
    constraint = json_after_thought(
        schema, marks, splitter.opened, tokenizer, backend.vocab_size,
        backend.prompts.defaults.eos_token_ids,
    )  # fmt: skip
    return dataclasses.replace(job, constraint=constraint)


def _sampling(serving: Serving, asked: ChatRequest, parser: ToolParser | None) -> SamplingParams:
    """Of one answer: as long as the model recommends or the context is; a call where it must."""
    sampling, choice = asked.sampling, asked.tool_choice
    changed: SamplingKeywords = {}
    if parser is not None and choice not in ("none", "auto"):
        several = choice == "required" and asked.parallel_tool_calls
        changed["json_schema"] = parser.required_schema(choice, several)
    if sampling.max_tokens is None:
        changed["max_tokens"] = serving.backend.prompts.defaults.max_new_tokens
    return sampling_params(sampling, changed)


@dataclass
class Choice:
    """One answer as it grows: its text split into thought, content and calls."""

    splitter: ReasoningSplitter | None
    parser: ToolParser | None
    parallel: bool
    message: dict[str, Any] = field(
        default_factory=lambda: {"role": "assistant", "content": None, "refusal": None}
    )
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None

    def deltas(self, part: Part) -> list[dict[str, Any]]:
        """What a part adds; sets `finish` with the last."""
        last = part.finish is not None
        found: list[dict[str, Any]] = []
        pieces = (
            [("content", part.text)]
            if self.splitter is None
            else self.splitter.feed(part.text, last)
        )
        for kind, text in pieces:
            if kind == "reasoning":
                found.append({"reasoning_content": text})
            elif self.parser is None:
                found += [{"content": text}] if text else []
            else:
                found += self._parsed(self.parser, text, False)
        if last:
            found += [] if self.parser is None else self._parsed(self.parser, "", True)
        for delta in found:
            self._add(delta)
        if last:
            called = "tool_calls" in self.message and part.finish == "stop"
            self.finish = "tool_calls" if called else part.finish
        return found

    def _parsed(self, parser: ToolParser, text: str, last: bool) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for delta in parser.feed(text, last):
            if isinstance(delta, ContentDelta):
                found.append({"content": delta.text})
            elif self.parallel or delta.index == 0:
                found.append({"tool_calls": [delta.to_openai()]})
        return found

    def _add(self, delta: dict[str, Any]) -> None:
        message = self.message
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in piece:
                call = {name: value for name, value in piece.items() if name != "index"}
                calls.append({**call, "function": dict(piece["function"])})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]

    def ended(self) -> dict[str, Any]:
        """The whole message."""
        if self.message["content"] is None and "tool_calls" not in self.message:
            self.message["content"] = ""
        return self.message


class ChatAnswer:
    """All choices of one request."""

    def __init__(
        self, serving: Serving, asked: ChatRequest, record: Record, choices: list[Asked],
        states: list[Choice],
    ) -> None:  # fmt: skip
        self._asked = asked
        self._record = record
        self._states = states
        self._generation = Generation(serving, choices, record, asked.stream)
        self._texts = TokenTexts(serving.backend.tokenizer)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self._head = record.head(kind, "chatcmpl", serving.name)
        self._chunks = Chunks(self._head, asked.include_usage)

    async def whole(self) -> dict[str, Any]:
        """The response of a request without a stream."""
        async for parts in self._generation.parts():
            for part in parts:
                state = self._states[part.choice]
                state.deltas(part)
                state.logprobs += (self._logprobs(part) or {"content": []})["content"]
        choices = [
            {
                "index": i,
                "message": state.ended(),
                "logprobs": {"content": state.logprobs, "refusal": None}
                if self._asked.sampling.logprobs is not None
                else None,
                "finish_reason": state.finish,
            }
            for i, state in enumerate(self._states)
        ]
        return {**self._head, "choices": choices, "usage": self._record.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream."""
        begun: set[int] = set()
        source = self._generation.parts()
        try:
            async for parts in source:
                if not parts:
                    yield WAIT
                found: list[bytes] = []
                for part in parts:
                    if part.choice not in begun:
                        begun.add(part.choice)
                        found.append(self._chunk(part.choice, {"role": "assistant", "content": ""}))
                    found += self._new_chunks(part)
                if found:
                    yield b"".join(found)
        finally:
            await source.aclose()
        if self._asked.include_usage:
            yield self._chunks.usage(self._record.usage())
        yield DONE

    def _new_chunks(self, part: Part) -> list[bytes]:
        state = self._states[part.choice]
        deltas = state.deltas(part)
        logprobs = self._logprobs(part)
        if logprobs is not None and not deltas:
            deltas = [{}]
        found = [
            self._chunk(part.choice, delta, logprobs if i == 0 else None)
            for i, delta in enumerate(deltas)
        ]
        if part.finish is not None:
            found.append(self._chunk(part.choice, {}, finish=state.finish))
        return found

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> bytes:
        return self._chunks.chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        )

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        top = self._asked.sampling.logprobs
        if top is None or not part.tokens:
            return None
        return chat_logprobs(self._texts, part.tokens, part.logprobs, top)
