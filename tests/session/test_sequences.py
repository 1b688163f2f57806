"""Admission of sequences by several threads, on a pool of positions without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from helm.errors import CapacityError, InvalidError
from helm.session.sequences import NoReuse, Sequences


class Pool:
    """The prefix cache's calls over `positions` in all; what is kept gives way."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.used: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.opened = 0

    @property
    def free(self) -> int:
        return self.positions - sum(self.used.values())

    def open(self, prompt: Sequence[int], capacity: int) -> tuple[int, int]:
        if capacity > self.free:
            raise CapacityError(f"{capacity} of {self.free}")
        while capacity > self.free - sum(self.kept.values()):
            self.kept.popitem()
        self.opened += 1
        self.used[self.opened] = capacity
        return self.opened, 0

    def fits(self, capacity: int) -> bool:
        return capacity <= self.free

    def close(self, sequence: int) -> None:
        del self.used[sequence]

    def keep(self, sequence: int, tokens: Sequence[int]) -> None:
        self.close(sequence)
        self.kept[sequence] = len(tokens)

    def load(self, _path: str, _progress: object) -> tuple[list[int], str]:
        sequence, _ = self.open([], 6)
        self.keep(sequence, [1] * 6)
        return [1] * 6, "{}"


class Worker(threading.Thread):
    """Runs `work` and keeps what it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join(20)
        assert not self.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error


def test_one_thread_is_refused_at_once() -> None:
    sequences = Sequences(Pool(10))
    held, _ = sequences.open(6)
    with pytest.raises(CapacityError):
        sequences.open(5)
    sequences.close(held)
    sequences.open(10)


def test_a_thread_waits_for_another_to_close() -> None:
    pool = Pool(10)
    sequences = Sequences(pool)
    held, _ = sequences.open(6)
    worker = Worker(lambda: sequences.close(sequences.open(5)[0]))
    time.sleep(0.05)
    assert worker.is_alive()
    sequences.close(held)
    worker.finish()
    assert pool.free == 10


def test_threads_that_wait_for_each_other_are_refused() -> None:
    sequences = Sequences(Pool(10))
    barrier = threading.Barrier(2)
    refused = []

    def work() -> None:
        first, _ = sequences.open(5)
        barrier.wait()
        try:
            sequences.close(sequences.open(5)[0])
        except CapacityError:
            refused.append(first)
        finally:
            sequences.close(first)

    workers = [Worker(work) for _ in range(2)]
    for worker in workers:
        worker.finish()
    assert len(refused) == 1


def test_a_batch_keeps_its_room() -> None:
    pool = Pool(10)
    sequences = Sequences(pool)
    with sequences.batch(10):
        worker = Worker(lambda: sequences.close(sequences.open(1)[0]))
        time.sleep(0.05)
        assert worker.is_alive()
        pool.close(pool.open([], 10)[0])  # as the native generation does by itself
    worker.finish()
    with pytest.raises(CapacityError), sequences.batch(11):
        pass
    sequences.open(10)


def test_what_is_kept_gives_way() -> None:
    pool = Pool(10)
    sequences = Sequences(pool)
    kept, _ = sequences.open(6, [1, 2, 3])
    sequences.keep(kept, [1, 2, 3, 4, 5])
    assert pool.kept == {kept: 5}
    with sequences.batch(10):
        pass
    assert pool.kept == {kept: 5}  # room is made when it is taken
    sequences.close(sequences.open(6)[0])
    assert pool.kept == {}


def test_loading_waits_for_room() -> None:
    pool = Pool(10)
    sequences = Sequences(pool)
    held, _ = sequences.open(5)
    loaded: list[int] = []
    worker = Worker(lambda: loaded.extend(sequences.load("x.kv", None)[0]))
    time.sleep(0.05)
    assert worker.is_alive()
    sequences.close(held)
    worker.finish()
    assert len(loaded) == 6


def test_a_thread_that_waited_does_not_open_during_a_batch() -> None:
    pool = Pool(10)
    sequences = Sequences(pool)
    held, _ = sequences.open(10)
    waiter = Worker(lambda: sequences.close(sequences.open(8)[0]))
    time.sleep(0.05)
    with sequences._changed:  # the batch begins before the waiter wakes
        sequences.close(held)
        batch = sequences.batch(10)
        batch.__enter__()
    time.sleep(0.05)
    assert waiter.is_alive()
    assert pool.free == 10
    batch.__exit__(None, None, None)
    waiter.finish()


def test_without_reuse_everything_is_computed() -> None:
    class Engine:
        def open(self, capacity: int) -> int:
            if capacity > 10:
                raise CapacityError("too many")
            return 7

        def close(self, sequence: int) -> None:
            closed.append(sequence)

    closed: list[int] = []
    sequences = Sequences(NoReuse(Engine()))
    assert sequences.open(10, [1, 2, 3]) == (7, 0)
    sequences.keep(7, [1, 2, 3])
    assert closed == [7]
    with pytest.raises(CapacityError), sequences.batch(11):
        pass
    for call in (lambda: sequences.save([1], "x", "", None), lambda: sequences.load("x", None)):
        with pytest.raises(InvalidError, match="prefix_cache=False"):
            call()
