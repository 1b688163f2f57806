"""A loaded model in asyncio: requests for a server, and prompts to text for programs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from helm.errors import HelmError, InvalidError
from helm.session.async_requests import Inlet, RequestStream
from helm.session.calls import output_of
from helm.session.host_memory import check_results
from helm.session.llm import LLM
from helm.session.requests import EngineRequest
from helm.session.service import CLOSED
from helm.text.completion import Completion, TextChunk, Timings
from helm.text.prompts import ChatKeywords, Job, Prompt, Prompts, Template, split_prompts
from helm.text.sampling import SamplingKeywords, SamplingParams, sampling_params

if TYPE_CHECKING:
    from helm.plan.schema import Plan
    from helm.text.tokenizer import Tokenizer

_DRAIN_S = 0.02  # between two looks at whether all has ended


class AsyncLLM:
    """A model ready to generate for many tasks at once, which share steps.

    Takes what helm.LLM takes; loading blocks. Its calls belong to asyncio and to one thread at a
    time. A task that is cancelled, or an iterator that is closed early, ends its generation within
    a step. `submit` is the lower level, of token ids, for servers.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._inlets: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Inlet]
        self._inlets = weakref.WeakKeyDictionary()

    @classmethod
    def over(cls, llm: LLM) -> Self:
        """Of an LLM that is open; they share it, and closing one closes both."""
        made = cls.__new__(cls)
        made._llm = llm
        made._inlets = weakref.WeakKeyDictionary()
        return made

    @property
    def name(self) -> str:
        """The folder's name, or the Hugging Face id."""
        return self._llm.name

    @property
    def plan(self) -> Plan:
        """What runs where, and the memory it takes."""
        return self._llm.plan

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one."""
        return self._llm.tokenizer

    @property
    def prompts(self) -> Prompts:
        """Makes jobs of prompts and conversations, checked against the model."""
        return self._llm._prompts

    @property
    def context(self) -> int:
        """Positions a request may have, prompt and output together."""
        return self._llm.context

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._llm.vocab_size

    @property
    def concurrency(self) -> int:
        """Requests that share steps at most."""
        return self.plan.limits.sequences

    @property
    def failure(self) -> HelmError | None:
        """What the last failed step failed with; None while every step has succeeded."""
        service = self._llm._service
        if service is None:
            return InvalidError(CLOSED)
        try:
            service.check()
        except HelmError as error:
            return error
        return None

    def submit(self, request: EngineRequest) -> RequestStream:
        """Queues a request of a task of the running loop.

        InvalidError for tokens outside the vocabulary, CapacityError for more than the context
        holds, OutOfMemoryError where memory does not hold the results.
        """
        service = self._llm._open_service()
        loop = asyncio.get_running_loop()
        inlet = self._inlets.get(loop)
        if inlet is None:
            inlet = self._inlets[loop] = Inlet(service, loop)
        return inlet.submit(request)

    def pace(self, step_target_s: float) -> None:
        """Sets what a step that decodes for a streamed request may take, as far as prompts that it
        computes beside make it longer; 0, as at first: 2.25 times one without prompts in which all
        that run decode, at least 50 ms."""
        self._llm._open_service().pace(step_target_s)

    def stats(self) -> dict[str, float]:
        """running, waiting, steps, tokens, guessed_tokens, accepted_tokens, saved_s,
        kv_blocks_used, kv_blocks_total, kv_blocks_moved, parked, preemptions, moves_far,
        moves_near, far_rows; steps, and predicted_s and measured_s where the plan has tables, of
        each mode: near_steps, ...; once a mixture's experts ran on the CPU, experts_read and
        experts_expected."""
        return {name: float(value) for name, value in self._llm._open_service().stats().items()}

    async def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> Any:
        """Continue one prompt or many, as LLM.generate does: a Completion, or a list of them."""
        self._llm._open_service()
        params = sampling_params(sampling, overrides)
        single, many = split_prompts(prompts)
        jobs = [self.prompts.job(prompt, i, params) for i, prompt in many]
        check_results(jobs, self.vocab_size)
        streams = [self._start(job, streamed=False) for job in jobs]
        try:
            results = [await stream.rest(raises=single) for stream in streams]
        finally:
            for stream in streams:
                await stream.aclose()
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> AsyncTextStream:
        """Continue one prompt: `async for` gives TextChunks, the last one with the completion."""
        self._llm._open_service()
        params = sampling_params(sampling, overrides)
        single, many = split_prompts(prompt)
        if not single:
            raise InvalidError("[stream] takes one prompt, got a list; generate() takes many")
        return self._checked(self.prompts.job(many[0][1], None, params))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Completion:
        """The assistant's next message of a conversation, as LLM.chat."""
        async with self.chat_stream(messages, sampling, **options) as stream:
            return await stream.rest(raises=True)

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **overrides: Unpack[SamplingKeywords],
    ) -> AsyncTextStream:
        """`chat` as a stream of TextChunks; options as LLM.chat_stream."""
        self._llm._open_service()
        params = sampling_params(sampling, overrides)
        template = Template(tools, template_variables, chat_template, continue_final_message)
        return self._checked(self.prompts.chat_job(messages, params, template))

    async def drain(self, grace_s: float) -> None:
        """Takes no more requests; returns once all have ended, after so many seconds at most."""
        service = self._llm._open_service()
        service.drain()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        while loop.time() < end:
            stats = service.stats()
            if stats["running"] + stats["waiting"] == 0:
                return
            await asyncio.sleep(_DRAIN_S)

    def close(self) -> None:
        """Ends what is open, with an error, and frees the model."""
        service = self._llm._service
        if service is not None:
            service.stop(0.0)
        self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _checked(self, job: Job) -> AsyncTextStream:
        check_results([job], self.vocab_size)
        return self._start(job)

    def _start(self, job: Job, streamed: bool = True) -> AsyncTextStream:
        request = EngineRequest(
            job.tokens,
            job.max_tokens,
            job.sampling,
            tuple(job.stop_tokens),
            constraint=job.constraint,
            streamed=streamed,
        )
        return AsyncTextStream(job, self.tokenizer, self.submit(request))


@dataclasses.dataclass(frozen=True)
class _Token:
    """A token as an Output takes it."""

    id: int
    logprob: float
    top: list[tuple[int, float]]
    finish: str


class AsyncTextStream:
    """An asynchronous iterator over the TextChunks of one generation.

    Closing it early (`aclose`, leaving an `async with` block, or dropping it) ends the generation.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer | None, stream: RequestStream) -> None:
        self._output = output_of(job, tokenizer)
        self._stream = stream

    @property
    def completion(self) -> Completion:
        """The result so far; after the last chunk, the final one."""
        timings = self._stream.timings
        return self._output.completion(Timings.from_native(timings) if timings else Timings())

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        while self._output.finish_reason is None:
            text = await self._next()
            if self._output.finish_reason is not None:
                if self._output.failure is not None:
                    raise self._output.failure
                return self._output.chunk(text, self.completion)
            if text:
                return self._output.chunk(text)
        raise StopAsyncIteration

    async def rest(self, raises: bool) -> Completion:
        """Waits for the end; raises: what the request failed with, if it did."""
        while self._output.finish_reason is None:
            await self._next()
        if raises and self._output.failure is not None:
            raise self._output.failure
        return self.completion

    async def aclose(self) -> None:
        """Ends the generation if it has not ended."""
        self._stream.cancel()
        self._output.cancel()

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self) -> str:
        """The text of the next outputs."""
        try:
            step = await anext(self._stream)
        except StopAsyncIteration:
            return self._output.cancel()
        except asyncio.CancelledError:
            self._stream.cancel()
            raise
        text = ""
        try:
            for i, token in enumerate(step.tokens):
                logprob, top = (float("nan"), []) if step.logprobs is None else step.logprobs[i]
                last = i + 1 == len(step.tokens) and step.error is None
                finish = (step.finish or "") if last else ""
                text += self._output.add(_Token(token, logprob, top, finish))
            if step.error is not None:
                raise step.error
        except Exception as error:
            self._output.fail(error)
        if self._output.finish_reason is not None:
            self._stream.cancel()  # a stop string, or a failure here
        return text
