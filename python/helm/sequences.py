"""Who holds KV pages: admits sequences, and keeps one conversation's KV between calls.

Knows token ids and the engine's open/close/length/truncate, not text or sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from helm.errors import CapacityError


@dataclass
class Kept:
    """An open sequence and the tokens that its cache holds."""

    sequence: int
    capacity: int  # positions
    tokens: list[int]


class Sequences:
    """Opens and closes an engine's sequences for several threads.

    When the pages are taken, an idle conversation's are given up first; then a thread waits for
    the others. CapacityError when only its own sequences, or waiting threads', are in the way.
    """

    def __init__(self, engine: Any, context: int) -> None:
        self._engine = engine
        self._context = context  # positions
        self._changed = threading.Condition()  # its lock is reentrant and guards what follows
        self._holders: dict[int, int] = {}  # sequence -> thread
        self._waiting: set[int] = set()  # threads
        self._batch: int | None = None  # the thread whose batch opens sequences on its own
        self._idle: Kept | None = None

    def open(self, capacity: int) -> int:
        """A new sequence of up to `capacity` positions."""
        me = threading.get_ident()
        with self._changed:
            while self._batch not in (None, me):
                self._wait(me)
            sequence = self._admit(capacity, me)
            self._holders[sequence] = me
            return sequence

    def close(self, sequence: int) -> None:
        """Closes a sequence and lets waiting threads try again."""
        with self._changed:
            self._holders.pop(sequence, None)
            self._engine.close(sequence)
            self._changed.notify_all()

    @contextmanager
    def batch(self, largest: int) -> Iterator[None]:
        """While a native generation opens sequences by itself, of at most `largest` positions:
        no other thread opens any, so what fits at the start fits later."""
        me = threading.get_ident()
        try:
            with self._changed:
                while self._batch not in (None, me):
                    self._wait(me)
                self._batch = me
                self._engine.close(self._admit(largest, me))
            yield
        finally:
            with self._changed:
                if self._batch == me:
                    self._batch = None
                self._changed.notify_all()

    def _admit(self, capacity: int, me: int) -> int:
        while True:
            try:
                return int(self._engine.open(capacity))
            except CapacityError:
                if self.drop_idle():
                    continue
                others = {t for t in self._holders.values() if t != me} - self._waiting
                if not others:
                    raise
                self._wait(me)

    def _wait(self, me: int) -> None:
        self._waiting.add(me)
        self._changed.notify_all()  # another waiter may now be the one to give up
        try:
            self._changed.wait()
        finally:
            self._waiting.discard(me)

    def lease_chat(self, tokens: list[int], capacity: int) -> Kept:
        """A sequence for a conversation whose prompt is `tokens`: the kept one, cut to the tokens
        both share (one at least is left to compute), or a new one. Give it back to `settle`."""
        with self._changed:
            kept, self._idle = self._idle, None
            if kept is not None and kept.capacity < capacity:
                self.close(kept.sequence)
                kept = None
            if kept is None:
                kept = self._open_chat(capacity)
            try:
                shared = min(common_prefix(kept.tokens, tokens), len(tokens) - 1)
                self._engine.truncate(kept.sequence, shared)
            except BaseException:
                self.close(kept.sequence)
                raise
            kept.tokens = tokens[:shared]
            self._holders[kept.sequence] = threading.get_ident()
            return kept

    def _open_chat(self, capacity: int) -> Kept:
        # The whole context where it is free: a longer conversation then needs no new sequence.
        if self._batch is None and capacity < self._context:
            try:
                sequence = int(self._engine.open(self._context))
                return Kept(sequence, self._context, [])
            except CapacityError:
                pass
        return Kept(self.open(capacity), capacity, [])

    def settle(self, kept: Kept, tokens: Sequence[int]) -> None:
        """Keeps a leased sequence, which holds the first of `tokens`, in place of the last one."""
        with self._changed:
            self.drop_idle()
            kept.tokens = list(tokens[: self._engine.length(kept.sequence)])
            self._engine.truncate(kept.sequence, len(kept.tokens))
            self._holders.pop(kept.sequence, None)
            self._idle = kept
            self._changed.notify_all()

    def drop_idle(self) -> bool:
        """Closes the kept conversation's sequence; whether there was one."""
        with self._changed:
            kept, self._idle = self._idle, None
            if kept is not None:
                self.close(kept.sequence)
            return kept is not None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    return shared
