"""The choices of one request while they are computed: text from tokens, limits, cancelling. Knows
no shapes of responses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from helm.errors import HelmError
from helm.serve.admission import Ticket
from helm.serve.errors import ApiError
from helm.serve.serving import Record, Serving
from helm.session.requests import EngineRequest, StepOutput
from helm.text.prompts import Job
from helm.text.stop_strings import TextAssembler

Logprob = tuple[float, list[tuple[int, float]]]
_LOOK_S = 10.0  # between two looks at whether nothing came: proxies close such connections


@dataclass(frozen=True)
class Asked:
    """One choice. after: the choice of the same prompt whose first token it awaits, so that the
    prompt is computed once. shown: special tokens that its text has."""

    job: Job
    after: int | None = None
    shown: frozenset[int] = frozenset()


@dataclass
class Part:
    """What came of one choice. logprobs: of each token; empty unless asked for."""

    choice: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, later: Part) -> None:
        """Takes what came next of the same choice."""
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish = later.finish


def choices_of(
    job: Job, count: int, first: int, shown: frozenset[int] = frozenset()
) -> list[Asked]:
    """`count` choices for a prompt; each draws by a seed of its own. first: number of the first."""
    seed = job.sampling.seed or 0
    return [
        Asked(
            dataclasses.replace(
                job, sampling=dataclasses.replace(job.sampling, seed=(seed + i) % 2**64)
            ),
            first if i else None,
            shown,
        )
        for i in range(count)
    ]


class Generation:
    """Computes choices; `parts` gives what came, as it comes. Closing it cancels them. streamed:
    whether the client reads it then."""

    def __init__(
        self, serving: Serving, asked: Sequence[Asked], record: Record, streamed: bool
    ) -> None:
        self._serving = serving
        self._asked = asked
        self._record = record
        self._streamed = streamed
        self._queue: asyncio.Queue[Part | Exception | None] = asyncio.Queue()  # None: a look
        self._quiet = False  # since the last look
        self._ends = asyncio.Event()  # set with what is the last of a choice
        self._due_s = 0.0  # when the next parts may be taken
        self._begun = [asyncio.Event() for _ in asked]
        record.prompt_tokens = sum(len(a.job.tokens) for a in asked if a.after is None)

    async def parts(self) -> AsyncGenerator[list[Part], None]:
        """Non-empty lists with one part of a choice, but for an empty one where nothing came for
        some 10 s of computing. Raises what a choice failed with; the others end then."""
        self._serving.admission.check(len(self._asked))
        tasks = [asyncio.create_task(self._run(i)) for i in range(len(self._asked))]
        left = len(tasks)
        looks = asyncio.create_task(self._look())
        try:
            while left:
                found = await self._take()
                left -= sum(part.finish is not None for part in found)
                yield found
        finally:
            for task in (*tasks, looks):
                task.cancel()
            await asyncio.gather(*tasks, looks, return_exceptions=True)

    async def _take(self) -> list[Part]:
        """What has come, once something has; after some time since the last where that is asked."""
        queue, found = self._queue, dict[int, Part]()
        self._take_item(await queue.get(), found)
        interval_s = self._serving.sse_interval_s
        wait_s = self._due_s - _now() if interval_s > 0 and found else 0.0
        if wait_s > 0 and not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ends.wait()
        self._ends.clear()
        while not queue.empty():
            self._take_item(queue.get_nowait(), found)
        self._due_s = _now() + interval_s
        return list(found.values())

    def _take_item(self, item: Part | Exception | None, found: dict[int, Part]) -> None:
        if isinstance(item, Exception):
            raise item
        if item is None:
            return
        self._quiet = False
        if item.choice in found:
            found[item.choice].add(item)
        else:
            found[item.choice] = item

    def _put(self, item: Part | Exception) -> None:
        self._queue.put_nowait(item)
        if isinstance(item, Exception) or item.finish is not None:
            self._ends.set()

    async def _look(self) -> None:
        """Says now and then that nothing has come."""
        while True:
            self._quiet = True
            await asyncio.sleep(_LOOK_S)
            # Who waits for a place may still be refused: with a status, if nothing was sent.
            if self._quiet and self._record.queue_s is not None:
                self._queue.put_nowait(None)

    async def _run(self, choice: int) -> None:
        asked = self._asked[choice]
        job, record = asked.job, self._record
        try:
            if asked.after is not None:
                await self._begun[asked.after].wait()
            admission = self._serving.admission
            tokens, priority = len(job.tokens), job.sampling.priority
            async with admission.place(record.client, tokens, job.max_tokens, priority) as ticket:
                if record.queue_s is None:
                    record.queue_s = _now() - record.begun_s
                    self._serving.metrics.queue.add(record.queue_s)
                await self._compute(choice, asked, ticket)
        except Exception as error:
            self._put(error)
        finally:
            self._begun[choice].set()

    async def _compute(self, choice: int, asked: Asked, ticket: Ticket) -> None:
        serving, job = self._serving, asked.job
        request = EngineRequest(
            job.tokens,
            job.max_tokens,
            dataclasses.replace(job.sampling, stop=()),
            tuple(job.stop_tokens),
            self._record.client,
            job.constraint,
            self._streamed,
        )
        text = self._text(asked)
        stream = serving.backend.submit(request)
        count, last, finish = 0, _now(), None
        try:
            async with asyncio.timeout_at(self._record.begun_s + serving.request_timeout_s):
                async for step in stream:
                    part = _assembled(choice, step, text, job.sampling.logprobs is not None)
                    now = _now()
                    self._note(now - last, count)
                    self._begun[choice].set()
                    last, count, finish = now, count + len(part.tokens), part.finish
                    self._record.output_tokens += len(part.tokens)
                    if finish is not None:
                        break
                    if part.text or part.tokens:
                        self._put(part)
        except TimeoutError:
            self._record.timed_out = True
            part, finish = Part(choice, text.flush(), finish="length"), "length"
        finally:
            stream.cancel()
            serving.admission.ended(ticket, stream.timings, count)
            self._ended(choice, dict(stream.timings), count, finish or "cancelled")
        if finish is None:
            raise ApiError(500, "the engine ended the request without a reason")
        self._put(part)

    def _text(self, asked: Asked) -> TextAssembler:
        tokenizer, job = self._serving.backend.tokenizer, asked.job
        detokenizer = None
        if tokenizer is not None:
            prompt = job.tokens if job.seeded_text else ()
            detokenizer = tokenizer.detokenizer(prompt, asked.shown)
        return TextAssembler(detokenizer, tuple(job.sampling.stop or ()))

    def _note(self, since_s: float, tokens: int) -> None:
        metrics, record = self._serving.metrics, self._record
        if tokens:
            metrics.between_tokens.add(since_s)
        elif record.first_s is None:
            record.first_s = _now() - record.begun_s
            metrics.first_token.add(record.first_s)

    def _ended(self, choice: int, timings: dict[str, float], count: int, finish: str) -> None:
        record, metrics = self._record, self._serving.metrics
        record.timings, record.finish = timings, finish
        if self._asked[choice].after is None:
            record.cached_tokens += int(timings.get("cached_tokens", 0))
            metrics.cached_tokens += int(timings.get("cached_tokens", 0))
            metrics.prompt_tokens += len(self._asked[choice].job.tokens)
        metrics.generated_tokens += count
        metrics.finished[finish] = metrics.finished.get(finish, 0) + 1
        self._begun[choice].set()


def _assembled(choice: int, step: StepOutput, text: TextAssembler, logprobs: bool) -> Part:
    """The part that a step of the engine makes."""
    if step.finish == "error" or step.error is not None:
        raise step.error or HelmError("[serve] the engine failed at this request")
    part = Part(choice, "")
    for place, token in enumerate(step.tokens):
        ends = step.finish == "stop" and place == len(step.tokens) - 1
        part.text += text.push(token, shown=not ends)
        part.tokens.append(token)
        if logprobs and step.logprobs is not None:
            part.logprobs.append(step.logprobs[place])
        if text.stopped:
            part.finish = "stop"
            return part
    if step.finish is not None:
        part.text += text.flush()
        part.finish = "stop" if text.stopped else step.finish
    return part


def _now() -> float:
    return asyncio.get_running_loop().time()
