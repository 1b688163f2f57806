"""Threads that call one LLM: they share steps, and none sees another's failure."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import helm
from helm.session import shared_calls

PROMPT = "Once upon a time"
PROMPTS = [f"{PROMPT} there was a {animal}" for animal in ("dog", "cat", "bird", "fish")]


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(kv_dtype="f32", threads=1, prefix_cache=False) as model:
        yield model


def together(*calls: Callable[[], Any], begun: threading.Event | None = None) -> list[Any]:
    """What each call returns or raises, each in a thread of its own. begun: all but the first call
    start after it."""
    results: list[Any] = [None] * len(calls)

    def work(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for place, thread in enumerate(threads):
        if begun is not None and place == 1:
            assert begun.wait(30)
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def generating(llm: helm.LLM, prompt: Any, **options: Any) -> Callable[[], Any]:
    return lambda: llm.generate(prompt, ignore_eos=True, **options)


class Batches:
    """Counts the jobs of every batch. The first one sets `begun`, then waits until so many calls
    wait behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: helm.LLM, behind: int) -> None:
        self.jobs: list[int] = []
        self.begun = threading.Event()
        original = shared_calls.Batch

        def batch(engine: Any, tokenizer: Any, jobs: Any, prefixes: Any) -> Any:
            if not self.begun.is_set():
                self.begun.set()
                deadline = time.monotonic() + 30
                while len(llm._calls._waiting) < behind:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            self.jobs.append(len(jobs))
            return original(engine, tokenizer, jobs, prefixes)

        monkeypatch.setattr(shared_calls, "Batch", batch)


def test_calls_that_wait_run_as_one_batch_with_the_results_of_each_alone(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [{"max_tokens": 12 + 7 * i, "temperature": 0.8, "seed": i} for i in range(4)]
    calls = [generating(llm, p, **o) for p, o in zip(PROMPTS, options, strict=True)]
    calls.append(generating(llm, PROMPTS[:2], max_tokens=9))
    expected = [call() for call in calls]
    batches = Batches(monkeypatch, llm, behind=4)
    found = together(*calls, begun=batches.begun)
    assert batches.jobs == [1, 5]
    for ours, theirs in zip(found[:4], expected[:4], strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
    assert [c.tokens for c in found[4]] == [c.tokens for c in expected[4]]


def test_a_call_that_cannot_start_fails_alone(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = generating(llm, PROMPT, max_tokens=10)
    expected = good().tokens
    batches = Batches(monkeypatch, llm, behind=3)

    def bad() -> Any:
        jobs = [llm._prompts.job(PROMPT, None, helm.SamplingParams(max_tokens=5))]
        object.__setattr__(jobs[0], "tokens", [llm.vocab_size + 1])
        return llm._calls.run(jobs)

    found = together(good, good, bad, good, begun=batches.begun)
    assert isinstance(found[2], helm.InvalidError)
    assert [found[i].tokens for i in (0, 1, 3)] == [expected] * 3
    assert batches.jobs[:3] == [1, 3, 1]
    assert good().tokens == expected


def test_a_short_call_does_not_wait_for_the_long_ones_it_runs_with(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def call(name: str, tokens: int) -> Callable[[], Any]:
        def work() -> None:
            llm.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
            ended.append(name)

        return work

    calls = shared_calls.SharedCalls
    begin, advance = calls._begin, calls._advance

    def begin_with_all(self: Any, first: Any) -> None:
        deadline = time.monotonic() + 30
        while not ended and len(self._waiting) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        begin(self, first)

    def advance_slowly(self: Any) -> None:
        """A fast machine would end all calls within one advance, before a thread wakes up."""
        time.sleep(0.001)
        advance(self)

    monkeypatch.setattr(shared_calls, "ADVANCE_S", 0.0)
    monkeypatch.setattr(calls, "_begin", begin_with_all)
    monkeypatch.setattr(calls, "_advance", advance_slowly)
    together(call("long", 400), call("long", 400), call("short", 2), call("short", 2))
    assert ended.index("short") <= 1
    assert ended[-1] == "long"


def _generate_for_ever(llm: helm.LLM) -> None:
    while True:
        llm.generate(PROMPT, max_tokens=None, ignore_eos=True)


def test_calls_that_come_during_a_batch_are_the_next_one(llm: helm.LLM) -> None:
    """Whoever drives then, its call may not be in the batch that it drives."""
    expected = [generating(llm, prompt, max_tokens=12)().tokens for prompt in PROMPTS]

    def many(place: int) -> Callable[[], Any]:
        mine = [PROMPTS[(place + i) % 4] for i in range(20)]
        return lambda: [generating(llm, prompt, max_tokens=12)().tokens for prompt in mine]

    for place, found in enumerate(together(*(many(place) for place in range(4)))):
        assert found == [expected[(place + i) % 4] for i in range(20)]


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_ends_the_main_thread_s_call_and_no_other(llm: helm.LLM, delay_s: float) -> None:
    call = generating(llm, PROMPTS[1], max_tokens=150)
    expected = call().tokens
    results: list[list[int]] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            results.append(call().tokens)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(delay_s, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _generate_for_ever(llm)
    finally:
        stop.set()
        timer.join()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert results
    assert all(tokens == expected for tokens in results)
    with llm.stream(PROMPT, max_tokens=2) as stream:  # nothing is held
        assert len(list(stream)) >= 1


def test_a_thread_with_a_stream_of_its_own_may_call_too() -> None:
    """Who waits in a call holds pages that another call may need: one is told, nobody hangs."""
    with helm.LLM(context=64, max_sequences=2, threads=1, prefix_cache=False) as small:

        def both() -> Any:
            with small.stream(PROMPT, ignore_eos=True) as stream:
                next(stream)
                return small.generate(PROMPT, max_tokens=5, ignore_eos=True)

        found = together(both, both, both)
        assert all(isinstance(r, (helm.Completion, helm.CapacityError)) for r in found)
        assert any(isinstance(r, helm.Completion) for r in found)
        assert len(small.generate(PROMPT, max_tokens=3, ignore_eos=True).tokens) == 3


def test_closing_ends_waiting_calls() -> None:
    small = helm.LLM(threads=1)
    timer = threading.Timer(0.1, small.close)
    timer.start()
    calls = [generating(small, PROMPT, max_tokens=400) for _ in range(4)]
    found = together(*(lambda call=call: [call() for _ in range(50)] for call in calls))
    timer.join()
    assert all(isinstance(r, helm.InvalidError) and "is closed" in str(r) for r in found)


def test_threads_are_no_slower_than_their_calls_in_turn(llm: helm.LLM) -> None:
    """Together they share steps; the bound allows for what else the machine does."""
    calls = [generating(llm, prompt, max_tokens=100) for prompt in PROMPTS]

    def seconds(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    in_turn, threads = [], []
    for _ in range(5):
        in_turn.append(seconds(lambda: [call() for call in calls]))
        threads.append(seconds(lambda: together(*calls)))
    assert min(threads) <= 1.25 * min(in_turn)
