"""Who holds KV pages: admits the sequences of several threads. Knows token ids, not text.

What a sequence held may be kept for prompts that begin alike (helm._helm.PrefixCache), and gives
way to any that needs its room.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from helm.errors import CapacityError, InvalidError

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)
T = TypeVar("T")
_NOBODY = 0  # no thread's identifier
CLOSED = "[generate] this LLM is closed; make a new one"


class NoReuse:
    """The calls of a PrefixCache on an engine whose sequences all start empty."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def open(self, _prompt: Sequence[int], capacity: int) -> tuple[int, int]:
        return int(self._engine.open(capacity)), 0

    def fits(self, capacity: int) -> bool:
        try:
            self._engine.close(self._engine.open(capacity))
        except CapacityError:
            return False
        return True

    def keep(self, sequence: int, _tokens: Sequence[int]) -> None:
        self._engine.close(sequence)

    def close(self, sequence: int) -> None:
        self._engine.close(sequence)

    def clear(self) -> None:
        pass

    def save(self, *_: Any) -> int:
        raise InvalidError("[kv] nothing is kept with prefix_cache=False; leave that out to save")

    def load(self, *_: Any) -> tuple[list[int], str]:
        raise InvalidError("[kv] nothing is kept with prefix_cache=False; leave that out to load")


class Sequences:
    """Opens sequences of a PrefixCache, or of NoReuse, for several threads.

    When the pages are taken, kept sequences are given up first; then a thread waits for the others.
    CapacityError when only its own sequences, or waiting threads', are in the way. In a forked
    child, where nobody may be there to unlock them, what is given back is left as it is.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._changed = threading.Condition()  # its lock is reentrant and guards what follows
        self._holders: dict[int, int] = {}  # sequence -> thread
        self._waiting: set[int] = set()  # threads
        self._batch: int | None = None  # the thread whose batch opens sequences on its own
        self._ended = False
        self._process = os.getpid()

    def open(self, capacity: int, prompt: Sequence[int] = ()) -> tuple[int, int]:
        """A new sequence of up to `capacity` positions, and how many tokens of `prompt` it holds.
        At least one is left to compute."""
        with self._changed:
            sequence, cached = self._admit(lambda: self._cache.open(prompt, capacity))
            self._holders[sequence] = threading.get_ident()
            return sequence, cached

    def close(self, sequence: int) -> None:
        """Closes a sequence and lets waiting threads try again."""
        self._give_back(lambda: self._cache.close(sequence), sequence)

    def keep(self, sequence: int, tokens: Sequence[int]) -> None:
        """Gives back a sequence that holds the first of `tokens`, for others to begin with."""
        self._give_back(lambda: self._cache.keep(sequence, tokens), sequence)

    def clear(self) -> None:
        """Closes what is kept."""
        self._give_back(self._cache.clear)

    def end(self) -> None:
        """Closes what is kept; who waits for room, or wants some later, is refused."""
        self._ended = True
        self._give_back(self._cache.clear)

    def save(
        self, tokens: Sequence[int], path: str, metadata: str, progress: Progress | None
    ) -> int:
        """Writes what is kept of `tokens` to a file; how many that are."""
        with self._changed:
            return int(self._cache.save(tokens, path, metadata, progress))

    def load(self, path: str, progress: Progress | None) -> tuple[list[int], str]:
        """Keeps what a file holds: its tokens and the metadata."""
        with self._changed:
            tokens, metadata = self._admit(lambda: self._cache.load(path, progress))
            return list(tokens), str(metadata)

    @contextmanager
    def batch(self, largest: int) -> Iterator[None]:
        """A batch for as long as the block."""
        try:
            self.begin_batch(largest)
            yield
        finally:
            self.end_batch()

    def begin_batch(self, largest: int) -> None:
        """From now on a native generation opens sequences by itself, of at most `largest`
        positions: no other thread opens any, so what fits at the start fits later."""
        with self._changed:
            self._admit(lambda: self._check_room(largest))
            self._batch = threading.get_ident()

    def fits(self, capacity: int) -> bool:
        """Whether there is room for one of so many positions now."""
        with self._changed:
            return bool(self._cache.fits(capacity))

    def hand_over_batch(self, to_this_thread: bool) -> None:
        """The batch is this thread's from now on, or nobody's until one takes it over."""
        with self._changed:
            self._batch = threading.get_ident() if to_this_thread else _NOBODY

    def end_batch(self) -> None:
        """Ends this thread's batch, if it has one."""
        self._give_back(self._end_batch)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this thread waits for others, which may want the room of its sequences."""
        me = threading.get_ident()
        with self._changed:
            self._waiting.add(me)
            self._changed.notify_all()  # another waiter may now be the one to give up
        try:
            yield
        finally:
            with self._changed:
                self._waiting.discard(me)

    def _check_room(self, capacity: int) -> None:
        if not self._cache.fits(capacity):
            sequence, _ = self._cache.open((), capacity)  # says what is in the way
            self._cache.close(sequence)

    def _end_batch(self) -> None:
        if self._batch == threading.get_ident():
            self._batch = None

    def _give_back(self, give: Callable[[], None], sequence: int | None = None) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            if sequence is not None:
                self._holders.pop(sequence, None)
            give()
            self._changed.notify_all()

    def _admit(self, take: Callable[[], T]) -> T:
        me = threading.get_ident()
        while True:
            if self._ended:
                raise InvalidError(CLOSED)
            if self._batch in (None, me):
                try:
                    return take()
                except CapacityError:
                    others = {t for t in self._holders.values() if t != me} - self._waiting
                    if not others:
                        raise
            with self.waiting():
                self._changed.wait()
