"""One connection: how long it may wait and stall, and how many there may be. Knows no routes."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from helm.serve.errors import ApiError
from helm.serve.http_body import error_response

HEAD_S = 30.0  # for a request's head, from the connection or its last response on
STALL_S = 30.0  # for a client to read what is written for it
_REFUSED_S = 1.0  # for the head of a request that is not wanted
_MOST = 4096  # connections
_SPARE = 256  # beyond the most: told that the server is busy
_OTHER_FILES = 128  # that the process may still open, accepted connections among them


@dataclass
class Limits:
    """most: connections that are served at once. spare: those beyond that are told why they are
    refused. open, refused: how many there are, and were."""

    most: int
    spare: int
    open: int = 0
    refused: int = 0


def limits_by_files() -> Limits:
    """As many as the system lets the process open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - len(os.listdir("/proc/self/fd")) - _OTHER_FILES
    spare = max(1, min(_SPARE, left // 8))
    return Limits(max(1, min(_MOST, left - 2 * spare)), spare)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection beyond the most."""
    headers = {"retry-after": "5", "connection": "close"}
    busy = ApiError(
        503,
        "the server has as many connections as it can hold; try again in 5 s",
        code="server_busy",
        headers=headers,
    )
    await error_response(busy)(scope, receive, send)


class _Timer:
    """One call later, or none."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(
        self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]
    ) -> None:
        self._handle = loop.call_later(seconds, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None


class Connection(H11Protocol):
    """uvicorn's connection, which ends where the client sends no request or reads no answer."""

    limits = Limits(_MOST, _SPARE)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head = _Timer()  # until a request's head is there
        self._stall = _Timer()  # while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        limits = self.limits
        limits.open += 1
        wanted = limits.open <= limits.most
        self._head.start(self.loop, HEAD_S if wanted else _REFUSED_S, transport.abort)
        if not wanted:
            limits.refused += 1
            self.app = _refuse
        if limits.open > limits.most + limits.spare:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is waited for."""
        self.limits.open -= 1
        self._head.stop()
        self._stall.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What arrives in pieces has no more time than what arrives whole."""
        super().data_received(data)
        if self._answering():
            self._head.stop()
            if not self.flow.write_paused:
                self._stall.stop()
        elif not self._head.runs:
            self._head.start(self.loop, HEAD_S, self.transport.abort)

    def on_response_complete(self) -> None:
        """What is left of the answer is to be read in time."""
        self._await_reader()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """More is written than the client reads."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The client reads."""
        self._stall.stop()
        if not self._answering():
            self._await_reader()
        super().resume_writing()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_reader(self) -> None:
        if not self._stall.runs and self.transport.get_write_buffer_size():
            self._stall.start(self.loop, STALL_S, self._stalled)

    def _stalled(self) -> None:
        self._stall.stop()
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def bounded(limits: Limits) -> type[Connection]:
    """The kind of connection that a server with these limits has."""
    return type("BoundedConnection", (Connection,), {"limits": limits})
