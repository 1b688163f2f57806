"""Calls of an LLM as clients of its service: their outputs assembled as tokens come. Knows nothing
of prompts' text."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from helm.errors import TokenizerError
from helm.session.service import PATIENCE_S, Service, native_request
from helm.text.completion import Completion, Output, TextChunk, Timings
from helm.text.prompts import Job
from helm.text.stop_strings import TextAssembler
from helm.text.tokenizer import Tokenizer


class Call:
    """Jobs submitted together. `take` gives the text pieces as they come; `cancel` ends it.
    streamed: whether somebody reads them then."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer | None,
        jobs: Sequence[Job],
        streamed: bool = True,
    ) -> None:
        from helm import _helm

        self.outputs = [output_of(job, tokenizer) for job in jobs]
        self._service = service
        self._outbox = _helm.Outbox()
        self._events: deque[Any] = deque()  # that have come and are not taken
        self._timings = [Timings()] * len(jobs)
        self._ids = service.submit([native_request(job, streamed) for job in jobs], self._outbox)
        self._places = {request: place for place, request in enumerate(self._ids)}

    @property
    def ended(self) -> int:
        """How many jobs have ended."""
        return sum(output.finish_reason is not None for output in self.outputs)

    def wait(self, all_ended: bool) -> None:
        """Until a token has come or, at choice, all jobs have ended; at most PATIENCE_S."""
        if not self._events:
            self._service.engine.check_process()
            self._outbox.wait(PATIENCE_S, all_ended)
            self._events.extend(self._outbox.poll())

    def take(self) -> Iterator[tuple[int, str]]:
        """(job, text) for every token that has come, one after the other.

        A job that fails alone, in the runtime or in what is made of its tokens, ends alone.
        """
        while self._events:
            event = self._events.popleft()
            place = self._places[event.request]
            output = self.outputs[place]
            if output.finish_reason is not None:
                continue
            text = ""
            self._timings[place] = Timings.from_native(event.timings)
            try:
                if event.finish == "error":
                    event.rethrow()
                text = output.add(event)
            except Exception as error:
                output.fail(error)
            if output.finish_reason is not None and not event.finish:
                self._service.cancel(event.request)  # a stop string, or a failure here
            yield place, text

    def raise_failure(self, job: int) -> None:
        """Raises what the job failed with, if it did."""
        failure = self.outputs[job].failure
        if failure is not None:
            raise failure

    def completion(self, job: int) -> Completion:
        """One job's result so far."""
        return self.outputs[job].completion(self._timings[job])

    def cancel(self) -> None:
        """Ends what has not ended."""
        for request, output in zip(self._ids, self.outputs, strict=True):
            if output.finish_reason is None:
                self._service.cancel(request)
                try:
                    output.cancel()
                except Exception as error:
                    output.fail(error)


def run(
    service: Service,
    tokenizer: Tokenizer | None,
    jobs: Sequence[Job],
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Completion, Exception | None]]:
    """The result of each job, with what it failed with. progress: called with (jobs done, jobs)."""
    call = Call(service, tokenizer, jobs, streamed=False)
    try:
        while True:
            for _ in call.take():
                pass
            ended = call.ended
            if progress is not None:
                progress(ended, len(jobs))
            if ended == len(jobs):
                break
            call.wait(all_ended=True)
    except BaseException:
        call.cancel()
        raise
    return [(call.completion(i), output.failure) for i, output in enumerate(call.outputs)]


class TextStream:
    """An iterator over the TextChunks of one generation, which goes on while nobody asks.

    Closing it early (`close`, leaving a `with` block, or dropping it) ends the generation at once.
    """

    def __init__(self, call: Call, on_close: Callable[[Completion], None] | None = None) -> None:
        self._call: Call | None = call
        self._on_close = on_close
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """The result so far; after `close` or the last chunk, the final one."""
        if self._call is not None:
            return self._call.completion(0)
        assert self._completion is not None
        return self._completion

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> TextChunk:
        call = self._call
        if call is None:
            raise StopIteration
        output = call.outputs[0]
        try:
            while True:
                call.wait(all_ended=False)
                for _, text in call.take():
                    if output.finish_reason is not None:
                        call.raise_failure(0)
                        self.close()
                        return output.chunk(text, self._completion)
                    if text:
                        return output.chunk(text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the generation if it has not ended."""
        call, self._call = self._call, None
        if call is None:
            return
        call.cancel()
        self._completion = call.completion(0)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._completion)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Where Python ends, what closing needs may be gone.
        if getattr(self, "_call", None) is not None and not sys.is_finalizing():
            self.close()


def output_of(job: Job, tokenizer: Tokenizer | None) -> Output:
    """The empty output of a job."""
    if tokenizer is None and job.sampling.stop:
        raise TokenizerError(
            "[generate] stop strings need a tokenizer and this model has none; use stop_token_ids"
        )
    detokenizer = None
    if tokenizer is not None:
        detokenizer = tokenizer.detokenizer(job.tokens if job.seeded_text else ())
    stops = tuple(job.sampling.stop or ())
    return Output(
        assembler=TextAssembler(detokenizer, stops),
        prompt_tokens=len(job.tokens),
        seed=job.sampling.seed or 0,
        tokenizer=tokenizer,
        with_logprobs=job.sampling.logprobs is not None,
    )
