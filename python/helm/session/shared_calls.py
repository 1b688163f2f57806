"""Calls of several threads share steps: those that wait run together, as one batch, when the one
before has ended. Knows jobs, no prompts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from helm.base.progress import Progress
from helm.session.batch import ADVANCE_S, Batch
from helm.session.sequences import Sequences
from helm.text.completion import Completion
from helm.text.prompts import Job
from helm.text.tokenizer import Tokenizer


class _Call:
    """One thread's jobs; `first`: their place in the batch that they run in."""

    def __init__(self, jobs: Sequence[Job], progress: Progress | None) -> None:
        self.jobs = jobs
        self.progress = progress
        self.first = 0
        self.given_up = False
        self.results: list[tuple[Completion, Exception | None]] | None = None

    @property
    def capacity(self) -> int:
        """Positions of the largest job."""
        return max(job.capacity for job in self.jobs)


class SharedCalls:
    """`run` for any number of threads.

    One of the waiting threads drives the batch until its own call has ended, then another one does.
    If a driver is interrupted, or a step fails, the other calls begin anew: equal seeds give equal
    tokens.
    """

    def __init__(
        self, engine: Any, tokenizer: Tokenizer | None, prefixes: Any, sequences: Sequences
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prefixes = prefixes
        self._sequences = sequences
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[_Call] = []
        self._driver: _Call | None = None
        # What follows is the driver's.
        self._batch: Batch | None = None
        self._running: list[_Call] = []

    def run(
        self, jobs: Sequence[Job], progress: Progress | None = None
    ) -> list[tuple[Completion, Exception | None]]:
        """The result of each job, with what it failed with. progress: called with (jobs done,
        jobs), perhaps by another thread."""
        call = _Call(jobs, progress)
        try:
            with self._changed:
                self._waiting.append(call)
            while self._takes_the_wheel(call):
                try:
                    self._drive(call)
                finally:
                    self._leave(call)
        except BaseException:
            self._give_up(call)
            raise
        assert call.results is not None
        return call.results

    def _takes_the_wheel(self, call: _Call) -> bool:
        """Waits until nobody drives, and does; False once the call has ended."""
        with self._changed:
            while call.results is None and self._driver is not None:
                with self._sequences.waiting():
                    self._changed.wait()
            if call.results is None:
                self._driver = call
            return call.results is None

    def _give_up(self, call: _Call) -> None:
        """Without the call, and without its batch if nobody else wants that."""
        with self._changed:
            call.given_up = True
            if call in self._waiting:
                self._waiting.remove(call)
            if self._driver in (None, call):
                self._driver = call
                if self._batch is not None and self._all_ended():
                    self._sequences.hand_over_batch(to_this_thread=True)
                    self._end()
        self._leave(call)

    def _all_ended(self) -> bool:
        return all(call.results is not None or call.given_up for call in self._running)

    def _leave(self, call: _Call) -> None:
        with self._changed:
            if self._driver is call:
                self._driver = None
                self._changed.notify_all()

    def _drive(self, call: _Call) -> None:
        """Until the call has ended; it may wait for the batch that it finds here."""
        try:
            if self._batch is not None:
                self._sequences.hand_over_batch(to_this_thread=True)
            while call.results is None:
                if self._batch is None:
                    self._begin(call)
                self._advance()
                if self._all_ended():
                    self._end()
        except BaseException:
            self._end()
            raise
        if self._batch is not None:
            self._sequences.hand_over_batch(to_this_thread=False)

    def _begin(self, call: _Call) -> None:
        """Starts the driver's call, with those waiting ones that have room beside streams, too; if
        they cannot start together, alone."""
        self._running = [call]
        with self._changed:
            self._waiting.remove(call)
        self._sequences.begin_batch(call.capacity)
        with self._changed:
            for other in self._waiting:
                if other.capacity <= call.capacity or self._sequences.fits(other.capacity):
                    self._running.append(other)
            self._waiting = [other for other in self._waiting if other not in self._running]
        try:
            self._start()
        except Exception:
            if len(self._running) == 1:
                raise
            self._give_back(self._running[1:])
            self._running = [call]
            self._start()

    def _start(self) -> None:
        jobs = [job for call in self._running for job in call.jobs]
        self._batch = Batch(self._engine, self._tokenizer, jobs, self._prefixes)
        first = 0
        for call in self._running:
            call.first, first = first, first + len(call.jobs)

    def _advance(self) -> None:
        batch = self._batch
        assert batch is not None
        for _ in batch.advance(ADVANCE_S):
            pass
        ended = False
        for call in self._running:
            places = range(call.first, call.first + len(call.jobs))
            if call.results is not None:
                continue
            if call.given_up:
                batch.cancel(places)
                continue
            done = sum(batch.outputs[place].finish_reason is not None for place in places)
            if call.progress is not None:
                call.progress(done, len(places))
            if done == len(places):
                call.results = [(batch.completion(i), batch.outputs[i].failure) for i in places]
                ended = True
        if ended:
            with self._changed:
                self._changed.notify_all()

    def _end(self) -> None:
        """Ends the batch; the others' calls in it that have not ended wait again."""
        batch, self._batch = self._batch, None
        calls, self._running = self._running, []
        try:
            if batch is not None:
                batch.cancel()
        finally:
            self._sequences.end_batch()
            self._give_back([call for call in calls if call is not self._driver])

    def _give_back(self, calls: Sequence[_Call]) -> None:
        with self._changed:
            again = [c for c in calls if c.results is None and not c.given_up]
            self._waiting = again + [c for c in self._waiting if c not in again]
            self._changed.notify_all()
