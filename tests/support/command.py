"""The command as users run it, for tests: to its end, in a pipe, in a terminal."""

from __future__ import annotations

import array
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from command_server import MOST_BYTES

COMMAND = [sys.executable, "-m", "helm"]
# What a terminal gets where a chat waits for a message: pasted text is to come in brackets.
PROMPT = r"\x1b\[\?2004h.*?>"
_ROWS = 400  # of a terminal: nothing scrolls away
# Variables that a process reads before it runs HELM.
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OPENBLAS_", "OMP_")
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
    """The command to its end, in a process that was forked where that starts as a new one would."""
    own = {**environment(), **variables}
    result = _server().run(arguments, stdin, own) or subprocess.run(
        [*COMMAND, *arguments], input=stdin, env=own,
        capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


@cache
def _server() -> _Server:
    return _Server()


class _Server:
    """Has `command_server.py` run commands: Python and its modules start once, not every time."""

    def __init__(self) -> None:
        self._environment = environment()
        self._calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("command_server.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, str(theirs.fileno())], env=self._environment,
            pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        self._idle = threading.Lock()

    def run(
        self, arguments: Sequence[str], stdin: str, variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str] | None:
        """None if it cannot be what a new process would be, or is busy."""
        message = json.dumps({
            "arguments": arguments, "environment": variables, "folder": os.getcwd(),
            "cpus": sorted(os.sched_getaffinity(0)),
        }).encode()  # fmt: skip
        changed = dict(set(variables.items()) ^ set(self._environment.items()))
        if len(message) > MOST_BYTES or any(name.startswith(_AT_START) for name in changed):
            return None
        if not self._idle.acquire(blocking=False):
            return None
        try:
            return self._run(message, arguments, stdin.encode())
        finally:
            self._idle.release()

    def _run(
        self, message: bytes, arguments: Sequence[str], stdin: bytes
    ) -> subprocess.CompletedProcess[str]:
        (its_in, our_in), (our_out, its_out), (our_err, its_err) = (os.pipe() for _ in range(3))
        socket.send_fds(self._calls, [message], [its_in, its_out, its_err])
        for descriptor in (its_in, its_out, its_err):
            os.close(descriptor)
        child, found = self._number(), {}

        def read(descriptor: int) -> None:
            with open(descriptor, encoding="utf-8") as stream:
                found[descriptor] = stream.read()

        def write() -> None:
            try:
                with open(our_in, "wb") as stream:
                    stream.write(stdin)
            except BrokenPipeError:
                pass

        overdue = threading.Timer(120, os.kill, (child, signal.SIGKILL))
        threads = [threading.Thread(target=read, args=[end]) for end in (our_out, our_err)]
        for thread in (overdue, *threads, threading.Thread(target=write)):
            thread.start()
        status = self._number()
        overdue.cancel()
        for thread in threads:
            thread.join()
        return subprocess.CompletedProcess(
            [*COMMAND, *arguments], status, found[our_out], found[our_err]
        )

    def _number(self) -> int:
        numbers = array.array("q")
        numbers.frombytes(self._calls.recv(numbers.itemsize))
        return numbers[0]


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
