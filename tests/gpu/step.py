"""Commands under one time limit, with one log. Knows nothing of what they do."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # exit status
TAIL_LINES = 40


class Skipped(Exception):
    """Why a step has nothing to say."""


class Failed(Exception):
    """What went wrong."""


class Step:
    """Runs commands in the repository's folder. limit_s: of all of them. environment: theirs,
    beside this process's."""

    def __init__(self, log: Path, limit_s: float, environment: Mapping[str, str]) -> None:
        self.log, self.limit_s, self.environment = log, limit_s, environment
        self.seconds = 0.0

    def __enter__(self) -> Step:
        self.begin = time.monotonic()
        self.file = self.log.open("w")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.file.close()
        self.seconds = time.monotonic() - self.begin

    def run(self, *command: str | Path, **environment: str) -> None:
        """Raises Failed unless the command ends in time and well, Skipped where it says so."""
        words = [str(word) for word in command]
        self.file.write(f"$ {shlex.join(words)}\n")
        self.file.flush()
        try:
            process = subprocess.Popen(
                words, stdout=self.file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment, **environment}, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as reason:
            raise Failed(str(reason)) from None
        try:
            status = process.wait(max(0.0, self.begin + self.limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {self.limit_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status == SKIPPED:
            raise Skipped(self.text().rstrip().rpartition("\n")[2])
        if status != 0:
            raise Failed(f"{Path(words[0]).name} ended with status {status}; see its log")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "".join(f"{line}\n" for line in self.text().splitlines()[-TAIL_LINES:])
