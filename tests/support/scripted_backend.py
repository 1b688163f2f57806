"""A backend without an engine: every request gets the ids that a script says, at a given pace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helm
from helm.serve.admission import Admission
from helm.serve.app import make_app
from helm.serve.auth import Access
from helm.serve.server import Server, bind, url_of
from helm.serve.serving import Serving
from helm.session.requests import EngineRequest, StepOutput
from helm.text.generation_defaults import GenerationDefaults
from helm.text.prompts import Prompts
from helm.text.tokenizer import Tokenizer

BUNDLED = Path(helm.__file__).parent / "bundled"


class ScriptedStream:
    def __init__(self, backend: ScriptedBackend, request: EngineRequest) -> None:
        self._backend = backend
        self._left = list(backend.script(request))[: request.max_tokens]
        self._ends = len(backend.script(request)) <= request.max_tokens
        self._count = 0
        self.cancelled = False
        self.timings: dict[str, float] = {}

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self.cancelled or not self._left:
            raise StopAsyncIteration
        backend = self._backend
        await asyncio.sleep(backend.step_s if self._count else backend.prompt_s)
        if backend.failure is not None:
            return StepOutput(finish="error", error=backend.failure)
        self._count += 1
        token = self._left.pop(0)
        finish = None if self._left else "stop" if self._ends else "length"
        self.timings = {
            "prefill_tokens": 4.0,
            "prefill_s": backend.prompt_s,
            "cached_tokens": 2.0,
            "decode_tokens": self._count - 1.0,
            "decode_s": (self._count - 1) * backend.step_s,
        }
        if finish is not None:
            backend.running.discard(self)
        return StepOutput([token], [(-0.5, [(token, -0.5), (5, -1.5)])], finish)

    def cancel(self) -> None:
        if self in self._backend.running:
            self._backend.running.discard(self)
            self._backend.cancelled += 1
        self.cancelled = True


class ScriptedBackend:
    """script: the ids of a request's answer, the last of which ends it."""

    def __init__(
        self, script: Callable[[EngineRequest], list[int]], step_s: float = 0.0,
        prompt_s: float = 0.0, concurrency: int = 2, tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        self.script = script
        self.step_s, self.prompt_s = step_s, prompt_s
        self.name = "scripted"
        self.tokenizer = tokenizer or Tokenizer.from_directory(BUNDLED)
        self.context, self.vocab_size, self.concurrency = 512, 1024, concurrency
        defaults = GenerationDefaults(eos_token_ids=(1,))
        self.prompts = Prompts(self.tokenizer, defaults, 512, 512, 1024)
        self.failure: helm.HelmError | None = None
        self.running: set[ScriptedStream] = set()
        self.requests: list[EngineRequest] = []
        self.cancelled = 0
        self.most = 0  # that ran at once

    def submit(self, request: EngineRequest) -> ScriptedStream:
        stream = ScriptedStream(self, request)
        self.requests.append(request)
        self.running.add(stream)
        self.most = max(self.most, len(self.running))
        return stream

    def stats(self) -> dict[str, float]:
        return {"running": len(self.running), "waiting": 0, "steps": 7, "tokens": 9}

    async def drain(self, grace_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def says(text: str) -> Callable[[EngineRequest], list[int]]:
    """A script that answers with a text."""
    tokens = Tokenizer.from_directory(BUNDLED).encode(text, add_special_tokens=False)
    return lambda _request: [*tokens, 1]


@contextmanager
def served(
    backend: Any, *, max_waiting: int = 64, queue_timeout_s: float = 30.0,
    request_timeout_s: float = 60.0, access: Access | None = None, grace_s: float = 5.0,
    log: Callable[[str], None] = lambda _line: None, log_json: bool = False, page: Any = None,
    sse_interval_s: float = 0.0,
) -> Iterator[tuple[str, Serving]]:  # fmt: skip
    """A server on a thread; its address, and what it shares."""
    admission = Admission(backend.concurrency, max_waiting, queue_timeout_s)
    serving = Serving(backend, admission, (), request_timeout_s, sse_interval_s)
    app = make_app(serving, access or Access(), log, log_json, page)
    server = Server(app, serving, grace_s, lambda: None)
    with bind("127.0.0.1", 0) as listening:
        listening.listen(64)
        url = url_of(listening)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        try:
            yield url, serving
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
