"""An engine that is at work calls Python back: what may be called from there, and what waits."""

from __future__ import annotations

import functools
import gc
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helm
from helm import _helm

STORY = "Once upon a time there was a little dog who lived near the sea with a girl. "
PATIENCE_S = 60


def in_time(work: Callable[[], None]) -> None:
    """Runs `work` in a thread, which may hang without holding up the others."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.fixture
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(context=256, max_sequences=3) as llm:
        yield llm


def saved(llm: helm.LLM, path: Path, listener: Callable[[], Any]) -> None:
    """Saves what is kept of STORY, with calls of `listener` while the engine is at work."""
    llm.generate(STORY, max_tokens=40, ignore_eos=True)
    calls = []

    def progress(_done: int, _total: int) -> None:
        calls.append(listener())

    llm.save_kv(path, progress=progress)
    assert calls


@pytest.mark.parametrize("way", ["close", "drop", "collect"])
def test_a_stream_may_end_in_a_callback(llm: helm.LLM, tmp_path: Path, way: str) -> None:
    streams: list[Any] = [llm.stream(STORY + word, max_tokens=90) for word in ("One", "She")]
    for stream in streams:
        next(stream)
    del stream
    if way == "collect":
        streams.append(streams)
        streams = [None]

    def end() -> None:
        if way == "close":
            for stream in streams:
                stream.close()
                assert stream.completion.finish_reason == "cancelled"
        streams.clear()
        gc.collect()

    gc.disable()
    try:
        in_time(lambda: saved(llm, tmp_path / "a.kv", end))
    finally:
        gc.enable()
    # Their sequences are back: as many run as ever.
    prompts = [f"{word} went home" for word in ("The dog", "Lily", "Ben")]
    in_time(lambda: llm.generate(prompts, max_tokens=200, ignore_eos=True))


def test_what_needs_the_engine_is_refused_and_what_reads_it_is_not(
    llm: helm.LLM, tmp_path: Path
) -> None:
    def listener() -> None:
        with pytest.raises(helm.InvalidError, match="called from a callback of the same engine"):
            llm.generate("The dog", max_tokens=3)
        with pytest.raises(helm.InvalidError, match="called from a callback"):
            llm.stream("The dog")
        with pytest.raises(helm.InvalidError, match="called from a callback"):
            llm.save_kv(tmp_path / "b.kv")
        assert llm.stats["threads"] > 0

    in_time(lambda: saved(llm, tmp_path / "a.kv", listener))
    assert len(llm.generate("The dog", max_tokens=3).tokens) == 3


def test_ctrl_c_ends_loading_that_nobody_listens_to() -> None:
    with helm.LLM(context=64) as llm:
        load = functools.partial(_helm.Engine, llm.plan.to_json(), str(llm.folder))
    results: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        # One after the other without a step of Python's between them, which would see the signal.
        results.extend(map(functools.partial.__call__, [functools.partial(interrupt_main), load]))
    assert len(results) == 1
