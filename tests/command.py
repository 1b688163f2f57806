"""The command as users run it, for tests: to its end, in a pipe, in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

COMMAND = [sys.executable, "-m", "helm"]


def environment() -> dict[str, str]:
    """Streams are buffered, as they are unless somebody asks Python for others."""
    ours = {"HF_HUB_OFFLINE": "1", "TERM": "xterm", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": ""}
    return {**os.environ, **ours}


def helm(
    *arguments: str, stdin: str = "", status: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *arguments], input=stdin, env={**environment(), **variables},
        capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


def redirected(
    redirection: str, *arguments: str, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """The command with its streams as a shell redirects them, such as ">&-"."""
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments], env=environment(),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


@contextmanager
def piped(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command while it runs; it does not outlive the block."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


class Terminal:
    """A command whose standard streams are a terminal of its own; it does not outlive its block."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(),
            start_new_session=True, preexec_fn=lambda: _take_terminal(theirs),
        )  # fmt: skip
        os.close(theirs)
        self.output = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._ours >= 0:
            os.close(self._ours)

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """Reads until `pattern` shows in what has not been waited for; returns up to its end."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.output, re.S)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.output!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.output += os.read(self._ours, 65536).decode(errors="replace")
        text, self.output = self.output[: found.end()], self.output[found.end() :]
        return text

    def shows(self, pattern: str, timeout_s: float) -> bool:
        """Whether `pattern` shows in time; reads up to its end if so."""
        try:
            self.wait_for(pattern, timeout_s)
        except AssertionError:
            return False
        return True

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def hang_up(self) -> int:
        """Takes the terminal away; the exit status."""
        os.close(self._ours)
        self._ours = -1
        return self._process.wait(60)

    def status(self) -> int:
        """The exit status; what is still written is read, or the process could not end."""
        deadline = time.monotonic() + 60
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.output
            if select.select([self._ours], [], [], 0.05)[0]:
                try:
                    self.output += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    self._process.wait(60)
        return self._process.returncode


def _take_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
