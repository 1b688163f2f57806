"""The command as users run it, for tests: to its end, in a pipe, in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

COMMAND = [sys.executable, "-m", "helm"]
# What a terminal gets where a chat waits for a message: pasted text is to come in brackets.
PROMPT = r"\x1b\[\?2004h.*?>"
_ROWS = 400  # of a terminal: nothing scrolls away
PASTE = "\x1b[200~{}\x1b[201~"


def environment() -> dict[str, str]:
    """Streams are buffered, as they are unless somebody asks Python for others. A terminal's size
    is its own: pytest-xdist gives its workers COLUMNS."""
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    ours = {"HF_HUB_OFFLINE": "1", "TERM": "xterm", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": ""}
    return {**own, **ours}


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
    """A command whose standard streams are a terminal of its own; it does not outlive its block.

    redirection: of its streams, as a shell writes it. columns: width of the terminal.
    """

    def __init__(
        self, arguments: Sequence[str], redirection: str = "", columns: int = 80, **variables: str
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"] if redirection else []
        self._process = subprocess.Popen(
            [*shell, *COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**environment(), **variables}, start_new_session=True,
            preexec_fn=lambda: _take_terminal(theirs),
        )  # fmt: skip
        os.close(theirs)
        self.output = ""
        self._columns = columns
        self._read = ""

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
                self._take()
        text, self.output = self.output[: found.end()], self.output[found.end() :]
        return text

    def _take(self) -> None:
        text = os.read(self._ours, 65536).decode(errors="replace")
        self.output += text
        self._read += text

    def screen(self) -> list[str]:
        """The lines that a person sees of all that was read so far."""
        import pyte

        screen = pyte.Screen(self._columns, _ROWS)
        pyte.Stream(screen).feed(self._read)
        return [line.rstrip() for line in screen.display]

    def shows(self, pattern: str, timeout_s: float) -> bool:
        """Whether `pattern` shows in time; reads up to its end if so."""
        try:
            self.wait_for(pattern, timeout_s)
        except AssertionError:
            return False
        return True

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def send(self, number: int) -> None:
        """A signal to the command."""
        self._process.send_signal(number)

    def modes(self) -> list[object]:
        """How the terminal treats what is typed and written."""
        return termios.tcgetattr(self._ours)

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
                    self._take()
                except OSError:  # the other end is closed
                    self._process.wait(60)
        return self._process.returncode


def _take_terminal(descriptor: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
