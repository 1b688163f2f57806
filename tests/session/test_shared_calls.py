"""Threads that call one LLM: they share steps, and none sees another's failure."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import helm

PROMPT = "Once upon a time"
PROMPTS = [f"{PROMPT} there was a {animal}" for animal in ("dog", "cat", "bird", "fish")]


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(kv_dtype="f32", threads=1, prefix_cache=False) as model:
        yield model


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def work(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def generating(llm: helm.LLM, prompt: Any, **options: Any) -> Callable[[], Any]:
    return lambda: llm.generate(prompt, ignore_eos=True, **options)


def steps(llm: helm.LLM) -> int:
    assert llm._service is not None
    return llm._service.stats()["steps"]


@contextlib.contextmanager
def held(llm: helm.LLM, requests: int) -> Iterator[None]:
    """No step runs before the end of the block, and then not before so many requests wait."""
    service = llm._service
    assert service is not None
    begun, leave = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        leave.wait(30)
        deadline = time.monotonic() + 30
        while service.stats()["waiting"] < requests and time.monotonic() < deadline:
            time.sleep(0.001)

    thread = threading.Thread(target=service.exclusively, args=(hold,))
    thread.start()
    begun.wait(30)
    try:
        leave.set()
        yield
    finally:
        thread.join(60)


def test_calls_of_threads_share_steps_with_the_results_of_each_alone(llm: helm.LLM) -> None:
    options = [{"max_tokens": 12 + 7 * i, "temperature": 0.8, "seed": i} for i in range(4)]
    calls = [generating(llm, p, **o) for p, o in zip(PROMPTS, options, strict=True)]
    calls.append(generating(llm, PROMPTS[:2], max_tokens=9))
    expected = [call() for call in calls]
    before = steps(llm)
    with held(llm, requests=6):
        found = together(*calls)
    assert steps(llm) - before <= 33 + 6  # as many as the longest takes, not as all in turn
    for ours, theirs in zip(found[:4], expected[:4], strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
    assert [c.tokens for c in found[4]] == [c.tokens for c in expected[4]]


def test_streams_of_one_thread_share_steps(llm: helm.LLM) -> None:
    expected = [generating(llm, prompt, max_tokens=30)().tokens for prompt in PROMPTS]
    before = steps(llm)
    with held(llm, requests=4):
        streams = [llm.stream(prompt, max_tokens=30, ignore_eos=True) for prompt in PROMPTS]
    found = [[token for chunk in stream for token in chunk.tokens] for stream in streams]
    assert found == expected
    assert steps(llm) - before <= 30 + 4


def test_prompts_are_paced_beside_streams_alone(llm: helm.LLM) -> None:
    """The second prompt does not fit the first's step, and is computed beside its tokens."""
    service = llm._service
    assert service is not None
    prompts = [[token] * 400 for token in (5, 6)]
    assert len(prompts) * 400 > llm.plan.limits.step_tokens
    service.pace(1e-9)
    try:
        before = steps(llm)
        expected = [c.tokens for c in generating(llm, prompts, max_tokens=100)()]
        unread = steps(llm) - before
        with held(llm, requests=2):
            streams = [llm.stream(prompt, max_tokens=100, ignore_eos=True) for prompt in prompts]
        found = [[token for chunk in stream for token in chunk.tokens] for stream in streams]
    finally:
        service.pace(0)
    assert found == expected
    streamed = steps(llm) - before - unread
    assert streamed >= unread + 50  # of 72, each with four of 288 tokens of the second prompt


def test_a_call_that_cannot_start_fails_alone(llm: helm.LLM) -> None:
    good = generating(llm, PROMPT, max_tokens=10)
    expected = good().tokens

    def bad() -> Any:
        from helm.session.calls import run

        jobs = [llm._prompts.job(PROMPT, None, helm.SamplingParams(max_tokens=5)) for _ in "123"]
        object.__setattr__(jobs[2], "tokens", [llm.vocab_size + 1])
        assert llm._service is not None
        return run(llm._service, llm.tokenizer, jobs)

    found = together(good, good, bad, good)
    assert isinstance(found[2], helm.InvalidError)
    assert [found[i].tokens for i in (0, 1, 3)] == [expected] * 3
    assert llm._service is not None
    assert llm._service.stats()["running"] == 0


def test_a_short_call_does_not_wait_for_the_long_ones_it_runs_with(llm: helm.LLM) -> None:
    ended: list[str] = []

    def call(name: str, tokens: int) -> Callable[[], Any]:
        def work() -> None:
            llm.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
            ended.append(name)

        return work

    with held(llm, requests=4):
        together(call("long", 450), call("long", 450), call("short", 2), call("short", 2))
    assert ended == ["short", "short", "long", "long"]


def test_whoever_does_not_read_holds_up_nobody(llm: helm.LLM) -> None:
    """Streams go on by themselves, as many as there are."""
    unread = [llm.stream(PROMPT, max_tokens=20, ignore_eos=True) for _ in range(20)]
    assert len(generating(llm, PROMPT, max_tokens=5)().tokens) == 5
    assert [sum(len(c.tokens) for c in stream) for stream in unread] == [20] * 20


def _generate_for_ever(llm: helm.LLM) -> None:
    while True:
        llm.generate(PROMPT, max_tokens=None, ignore_eos=True)


def test_calls_come_and_go_while_others_run(llm: helm.LLM) -> None:
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


def test_an_error_in_progress_ends_its_call_and_no_other(llm: helm.LLM) -> None:
    good = generating(llm, PROMPTS[:2], max_tokens=100)
    expected = [c.tokens for c in good()]

    def progress(_done: int, _all: int) -> None:
        raise RuntimeError("mine")

    def bad() -> Any:
        from helm.session.calls import run

        jobs = [llm._prompts.job(PROMPT, None, helm.SamplingParams(max_tokens=None))]
        assert llm._service is not None
        return run(llm._service, llm.tokenizer, jobs, progress)

    found = together(good, bad)
    assert [c.tokens for c in found[0]] == expected
    assert isinstance(found[1], RuntimeError)


def test_a_thread_with_a_stream_of_its_own_may_call_too() -> None:
    """Streams go on while their threads wait in calls, so all of them end."""
    with helm.LLM(context=64, max_sequences=2, threads=1, prefix_cache=False) as small:

        def both() -> Any:
            with small.stream(PROMPT, ignore_eos=True) as stream:
                next(stream)
                return small.generate(PROMPT, max_tokens=5, ignore_eos=True)

        found = together(both, both, both)
        assert all(isinstance(result, helm.Completion) for result in found)
        assert len(small.generate(PROMPT, max_tokens=3, ignore_eos=True).tokens) == 3


def test_sequences_of_logits_wait_for_room_and_requests_for_them() -> None:
    with helm.LLM(context=64, max_sequences=1, threads=1) as small:
        ids = list(range(3, 60))
        expected = small.logits(ids)
        stream = small.stream(PROMPT, max_tokens=50, ignore_eos=True)  # has the only sequence
        assert (small.logits(ids) == expected).all()
        assert sum(len(chunk.tokens) for chunk in stream) == 50
        found = together(
            *(lambda: small.logits(ids) for _ in range(3)),
            generating(small, PROMPT, max_tokens=40),
        )
        assert all((rows == expected).all() for rows in found[:3])
        assert len(found[3].tokens) == 40
        service = small._service
        assert service is not None
        sequence, _ = service.open(64)
        with pytest.raises(helm.CapacityError):  # nobody but this thread is in the way
            service.open(64)
        service.close(sequence)


def test_closing_ends_waiting_calls() -> None:
    small = helm.LLM(threads=1)
    timer = threading.Timer(0.1, small.close)
    timer.start()
    calls = [generating(small, PROMPT, max_tokens=400) for _ in range(4)]
    found = together(*(lambda call=call: [call() for _ in range(50)] for call in calls))
    timer.join()
    assert all(isinstance(r, helm.InvalidError) and "is closed" in str(r) for r in found)


def test_streams_together_are_faster_than_in_turn(llm: helm.LLM) -> None:
    """The weights are read once for both. The bound allows for what else the machine does; a
    model of 2 MB gains little."""

    def read(count: int) -> float:
        begin = time.perf_counter()
        streams = [llm.stream(p, max_tokens=200, ignore_eos=True) for p in PROMPTS[:count]]
        assert sum(len(c.tokens) for stream in streams for c in stream) == 200 * count
        return time.perf_counter() - begin

    read(2)
    rounds = [(read(1), read(2)) for _ in range(5)]
    assert min(two for _, two in rounds) <= 2 * 1.25 * min(one for one, _ in rounds)
