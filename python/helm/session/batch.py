"""Drives one native generation and assembles its outputs; knows nothing of prompts' text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from helm.errors import TokenizerError
from helm.text.completion import Completion, Output, TextChunk, Timings
from helm.text.prompts import Job
from helm.text.stop_strings import TextAssembler
from helm.text.tokenizer import Tokenizer

ADVANCE_S = 0.05  # how long native code runs between two chances for Ctrl-C


class Batch:
    """Jobs generating together. `advance` gives the text pieces as they come; `cancel` ends it."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Tokenizer | None,
        jobs: Sequence[Job],
        prefixes: Any = None,
    ) -> None:
        from helm import _helm

        self.outputs = [_output(job, tokenizer) for job in jobs]
        requests = [_request(_helm, job) for job in jobs]
        self._generation = _helm.Generation(engine, requests, prefixes)

    @property
    def done(self) -> bool:
        """Whether every job has ended."""
        return bool(self._generation.done)

    def advance(self, seconds: float) -> Iterator[tuple[int, str]]:
        """Runs steps for about `seconds`, at least one; (job, text) for every token sampled.

        A job that fails alone, in the runtime or in what is made of its tokens, ends alone.
        """
        for token in self._generation.advance(seconds):
            output = self.outputs[token.request]
            if output.finish_reason is not None:
                continue
            text = ""
            try:
                if token.finish == "error":
                    self._generation.rethrow(token.request)
                text = output.add(token)
            except Exception as error:
                output.fail(error)
            if output.finish_reason is not None and not token.finish:
                self._generation.cancel(token.request)  # a stop string, or a failure here
            yield token.request, text

    def raise_failure(self, job: int) -> None:
        """Raises what the job failed with, if it did."""
        failure = self.outputs[job].failure
        if failure is not None:
            raise failure

    def completion(self, job: int) -> Completion:
        """One job's result so far."""
        timings = Timings.from_native(self._generation.timings(job))
        return self.outputs[job].completion(timings)

    def cancel(self, places: Iterable[int] | None = None) -> None:
        """Ends what has not ended, of all jobs or of some; sequences opened by the generation are
        given back."""
        for index in range(len(self.outputs)) if places is None else places:
            output = self.outputs[index]
            if output.finish_reason is None:
                self._generation.cancel(index)
                try:
                    output.cancel()
                except Exception as error:
                    output.fail(error)


class TextStream:
    """An iterator over the TextChunks of one generation.

    Closing it early (`close`, leaving a `with` block, or dropping it) ends the generation at once.
    """

    def __init__(self, batch: Batch, on_close: Callable[[Completion], None] | None = None) -> None:
        self._batch: Batch | None = batch
        self._on_close = on_close
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """The result so far; after `close` or the last chunk, the final one."""
        if self._batch is not None:
            return self._batch.completion(0)
        assert self._completion is not None
        return self._completion

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> TextChunk:
        batch = self._batch
        if batch is None:
            raise StopIteration
        output = batch.outputs[0]
        try:
            while True:
                # One step per call: each token is delivered when it exists.
                pieces = list(batch.advance(0.0))
                text = "".join(piece for _, piece in pieces)
                if output.finish_reason is not None:
                    batch.raise_failure(0)
                    self.close()
                    return output.chunk(text, self._completion)
                if text:
                    return output.chunk(text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the generation if it has not ended."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        batch.cancel()
        self._completion = batch.completion(0)
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
        # Where Python ends, another thread may have ended with a lock that closing takes.
        if getattr(self, "_batch", None) is not None and not sys.is_finalizing():
            self.close()


def _output(job: Job, tokenizer: Tokenizer | None) -> Output:
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


def _request(native: Any, job: Job) -> Any:
    sampling = job.sampling
    return native.Request(
        prompt=job.tokens,
        cached=job.cached,
        sequence=job.sequence,
        max_tokens=job.max_tokens,
        stop_tokens=job.stop_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=list((sampling.logit_bias or {}).items()),
        constraint=None if job.constraint is None else job.constraint.start(),
    )
