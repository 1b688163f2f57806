"""A stream of server-sent events, which ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helm.serve.errors import ClientGone, api_error, dumps

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
WAIT = b": wait\n\n"  # a comment, for proxies that close silent connections


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + dumps(value) + b"\n\n"


class Chunks:
    """Events of one response, which differ in their choice."""

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._before = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._after = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        """One with a choice."""
        return self._before + dumps(choice) + self._after

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The one that has none."""
        return self._before + b'],"usage":' + dumps(usage) + b"}\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled where the client leaves: ClientGone. The request's
    body has been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `events` gives. on_error: told what ended it early, after the headers."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._events = events
        self._on_error = on_error
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for piece in self._events:
                await _send(send, piece)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            self._on_error(error)
            await _send(send, event(api_error(error).body()))
        finally:
            await self._events.aclose()
        await _send(send, b"", more=False)


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    try:
        await send({"type": "http.response.body", "body": body, "more_body": more})
    except OSError:
        raise ClientGone from None
