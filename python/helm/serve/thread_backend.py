"""A backend over one LLM: a thread per request, which steps for itself. Knows no HTTP."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from helm.errors import HelmError
from helm.session.requests import EngineRequest, StepOutput
from helm.text.prompts import Job

if TYPE_CHECKING:
    from helm.session.llm import LLM

Scored = tuple[float, list[tuple[int, float]]]


class ThreadStream:
    """One request; `_work` runs on its thread."""

    def __init__(self, llm: LLM, request: EngineRequest, done: Any) -> None:
        self.timings: dict[str, float] = {}
        self._llm = llm
        self._request = request
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._ended = False
        threading.Thread(target=self._work, name="helm-request", daemon=True).start()

    def __aiter__(self) -> ThreadStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self._queue.get()
        self._ended = output.finish is not None
        return output

    def cancel(self) -> None:
        """Ends it within a step."""
        self._cancelled.set()
        self._ended = True

    def _work(self) -> None:
        request = self._request
        job = Job(
            request.tokens,
            request.sampling,
            request.max_tokens,
            list(request.stop_tokens),
            constraint=request.constraint,  # type: ignore[arg-type]
        )
        try:
            with self._llm._stream(job) as stream:
                for chunk in stream:
                    if self._cancelled.is_set():
                        break
                    found = None
                    if chunk.logprobs is not None:
                        found = [(r["logprob"], _likeliest(r)) for r in chunk.logprobs]
                    if chunk.completion is not None:
                        self._time(chunk.completion.timings.to_dict())
                    self._give(StepOutput(chunk.tokens, found, chunk.finish_reason))
        except HelmError as error:
            self._give(StepOutput(finish="error", error=error))
        except Exception as error:
            self._give(StepOutput(finish="error", error=HelmError(f"[serve] {error!r}")))
        finally:
            self._done(self)

    def _time(self, timings: dict[str, float]) -> None:
        prompt = len(self._request.tokens)
        self.timings = {**timings, "cached_tokens": prompt - timings["prefill_tokens"]}

    def _give(self, output: StepOutput) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)


class ThreadBackend:
    """`Backend` and `ScoringBackend` of an open LLM, which it closes."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._open: set[ThreadStream] = set()
        self.name = llm.name
        self.tokenizer = llm.tokenizer
        self.prompts = llm._prompts
        self.context = llm.context
        self.vocab_size = llm.vocab_size
        self.concurrency = llm.plan.limits.sequences
        self.failure: HelmError | None = None

    def submit(self, request: EngineRequest) -> ThreadStream:
        """Starts a request."""
        stream = ThreadStream(self._llm, request, self._open.discard)
        self._open.add(stream)
        return stream

    def stats(self) -> dict[str, float]:
        """How many run."""
        return {"running": len(self._open), "waiting": 0}

    async def drain(self, grace_s: float) -> None:
        """Waits until nothing runs."""
        end = asyncio.get_running_loop().time() + grace_s
        while self._open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Frees the model."""
        for stream in list(self._open):
            stream.cancel()
        self._llm.close()

    async def score(self, tokens: list[int], top: int) -> list[Scored | None]:
        """See `ScoringBackend`."""
        return await asyncio.to_thread(self._score, tokens, top)

    def _score(self, tokens: list[int], top: int) -> list[Scored | None]:
        import numpy

        rows = self._llm.logits(tokens)
        found: list[Scored | None] = [None]
        for row, token in zip(rows[:-1], tokens[1:], strict=True):
            high = row.max()
            logs = row - high - numpy.log(numpy.exp(row - high, dtype=numpy.float64).sum())
            best = numpy.argsort(-logs, kind="stable")[:top]
            found.append((float(logs[token]), [(int(i), float(logs[i])) for i in best]))
        return found


def _likeliest(record: dict[str, Any]) -> list[tuple[int, float]]:
    return [(entry["token_id"], entry["logprob"]) for entry in record["top_logprobs"]]
