"""AsyncLLM: tasks share steps, cancelled ones end, and tokens are those of an LLM."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import helm
from helm.session.requests import EngineRequest

PROMPT = "Once upon a time"
PROMPTS = [f"{PROMPT} there was a {animal}" for animal in ("dog", "cat", "bird", "fish")]
SAMPLED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain() -> Iterator[helm.LLM]:
    with helm.LLM(threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.AsyncLLM]:
    model = helm.AsyncLLM(threads=1)
    yield model
    model.close()


def request_of(llm: helm.AsyncLLM, prompt: str = PROMPT, **options: Any) -> EngineRequest:
    job = llm.prompts.job(prompt, None, helm.SamplingParams(**{**SAMPLED, **options}))
    return EngineRequest(job.tokens, job.max_tokens, job.sampling, tuple(job.stop_tokens))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_tasks_that_begin_together_share_their_first_step(llm: helm.AsyncLLM) -> None:
    async def one(prompt: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        async for _ in llm.submit(request_of(llm, prompt, max_tokens=12)):
            pass

    async def work() -> None:
        before = llm.stats()["steps"]
        prompts = ["One", "Two", "Three", "Four"]
        await asyncio.gather(*(one(prompt, i) for i, prompt in enumerate(prompts)))
        assert llm.stats()["steps"] - before == 12

    asyncio.run(work())


def test_results_are_those_of_an_llm(llm: helm.AsyncLLM, plain: helm.LLM) -> None:
    async def work() -> None:
        one = await llm.generate(PROMPT, logprobs=2, **SAMPLED)
        want = plain.generate(PROMPT, logprobs=2, **SAMPLED)
        assert (one.text, one.tokens, one.logprobs) == (want.text, want.tokens, want.logprobs)
        assert one.timings.decode_tokens == 39
        many = await llm.generate(PROMPTS, **SAMPLED)
        assert [c.tokens for c in many] == [c.tokens for c in plain.generate(PROMPTS, **SAMPLED)]
        chunks = [chunk async for chunk in llm.stream(PROMPT, stop=["."], **SAMPLED)]
        whole = plain.generate(PROMPT, stop=["."], **SAMPLED)
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert chunks[-1].finish_reason == whole.finish_reason == "stop"
        talk = [{"role": "user", "content": "Hello"}]
        answer = await llm.chat(talk, max_tokens=12, temperature=0)
        assert answer.text == plain.chat(talk, max_tokens=12, temperature=0).text

    asyncio.run(work())
    asyncio.run(work())  # another loop


def test_tasks_share_steps(llm: helm.AsyncLLM, plain: helm.LLM) -> None:
    async def work() -> list[list[int]]:
        before = llm.stats()["steps"]
        streams = [llm.submit(request_of(llm, prompt)) for prompt in PROMPTS]

        async def tokens(stream: Any) -> list[int]:
            return [token async for output in stream for token in output.tokens]

        found = await asyncio.gather(*map(tokens, streams))
        assert llm.stats()["steps"] - before < 2 * 40
        assert llm.stats()["running"] == 0
        for stream in streams:
            assert stream.timings["decode_tokens"] == 39
            assert stream.timings["prefill_tokens"] + stream.timings["cached_tokens"] > 0
        return found

    assert asyncio.run(work()) == [c.tokens for c in plain.generate(PROMPTS, **SAMPLED)]


@pytest.mark.parametrize("way", ["break", "aclose", "task", "drop", "cancel"])
def test_who_leaves_early_ends_the_generation(llm: helm.AsyncLLM, way: str) -> None:
    async def work() -> None:
        before = llm.stats()["tokens"]
        options = {**SAMPLED, "max_tokens": 400}
        if way == "cancel":
            stream = llm.submit(request_of(llm, max_tokens=400))
            first = await anext(stream)
            assert len(first.tokens) >= 1
            stream.cancel()
            stream.cancel()
            assert [output async for output in stream] == []
        elif way == "task":
            task = asyncio.ensure_future(llm.generate([PROMPT] * 3, **options))
            await until(lambda: llm.stats()["running"] > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            text = llm.stream(PROMPT, **options)
            async for _ in text:
                break
            if way == "aclose":
                await text.aclose()
                assert text.completion.finish_reason == "cancelled"
            del text
        await until(lambda: llm.stats()["running"] == 0)
        assert llm.stats()["tokens"] - before < 3 * 400

    asyncio.run(work())


def test_bad_requests_are_refused_and_failures_told(llm: helm.AsyncLLM) -> None:
    async def work() -> None:
        good = request_of(llm)
        for tokens, error in (([], helm.InvalidError), ([10**6], helm.InvalidError)):
            with pytest.raises(error):
                llm.submit(EngineRequest(tokens, 5, good.sampling, ()))
        with pytest.raises(helm.CapacityError):
            llm.submit(EngineRequest([1] * (llm.context + 1), 5, good.sampling, ()))
        with pytest.raises(helm.InvalidError, match="constraint"):
            llm.submit(EngineRequest([1], 5, good.sampling, (), constraint=object()))
        with pytest.raises(helm.InvalidError):
            await llm.generate([])
        assert llm.failure is None
        assert len((await llm.generate(PROMPT, **SAMPLED)).tokens) == 40

    asyncio.run(work())


def test_draining_lets_end_what_runs_and_closing_ends_it() -> None:
    async def drained(llm: helm.AsyncLLM) -> None:
        stream = llm.submit(request_of(llm))
        await llm.drain(30.0)
        with pytest.raises(helm.InvalidError, match="stopping"):
            llm.submit(request_of(llm))
        assert sum([len(output.tokens) async for output in stream]) == 40

    async def closed(llm: helm.AsyncLLM) -> None:
        stream = llm.submit(request_of(llm, max_tokens=400))
        await anext(stream)
        llm.close()
        outputs = [output async for output in stream]
        assert outputs[-1].finish == "error"
        assert "stopped" in str(outputs[-1].error)
        with pytest.raises(helm.InvalidError, match="closed"):
            llm.submit(request_of(llm))

    for work in (drained, closed):
        model = helm.AsyncLLM(threads=1)
        asyncio.run(work(model))
        model.close()


def test_loops_of_several_threads_share_one_model(llm: helm.AsyncLLM, plain: helm.LLM) -> None:
    want = plain.generate(PROMPT, **SAMPLED).tokens
    found: list[Any] = []

    def work() -> None:
        async def many() -> None:
            results: list[Awaitable[Any]] = [llm.generate(PROMPT, **SAMPLED) for _ in range(4)]
            found.extend(result.tokens for result in await asyncio.gather(*results))

        asyncio.run(many())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [want] * 12
