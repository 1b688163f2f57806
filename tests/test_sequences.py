"""Admission of sequences by several threads, on a pool of positions without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from helm.errors import CapacityError
from helm.sequences import Sequences, common_prefix


class Pool:
    """The engine's sequence calls over `positions` in all."""

    def __init__(self, positions: int) -> None:
        self.free = positions
        self.capacities: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.opened = 0

    def open(self, capacity: int) -> int:
        if capacity > self.free:
            raise CapacityError(f"{capacity} of {self.free}")
        self.free -= capacity
        self.opened += 1
        self.capacities[self.opened] = capacity
        self.lengths[self.opened] = 0
        return self.opened

    def close(self, sequence: int) -> None:
        self.free += self.capacities.pop(sequence)

    def length(self, sequence: int) -> int:
        return self.lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        assert length <= self.lengths[sequence]
        self.lengths[sequence] = length


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
    sequences = Sequences(Pool(10), 10)
    held = sequences.open(6)
    with pytest.raises(CapacityError):
        sequences.open(5)
    sequences.close(held)
    sequences.open(10)


def test_a_thread_waits_for_another_to_close() -> None:
    pool = Pool(10)
    sequences = Sequences(pool, 10)
    held = sequences.open(6)
    worker = Worker(lambda: sequences.close(sequences.open(5)))
    time.sleep(0.05)
    assert worker.is_alive()
    sequences.close(held)
    worker.finish()
    assert pool.free == 10


def test_threads_that_wait_for_each_other_are_refused() -> None:
    sequences = Sequences(Pool(10), 10)
    barrier = threading.Barrier(2)
    refused = []

    def work() -> None:
        first = sequences.open(5)
        barrier.wait()
        try:
            sequences.close(sequences.open(5))
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
    sequences = Sequences(pool, 10)
    with sequences.batch(10):
        worker = Worker(lambda: sequences.close(sequences.open(1)))
        time.sleep(0.05)
        assert worker.is_alive()
        pool.close(pool.open(10))  # as the native generation does by itself
    worker.finish()
    with pytest.raises(CapacityError), sequences.batch(11):
        pass
    sequences.open(10)


def test_an_idle_conversation_gives_way() -> None:
    pool = Pool(10)
    sequences = Sequences(pool, 10)
    kept = sequences.lease_chat([1, 2, 3], 5)
    assert kept.capacity == 10  # the whole context, as it was free
    pool.lengths[kept.sequence] = 4
    sequences.settle(kept, [1, 2, 3, 4, 5])
    assert kept.tokens == [1, 2, 3, 4]
    with sequences.batch(6):
        assert pool.free == 10
    assert not sequences.drop_idle()


def test_a_conversation_is_cut_to_what_both_share() -> None:
    pool = Pool(30)
    sequences = Sequences(pool, 10)
    kept = sequences.lease_chat([1, 2, 3], 5)
    pool.lengths[kept.sequence] = 5
    sequences.settle(kept, [1, 2, 3, 4, 5, 6])
    again = sequences.lease_chat([1, 2, 9, 9], 6)
    assert again is kept
    assert (again.tokens, pool.lengths[again.sequence]) == ([1, 2], 2)
    # Meanwhile another conversation gets a sequence of its own, and the last one settled stays.
    other = sequences.lease_chat([1, 2], 4)
    assert other.sequence != again.sequence
    assert other.tokens == []
    sequences.settle(other, [1, 2])
    sequences.settle(again, [1, 2, 9, 9])
    assert list(pool.capacities) == [again.sequence]
    # At least one token is left to compute.
    assert sequences.lease_chat([1, 2], 4).tokens == [1]


def test_a_conversation_that_outgrows_its_sequence_gets_a_new_one() -> None:
    pool = Pool(10)
    sequences = Sequences(pool, 10)
    blocker = sequences.open(4)
    kept = sequences.lease_chat([1, 2, 3], 5)
    assert kept.capacity == 5
    sequences.settle(kept, [1, 2, 3])
    grown = sequences.lease_chat([1, 2, 3, 4], 6)
    assert (grown.capacity, grown.tokens) == (6, [])
    sequences.close(blocker)


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3, 2], 1)]
)
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(a, b) == shared == common_prefix(b, a)
