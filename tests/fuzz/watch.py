"""Gives inputs to watched processes and tells what became of each; knows nothing of HELM.

A process that ends, or does not answer in time, is a finding, and another one goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
_PREPARE_S = 120.0  # for a process to start and to make what is valid
_ALONE = 4.0  # times its limit is what an input gets when it runs once more, alone
_INPUTS = 1500  # of one process, so that what leaks shows and does not add up


@dataclass(frozen=True)
class Finding:
    """An input that HELM neither took nor refused as it should."""

    kind: str
    index: int
    what: str
    detail: str

    def command(self, seed: str) -> str:
        """How to see it again."""
        place = f"--seed {seed} --only {self.kind} --first {self.index} --count 1"
        return f"tests/fuzz/run {place}"


@dataclass
class Report:
    """What came of many inputs. slowest: (seconds, kind, index) by kind."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest: dict[str, tuple[float, int]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.Lock, repr=False)


class UnpreparedError(Exception):
    """A kind cannot make what is valid: the fuzzer is at fault, or HELM refuses everything."""


class Watched:
    """One process that takes inputs."""

    def __init__(self, seed: str, keep: Path | None = None) -> None:
        self._seed = seed
        self._keep = keep
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._given = 0
        self._unread = b""

    def outcome(self, kind: str, index: int, limit_s: float) -> dict[str, Any]:
        """What the worker answers, or how it ended. Raises UnpreparedError."""
        if self._given >= _INPUTS:
            self.end()
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._given += 1
        try:
            process.stdin.write(f"{kind} {index}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended("before the input")
        if self._answer(_PREPARE_S) is None:
            ended = "late" if process.poll() is None else self._ended("")
            self.end()
            raise UnpreparedError(f"{kind} cannot make what is valid: {ended}")
        answer = self._answer(limit_s)
        if answer is not None:
            return answer
        if process.poll() is not None:
            return self._ended("at the input")
        self.end()
        return {"outcome": "hang", "what": f"no answer in {limit_s:g} s", "detail": ""}

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="helm-fuzz-", dir=self._keep))
        self._given, self._unread = 0, b""
        own = {
            "PYTHONPATH": os.pathsep.join(
                (str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", ""))
            ),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self._folder / "hub"),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "fuzz.worker", self._seed,
             str(self._folder), "keep" if self._keep else "drop"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own},
            cwd=self._folder, start_new_session=True,
        )  # fmt: skip

    def _answer(self, limit_s: float) -> dict[str, Any] | None:
        """The next line; None when none comes in time, or none will."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._process.wait()
                return None
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self, when: str) -> dict[str, Any]:
        assert self._process is not None
        status = self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit of {status}"
        log = self._folder / "log"
        detail = log.read_bytes()[-4000:].decode(errors="replace") if log.exists() else ""
        self.end()
        return {"outcome": "finding", "what": f"{how} {when}", "detail": detail}

    def end(self) -> None:
        """Ends the process and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if self._keep is None:
            shutil.rmtree(self._folder, ignore_errors=True)


Tell = Callable[[str, int, dict[str, Any]], None]  # (kind, index, outcome)


def run_in(
    watched: Watched,
    inputs: Iterable[tuple[str, int]],
    limits_s: dict[str, float],
    report: Report,
    tell: Tell = lambda _kind, _index, _outcome: None,
) -> None:
    """Runs (kind, index) one after the other. limits_s: by kind."""
    for kind, index in inputs:
        limit_s = limits_s[kind]
        outcome = watched.outcome(kind, index, limit_s)
        if outcome["outcome"] == "hang":  # or the machine had other things to do
            again = watched.outcome(kind, index, limit_s * _ALONE)
            if again.get("cpu_s", limit_s) < limit_s:
                outcome = again
            else:
                outcome["outcome"] = "finding"
        _note(report, kind, index, outcome)
        tell(kind, index, outcome)


def run(
    seed: str,
    inputs: Iterable[tuple[str, int]],
    limits_s: dict[str, float],
    processes: int = 1,
    keep: Path | None = None,
    tell: Tell = lambda _kind, _index, _outcome: None,
) -> Report:
    """The same in several processes at once. keep: a folder for the files of inputs. Raises
    UnpreparedError."""
    report, lock, source = Report(), threading.Lock(), iter(inputs)
    failures: list[UnpreparedError] = []

    def take() -> Iterator[tuple[str, int]]:
        while True:
            with lock:
                found = next(source, None)
            if found is None:
                return
            yield found

    def work() -> None:
        watched = Watched(seed, keep)
        try:
            run_in(watched, take(), limits_s, report, tell)
        except UnpreparedError as error:
            failures.append(error)
        finally:
            watched.end()

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return report


def _note(report: Report, kind: str, index: int, outcome: dict[str, Any]) -> None:
    with report.lock:
        _count(report, kind, index, outcome)


def _count(report: Report, kind: str, index: int, outcome: dict[str, Any]) -> None:
    report.outcomes[kind, outcome["outcome"]] += 1
    seconds = outcome.get("seconds", 0.0)
    report.seconds[kind] += seconds
    report.slowest[kind] = max(report.slowest.get(kind, (0.0, 0)), (seconds, index))
    if outcome["outcome"] == "finding":
        report.findings.append(Finding(kind, index, outcome["what"], outcome["detail"]))
