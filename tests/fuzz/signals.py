"""Signals at any time to the commands and to programs that use HELM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import kv_file
from command import COMMAND, environment
from fuzz.kind import Kind, sensible
from fuzz.programs import STORY

_PROGRAM = (sys.executable, "-m", "fuzz.programs", "handled")
_GREEDY = ("--temperature", "0", "--quiet", "--threads", "2", "--max-tokens")
_RUN = (*COMMAND, "run", "bundled", STORY, *_GREEDY, "300", "--save-kv")
_CHAT = (*COMMAND, "chat", "bundled", *_GREEDY, "60", "--save-kv")
_BENCH = (*COMMAND, "bench", "--rounds", "2", "--threads", "2")
_TALK = b"Hello!\n" + STORY.encode() + b"\nTell me more\nWhy?\n"
# What the process goes on after, and what ends it: by the signal, or with 128 and its number.
_HARMLESS = (signal.SIGWINCH, signal.SIGCHLD, signal.SIGPIPE, signal.SIGCONT)
_STOPS = (signal.SIGTSTP, signal.SIGSTOP)
_FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1)
_HANDLED = (signal.SIGALRM, signal.SIGUSR1, signal.SIGINT)  # by the program


class Signal(Kind):
    """A process that gets one to three signals: it goes on, or ends as one does after them."""

    name = "signal"
    limit_s = 90.0
    inputs = 50

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = (
            ("run", _RUN, b""), ("run", _RUN, b""), ("chat", _CHAT, _TALK), ("bench", _BENCH, b""),
            ("program", _PROGRAM, b""), ("program", _PROGRAM, b""),
        )  # fmt: skip
        self._expected: dict[str, tuple[bytes, float]] = {}

    def _left_alone(self, name: str, command: tuple[str, ...], stdin: bytes) -> tuple[bytes, float]:
        """What a command prints, and how many seconds it takes."""
        if name not in self._expected:
            before = time.monotonic()
            out = subprocess.run(
                command, input=stdin, env=environment(), capture_output=True, check=True
            ).stdout
            self._expected[name] = (out, time.monotonic() - before)
        return self._expected[name]

    def run(self, random: Random, folder: Path) -> None:
        name, command, stdin = random.choice(self._calls)
        saved = folder / "saved.kv"
        if name != "bench":
            command = (*command, str(saved))
        out, usual_s = self._left_alone(name, command, stdin)
        if random.random() < 0.5:
            saved.unlink(missing_ok=True)
        sent = [
            random.choice((*_HARMLESS, *_STOPS, *_FATAL)) for _ in range(random.choice((1, 1, 3)))
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(), preexec_fn=os.setpgrp,
        ) as process:  # fmt: skip
            try:
                assert process.stdin is not None
                process.stdin.write(stdin)
                process.stdin.flush()
                _wait_for_runtime(process)
                for number in sent:
                    time.sleep(random.uniform(0, usual_s) / len(sent))
                    _send(random, process, number)
                printed, errors = process.communicate(timeout=60)
            finally:
                process.kill()
        _check(name, sent, process.returncode, printed, errors.decode(errors="replace"), out)
        if saved.exists():
            kv_file.checksums(saved.read_bytes())


def _wait_for_runtime(process: subprocess.Popen[bytes]) -> None:
    """Until the command is past what Python itself does first, or has ended."""
    deadline = time.monotonic() + 30
    while process.poll() is None and not _has_runtime(process.pid):
        sensible(time.monotonic() < deadline, "the runtime is not loaded")
        time.sleep(0.005)


def _has_runtime(pid: int) -> bool:
    try:
        return "/_helm." in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False


def _send(random: Random, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    if number in _STOPS:
        time.sleep(random.choice((0.0, 0.2)))
        process.send_signal(signal.SIGCONT)


def _check(
    name: str, sent: list[signal.Signals], status: int, printed: bytes, errors: str, out: bytes
) -> None:
    told = f"{name} after {[number.name for number in sent]}: exit of {status}"
    sensible("Traceback" not in errors and "Exception ignored" not in errors, f"{told}: {errors}")
    fatal = [number for number in sent if number in _FATAL]
    if name == "program":
        fatal = [number for number in fatal if number not in _HANDLED]
    ends = {0, *(-number for number in fatal), *(128 + number for number in fatal)}
    sensible(status in ends, f"{told}: {errors}")
    if status == 0 and name in ("run", "chat"):
        sensible(printed == out, f"{told}, but {printed!r} was printed, not {out!r}")
    elif name == "run":
        sensible(
            out.startswith(printed.rstrip(b"\n")), f"{told}: {printed!r} is no part of {out!r}"
        )
