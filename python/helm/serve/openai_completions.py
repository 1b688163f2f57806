"""POST /v1/completions: continues texts or token ids, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from helm.serve import http_body
from helm.serve.backend import ScoringBackend, scores
from helm.serve.errors import ApiError, too_long
from helm.serve.generation import Asked, Generation, Logprob, Part, choices_of
from helm.serve.http_body import Json
from helm.serve.logprobs import TokenTexts, completion_logprobs
from helm.serve.openai_schema import CompletionRequest, read_body, read_completion
from helm.serve.replies import collected, headers_of, stream_response
from helm.serve.serving import BYTES_A_CHARACTER, LONG, Record, Serving
from helm.serve.sse import DONE, WAIT, Chunks

_MOST_ANSWERS = 128


async def completions(request: Request) -> Response:
    """The route."""
    serving: Serving = request.app.state.serving
    record: Record = request.scope["helm.record"]
    body = await http_body.read(request)
    serving.check_ready()
    asked = await serving.run(
        len(body) // BYTES_A_CHARACTER, lambda: read_completion(read_body(body))
    )
    serving.check_model(asked.model)
    serving.note_user(record, asked.user)
    if len(asked.prompts) * asked.choices > _MOST_ANSWERS:
        raise ApiError(400, f"prompts times n is more than {_MOST_ANSWERS}", param="n")
    answer = await _answer(serving, asked, record)
    headers = headers_of(record, asked.ignored)
    if asked.stream:
        return await stream_response(request, answer.events(), headers)
    whole = await collected(request, answer.whole())
    if record.timed_out:
        headers["x-helm-timeout"] = f"{serving.request_timeout_s:g}"
    return Json(whole, headers=headers)


async def _answer(serving: Serving, asked: CompletionRequest, record: Record) -> CompletionAnswer:
    choices: list[Asked] = []
    states: list[Choice] = []
    for prompt in asked.prompts:
        tokens = await _tokens(serving, prompt)
        if serving.log_prompts:
            serving.note_prompt(record, _text(serving, prompt))
        backend = serving.backend
        if len(tokens) > backend.context:
            raise too_long(len(tokens), backend.context, "the prompt")
        bound = asked.sampling.json_schema is not None
        job = await serving.run(
            LONG if bound else 0, backend.prompts.tokens_job, tokens, asked.sampling, False, True
        )
        choices += choices_of(job, asked.choices, len(choices))
        echo = _text(serving, prompt) if asked.echo else ""
        states += [Choice(echo, tokens if asked.echo else []) for _ in range(asked.choices)]
    return CompletionAnswer(serving, asked, record, choices, states)


async def _tokens(serving: Serving, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    tokenizer = serving.backend.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the model has no tokenizer; give token ids", param="prompt")
    serving.check_length(len(prompt), "prompt")
    return await serving.run(len(prompt), tokenizer.encode, prompt)


def _text(serving: Serving, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = serving.backend.tokenizer
    return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)


@dataclass
class Choice:
    """One answer as it grows. echo, prompt: what stands before it."""

    echo: str
    prompt: list[int]
    scored: list[Logprob | None] | None = None  # of the prompt
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    offset: int = 0  # of the next token's text
    finish: str | None = None
    begun: bool = False


class CompletionAnswer:
    """All choices of one request: those of each prompt in turn."""

    def __init__(
        self, serving: Serving, asked: CompletionRequest, record: Record, choices: list[Asked],
        states: list[Choice],
    ) -> None:  # fmt: skip
        self._serving = serving
        self._asked = asked
        self._record = record
        self._states = states
        self._choices = choices
        self._generation = Generation(serving, choices, record, asked.stream)
        self._texts = TokenTexts(serving.backend.tokenizer)
        self._head = record.head("text_completion", "cmpl", serving.name)

    async def whole(self) -> dict[str, Any]:
        """The response of a request without a stream."""
        async for parts in self._parts():
            for part in parts:
                state = self._states[part.choice]
                state.text += part.text
                state.tokens += part.tokens
                state.logprobs += part.logprobs
                state.finish = part.finish
        choices = [
            {
                "index": i,
                "text": state.echo + state.text,
                "logprobs": self._logprobs(state, state.tokens, state.logprobs),
                "finish_reason": state.finish,
            }
            for i, state in enumerate(self._states)
        ]
        return {**self._head, "choices": choices, "usage": self._record.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream."""
        chunks = Chunks(self._head, self._asked.include_usage)
        source = self._parts()
        try:
            async for parts in source:
                if not parts:
                    yield WAIT
                found: list[bytes] = []
                for part in parts:
                    state = self._states[part.choice]
                    text = part.text if state.begun else state.echo + part.text
                    logprobs = self._logprobs(state, part.tokens, part.logprobs)
                    if text or logprobs is not None or part.finish is not None:
                        choice = {
                            "index": part.choice,
                            "text": text,
                            "logprobs": logprobs,
                            "finish_reason": part.finish,
                        }
                        found.append(chunks.chunk(choice))
                if found:
                    yield b"".join(found)
        finally:
            await source.aclose()
        if self._asked.include_usage:
            yield chunks.usage(self._record.usage())
        yield DONE

    async def _parts(self) -> AsyncGenerator[list[Part], None]:
        if self._asked.echo and self._asked.sampling.logprobs is not None:
            await self._score()
        if self._asked.max_tokens == 0:
            prompts = self._choices[:: self._asked.choices]
            self._record.prompt_tokens = sum(len(one.job.tokens) for one in prompts)
            yield [Part(i, "", finish="length") for i in range(len(self._states))]
            return
        source = self._generation.parts()
        try:
            async for parts in source:
                yield parts
        finally:
            await source.aclose()

    async def _score(self) -> None:
        backend = self._serving.backend
        if not scores(backend):
            raise ApiError(501, "logprobs of an echoed prompt are not implemented", param="echo")
        top = self._asked.sampling.logprobs or 0
        count = self._asked.choices
        for first in range(0, len(self._states), count):
            states = self._states[first : first + count]
            tokens = states[0].prompt
            admission, client = self._serving.admission, self._record.client
            priority = self._asked.sampling.priority
            async with admission.place(client, len(tokens), 1, priority):
                found = await cast(ScoringBackend, backend).score(tokens, top)
            for state in states:
                state.scored = found

    def _logprobs(
        self, state: Choice, tokens: list[int], found: list[Logprob]
    ) -> dict[str, Any] | None:
        begun, state.begun = state.begun, True
        top = self._asked.sampling.logprobs
        if top is None:
            return None
        known: list[Logprob | None] = list(found)
        if not begun and state.scored is not None:
            tokens, known = [*state.prompt, *tokens], [*state.scored, *known]
        if not tokens:
            return None
        shown, state.offset = completion_logprobs(self._texts, tokens, known, top, state.offset)
        return shown
