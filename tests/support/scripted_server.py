"""A server for tests of the page: its answers follow a script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from helm.serve.page import page_routes

Step = dict[str, Any] | float | str | threading.Event


def text(content: str = "", reasoning: str = "") -> dict[str, Any]:
    """A chunk with a piece of the answer."""
    delta = {"content": content} if content else {}
    delta |= {"reasoning_content": reasoning} if reasoning else {}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def end(reason: str = "stop", tokens: int = 12, rate: float = 34.5) -> list[Step]:
    """The chunks that end an answer."""
    timings = {"decode_tokens": tokens - 1, "decode_s": (tokens - 1) / rate}
    usage = {"completion_tokens": tokens, "helm": {"timings": timings}}
    return [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": usage},
        "data: [DONE]\n\n",
    ]


@dataclass
class Scripted:
    """script: of each answer to come, chunks, seconds to wait, events to wait for, raw
    text; or a whole response.
    bodies, keys: what was asked. left: streams whose reader went away."""

    url: str = ""
    script: list[list[Step] | Callable[[], Response]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: int = 0
    locked: bool = False  # whether it wants a key

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        steps = self.script.pop(0)
        if callable(steps):
            return steps()
        return StreamingResponse(self._stream(steps), media_type="text/event-stream")

    async def _stream(self, steps: list[Step]) -> AsyncIterator[str]:
        try:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, threading.Event):
                    while not step.is_set():
                        await asyncio.sleep(0.01)
                else:
                    yield step if isinstance(step, str) else f"data: {json.dumps(step)}\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise

    async def models(self, request: Request) -> Response:
        if self.locked and not request.headers.get("authorization"):
            return JSONResponse({"error": {"message": "No key."}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "scripted-1b", "object": "model"}]})


@contextmanager
def running() -> Iterator[Scripted]:
    """The server on a free port of this machine."""
    scripted = Scripted()
    routes = [
        *page_routes(),
        Route("/v1/chat/completions", scripted.chat, methods=["POST"]),
        Route("/v1/models", scripted.models),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        scripted.url = f"http://127.0.0.1:{port}"
        yield scripted
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=20)
