"""How commands end: exit statuses, what they have to save where they end early, and streams that
nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_UNSEEN_S = 0.05  # after which a signal's handler should have run


class Ended(BaseException):
    """One of the signals has come."""


class Ending:
    """While `run` works, the first SIGTERM or SIGHUP raises Ended within `interruptible()`;
    elsewhere it is only noted, so that nothing is left half done.

    A second SIGTERM ends the process at once. A second SIGHUP does nothing, because a terminal that
    is closed often sends two. A signal that was ignored before stays so.
    """

    def __init__(self) -> None:
        self._signal = 0  # the first that came
        self._may_raise = False
        self._leave: Callable[[], None] | None = None

    def run(self, work: Callable[[], int], save: Callable[[], int]) -> int:
        """Works, then saves, whatever ended the work. The exit status: the signal's, else that of a
        save that failed, else the work's."""
        try:
            with self._noting():
                try:
                    status = work()
                finally:
                    failed = save()
        except (Ended, OSError):  # with SIGHUP goes the terminal that was written to
            if not self._signal:
                raise
        if self._signal:
            drop_unwritable()
            return 128 + self._signal
        return failed or status

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        before = {n: old for n, old in handlers.items() if old not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, self._note)
        try:
            with self._waking():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Ends what the main thread waits for where a signal has not: one that came just before the
        wait began, or that another thread took."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.signal(signal.SIGURG, lambda *_: None)
        others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        waker = threading.Thread(
            target=self._wake, args=(read, threading.get_ident()), name="helm-signals", daemon=True
        )
        waker.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(others)
            os.close(write)
            waker.join()
            os.close(read)
            signal.signal(signal.SIGURG, before)

    def _wake(self, read: int, thread: int) -> None:
        while numbers := os.read(read, 64):  # empty once the other end is closed
            while not self._signal and any(number in _SIGNALS for number in numbers):
                time.sleep(_UNSEEN_S)
                signal.pthread_kill(thread, signal.SIGURG)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:
            return
        self._signal = number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._leave is not None:
            self._leave()
        elif self._may_raise:
            raise Ended

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where Ended may be raised."""
        self._may_raise = True
        try:
            if self._signal:
                raise Ended
            yield
        finally:
            self._may_raise = False

    @contextlib.contextmanager
    def leaving(self, leave: Callable[[], None]) -> Iterator[None]:
        """Where `leave` is called instead, which brings what is in here to its end: of an event
        loop, which takes what is raised in it for its own."""
        if self._signal:
            raise Ended
        self._leave = leave
        try:
            yield
        finally:
            self._leave = None


def drop_unwritable() -> OSError | None:
    """What standard streams hold and nobody takes goes nowhere, or Python, which flushes them once
    more at exit, would end with a status of its own. Returns why it was not taken."""
    reason = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            reason = error
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return reason
