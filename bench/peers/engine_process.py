"""A worker.py process as compare.py sees it: commands and answers, with a time limit for each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helm.compiler.load_cost import WEIGHTS
from scenarios import Scenario, family, variant

WORKER = Path(__file__).parents[1] / "worker.py"


class EngineFailed(Exception):
    """The engine cannot be measured, and why."""


class TooSlow(EngineFailed):
    """Something took longer than it may; the process is gone."""


class EngineProcess:
    """Use as a context manager: the process ends with it."""

    def __init__(
        self, engine: str, folder: Path, scenarios: Sequence[Scenario], args: argparse.Namespace
    ) -> None:
        command = [sys.executable, str(WORKER), engine, str(folder)]
        command += ["--scenarios", json.dumps([dataclasses.asdict(s) for s in scenarios])]
        command += ["--threads", str(args.threads), "--weights", args.weights]
        if args.scratch:
            command += ["--scratch", args.scratch]
        environment = {**os.environ, "HELM_BENCH_SPAWNED": str(time.time())}
        if family(engine) == "helm" and variant(engine) not in ("", *WEIGHTS):
            environment["HELM_CPU_ISA"] = variant(engine)
        self._limit_s = args.limit
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until __exit__
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors,
        )  # fmt: skip

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ready(self) -> dict[str, Any]:
        """Waits for the first token; what starting took."""
        return self._answer("starting", self._limit_s)

    def verify(self, reference: Path) -> float:
        """How far its logits are off those in a file."""
        found = self._ask({"do": "verify", "file": str(reference)}, "its logits")
        return float(found["deviation"])

    def save_logits(self, file: Path) -> None:
        self._ask({"do": "logits", "file": str(file)}, "its logits")

    def prepare(self, what: Scenario) -> None:
        self._ask({"do": "prepare", "scenario": what.name}, f"preparing {what.name}")

    def run(self, what: Scenario) -> Iterator[dict[str, Any]]:
        """Its parts, each measured when it is asked for; all together may take the limit."""
        left_s = self._limit_s
        for part in range(len(what.part_steps)):
            begin = time.monotonic()
            command = {"do": "run", "scenario": what.name, "part": part}
            found = self._ask(command, what.name, left_s)
            left_s -= time.monotonic() - begin
            yield found

    def _ask(
        self, command: dict[str, Any], what: str, limit_s: float | None = None
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(self._failure(what)) from None
        return self._answer(what, self._limit_s if limit_s is None else limit_s)

    def _answer(self, what: str, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        if late.is_set():
            raise TooSlow(f"{what} took more than {self._limit_s:g} s (--limit)")
        raise EngineFailed(self._failure(what))

    def _failure(self, what: str) -> str:
        self._process.wait()
        self._errors.seek(0)
        return f"it failed at {what}:\n{self._errors.read()[-2000:].rstrip()}"
