"""Listens, until a signal: the first drains, the second ends. Knows no routes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from helm.errors import InvalidError
from helm.serve.connection import bounded, limits_by_files
from helm.serve.serving import Serving

_HEADERS_BYTES = 32 << 10
_KEEP_ALIVE_S = 30
_ACCEPTED = 16  # connections in one turn of the loop
BACKLOG = 2048  # that the system holds until then
_LAST_S = 2.0  # for responses that were cut off to go out
_LOST_S = 1.0  # between two looks at the backend


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. InvalidError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidError(
            f"[serve] cannot listen at {host} port {port}: {reason}; give another --port, or 0 for "
            "any that is free"
        ) from None
    return found


def url_of(listening: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """grace_s: what running requests have left after the first signal. on_drain: called then."""

    def __init__(
        self, app: ASGIApp, serving: Serving, grace_s: float, on_drain: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                backlog=_ACCEPTED,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(_LAST_S),
                h11_max_incomplete_event_size=_HEADERS_BYTES,
            )
        )
        self._serving = serving
        self._grace_s = grace_s
        self._on_drain = on_drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self.signal = 0  # the last that came

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until it is told to end, or the backend has failed."""
        self._loop = asyncio.get_running_loop()
        raise_file_limit()
        self._serving.connections = limits_by_files()
        self.config.http = bounded(self._serving.connections)
        watcher = asyncio.create_task(self._watch())
        try:
            await super().serve(sockets)
        finally:
            watcher.cancel()
            if self._drain is not None:
                self._drain.cancel()
            self._serving.executor.shutdown(wait=False, cancel_futures=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; the system holds more connections than one turn of the loop accepts."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends."""
        self.signal = sig
        if self._serving.draining:
            self.force_exit = self.should_exit = True
            return
        self._serving.draining = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_drain)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signals do not come again at the end."""
        import threading

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _begin_drain(self) -> None:
        self._on_drain()
        self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._serving.admission.idle()
        self.should_exit = True

    async def _watch(self) -> None:
        """Ends a while after the backend has failed, so that everybody hears of it."""
        while self._serving.backend.failure is None:
            await asyncio.sleep(_LOST_S)
        await asyncio.sleep(_LOST_S)
        if not self._serving.draining:
            self._serving.draining = True
            self._begin_drain()


def raise_file_limit() -> None:
    """As many connections as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 65536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def run(server: Server, listening: socket.socket) -> int:
    """Serves; 0 once drained, 128 + the signal after a second one, 1 after a failure."""
    asyncio.run(server.serve([listening]))
    if server._serving.backend.failure is not None:
        return 1
    return 128 + server.signal if server.force_exit else 0
