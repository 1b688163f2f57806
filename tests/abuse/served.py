"""`helm-llm serve` as a process of its own: what it holds, what it says, how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from command import COMMAND, environment

_START_S = 120.0
_SETTLE_S = 10.0
_POOLED = 8  # threads that encode texts and score prompts, made when first needed
_HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Held:
    """What a server holds: nothing of it may stay behind. resident_bytes is compared apart."""

    files: int
    threads: int
    tasks: int
    kv_blocks: int
    connections: int
    running: int
    waiting: int
    body_bytes: int
    resident_bytes: int

    def is_like(self, before: Held) -> bool:
        """Whether it is what was held before, but for memory. Pools of threads may have grown."""
        return 0 <= self.threads - before.threads <= _POOLED and before == replace(
            self, threads=before.threads, resident_bytes=before.resident_bytes
        )


@dataclass
class Served:
    """A server that listens. log: the file of what it says."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=30, headers={"connection": "close"}).text
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        return {n: float(v) for n, v in (line.rsplit(" ", 1) for line in lines)}

    def held(self) -> Held:
        values = self.metrics()
        own = Path(f"/proc/{self.process.pid}")
        return Held(
            files=len(os.listdir(own / "fd")),
            threads=len(os.listdir(own / "task")),
            tasks=int(values["helm_tasks"]),
            kv_blocks=int(values["helm_engine_kv_blocks_used"]),
            connections=int(values["helm_connections"]),
            running=int(values["helm_engine_running"]),
            waiting=int(values["helm_num_requests_waiting"] + values["helm_engine_waiting"]),
            body_bytes=int(values["helm_request_body_bytes"]),
            resident_bytes=int(values["helm_resident_bytes"]),
        )

    def settled(self, before: Held, seconds: float = _SETTLE_S) -> Held:
        """What it holds once that is what it held `before`; AssertionError where that never
        comes."""
        end = time.monotonic() + seconds
        while True:
            now = self.held()
            if now.is_like(before):
                return now
            assert time.monotonic() < end, f"before {before}\nafter {now}"
            time.sleep(0.05)

    def answer(self) -> str:
        """A short one, always the same."""
        found = httpx.post(f"{self.url}/v1/chat/completions", json=_HELLO, timeout=60)
        assert found.status_code == 200, found.text
        text: str = found.json()["choices"][0]["message"]["content"]
        return text

    def check_log(self) -> None:
        """Nothing in it is the server's own fault."""
        text = self.log.read_text(errors="replace")
        found = re.search(r"Traceback|Exception in|never retrieved|out of system resource", text)
        assert found is None, text[max(0, found.start() - 500) : found.start() + 3000]

    def processor_s(self) -> float:
        """Seconds that it has computed."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(*options: str, prefix: Sequence[str] = (), **variables: str) -> Iterator[Served]:
    """The command once it answers. prefix: a command that starts it, such as prlimit."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*prefix, *COMMAND, "serve", "--port", "0", "-t", "1", *options],
                env={**environment(), **variables}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file,
            )  # fmt: skip
        try:
            url = _address(process, log)
            yield Served(process, url, log)
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[Any], log: Path) -> str:
    end = time.monotonic() + _START_S
    while True:
        if found := re.search(r"at (http://\S+)", log.read_text()):
            try:
                httpx.get(f"{found[1]}/health")
                return found[1]
            except httpx.HTTPError:
                pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
