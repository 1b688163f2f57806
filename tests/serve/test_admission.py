"""Who is computed and who is sent away, on a clock that only counts: two minutes take none."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from helm.serve.admission import Admission
from helm.serve.errors import ApiError

PLACES = 8


class _Clock(selectors.SelectSelector):
    """Waits by counting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += max(timeout or 0.0, 0.0)
        return []


def on_a_clock(work: Coroutine[Any, Any, Any]) -> Any:
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Overload:
    """Requests come as they like; a token takes as long as it does where all places are taken."""

    def __init__(self, seed: int, slower: float = 1.0) -> None:
        self.admission = Admission(PLACES, queue_timeout_s=60.0)
        self.draws = random.Random(seed)
        self.slower = slower  # than what is measured
        self.waits: list[float] = []
        self.tries: list[int] = []
        self.retry_s: list[int] = []

    async def client(self) -> None:
        loop = asyncio.get_running_loop()
        prompt, output = self.draws.randint(4, 120), self.draws.randint(4, 120)
        came = loop.time()
        for count in range(1, 6):
            try:
                self.admission.check()
                async with self.admission.place(0, prompt, output) as ticket:
                    prefill_s, decode_s = 0.01 * prompt, 0.08 * output
                    await asyncio.sleep((prefill_s + decode_s) * self.slower)
                    timings = {
                        "prefill_tokens": prompt, "prefill_s": prefill_s,
                        "decode_tokens": output, "decode_s": decode_s,
                    }  # fmt: skip
                    self.admission.ended(ticket, timings, output)
            except ApiError as error:
                self.retry_s.append(int(error.headers["retry-after"]))
                await asyncio.sleep(self.retry_s[-1])
            else:
                self.tries.append(count)
                self.waits.append(loop.time() - came)
                return

    async def run(self, rate: float, seconds: float, shape: float) -> int:
        """How many came."""
        tasks, end = [], asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            tasks.append(asyncio.create_task(self.client()))
            await asyncio.sleep(self.draws.gammavariate(shape, 1 / (rate * shape)))
        await asyncio.gather(*tasks)
        return len(tasks)


@pytest.mark.parametrize("shape", [1.0, 0.25], ids=["poisson", "bursts"])
@pytest.mark.parametrize("slower", [1.0, 1.6], ids=["as measured", "slower"])
def test_at_twice_the_load_who_tries_again_when_told_is_answered(
    shape: float, slower: float
) -> None:
    mean_s = (62 * 0.01 + 62 * 0.08) * slower
    sent_away = 0
    for seed in range(3):
        overload = Overload(seed, slower)
        came = on_a_clock(overload.run(2 * PLACES / mean_s, 90.0, shape))
        good = sum(wait <= 240 for wait in overload.waits)
        assert good >= 0.95 * came, (good, came, overload.tries)
        sent_away += len(overload.retry_s)
        assert overload.admission.waiting == len(overload.admission.running) == 0
    assert sent_away > 0


def test_a_wait_is_told_by_what_others_took_and_waited() -> None:
    async def scene() -> tuple[float, float]:
        overload = Overload(1, slower=2.0)
        admission = overload.admission
        await asyncio.gather(*(overload.client() for _ in range(PLACES)))  # measures
        tasks = [asyncio.create_task(overload.client()) for _ in range(4 * PLACES)]
        while admission.waiting > PLACES:
            await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        told, begin = admission.wait_s(), loop.time()
        async with admission.place(0, 1, 1):
            waited = loop.time() - begin
        await asyncio.gather(*tasks)
        return told, waited

    told, waited = on_a_clock(scene())
    assert 0.6 * waited <= told <= 1.6 * waited


def test_small_requests_beside_long_ones_do_not_make_waits_look_long() -> None:
    """Prompts are computed one after the other, so that a short one may take as long as a long one:
    its seconds per token say nothing about those of others."""

    async def scene() -> list[tuple[float, float]]:
        admission, engine, loop = Admission(PLACES), asyncio.Lock(), asyncio.get_running_loop()
        draws = random.Random(5)
        found = []

        async def one(prompt: int) -> None:
            told, came = admission.wait_s(), loop.time()
            async with admission.place(0, prompt, 2) as ticket:
                begun = loop.time()
                async with engine:
                    await asyncio.sleep(0.005 * prompt)
                timings = {"prefill_tokens": prompt, "prefill_s": loop.time() - begun}
                admission.ended(ticket, timings, 2)
            found.append((told, begun - came))

        for _ in range(2):  # the first ones only measure
            found.clear()
            await asyncio.gather(*(one(draws.choice([2, 5, 10, 460])) for _ in range(60)))
        return found

    late = [(told, waited) for told, waited in on_a_clock(scene()) if waited > 10]
    assert len(late) > 20
    for told, waited in late:
        assert 0.6 * waited <= told <= 1.4 * waited


def test_one_that_tells_nothing_does_not_make_the_waits_of_others_look_long() -> None:
    async def scene() -> float:
        admission = Admission(1, queue_timeout_s=1000.0)

        async def one(seconds: float, ends: bool = True) -> None:
            async with admission.place(0, 10, 1) as ticket:
                await asyncio.sleep(seconds)
                if ends:
                    admission.ended(ticket, {"prefill_tokens": 10, "prefill_s": seconds}, 1)

        await one(10.0)  # measures
        waiting = ((10.0,), (200.0, False), (10.0,), (10.0,))
        tasks = [asyncio.create_task(one(*how)) for how in waiting]
        await asyncio.sleep(220.5)  # the last one has begun
        told = admission.wait_s()
        await asyncio.gather(*tasks)
        return told

    assert on_a_clock(scene()) == pytest.approx(9.5, abs=1.0)


def test_who_is_sent_away_comes_again_when_half_have_gone() -> None:
    async def scene() -> tuple[float, int]:
        overload = Overload(2)
        admission = overload.admission
        await overload.client()
        tasks = [asyncio.create_task(overload.client()) for _ in range(6 * PLACES)]
        await asyncio.sleep(0)
        admission.max_waiting = 3
        told = admission.wait_s()
        with pytest.raises(ApiError) as caught:
            admission.check()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return told, int(caught.value.headers["retry-after"])

    told, retry_s = on_a_clock(scene())
    assert told > 4
    assert told / 2 < retry_s <= 0.6 * told + 2


def test_a_class_that_is_passed_over_rises_one_request_at_a_time() -> None:
    admission = Admission(1, queue_timeout_s=1000.0)
    begun: list[tuple[int, float]] = []

    async def one(priority: int) -> None:
        async with admission.place(priority, 10, 10, priority):
            begun.append((priority, asyncio.get_running_loop().time()))
            await asyncio.sleep(1.0)

    async def load() -> None:
        tasks = [asyncio.create_task(one(2))]
        await asyncio.sleep(0.5)
        tasks += [asyncio.create_task(one(0)) for _ in range(2)]
        for _ in range(150):  # a new one of the highest class always waits
            tasks.append(asyncio.create_task(one(2)))
            await asyncio.sleep(1.0)
        await asyncio.gather(*tasks)

    on_a_clock(load())
    waited = [at_s for priority, at_s in begun if priority == 0]
    assert len(begun) == 153
    assert waited[0] == pytest.approx(61.0, abs=2.0)
    assert waited[1] - waited[0] == pytest.approx(61.0, abs=2.0)
