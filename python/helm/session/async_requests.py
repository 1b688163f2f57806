"""Requests of asyncio tasks to a service: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from typing import Any

from helm.errors import HelmError
from helm.session.requests import EngineRequest, StepOutput
from helm.session.service import Service, request_of

_QUIET_TURNS = 4  # of the loop; one that has nothing to do takes some 20 us
_MOST_TURNS = 100


class RequestStream:
    """The outputs of one request, for one task of the loop that submitted it."""

    def __init__(self, inlet: Inlet, request: EngineRequest) -> None:
        self._inlet = inlet
        self._with_logprobs = request.sampling.logprobs is not None
        self._events: deque[Any] = deque()
        self._came = asyncio.Event()
        self._ended = False
        self._last: Any = None
        self._id = -1

    def put(self, event: Any) -> None:
        """Takes a native event."""
        self._events.append(event)
        self._came.set()

    @property
    def timings(self) -> dict[str, float]:
        """Of what has been taken."""
        return {} if self._last is None else dict(self._last.timings)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepOutput:
        """What has come since the last output; waits for at least one token or the end."""
        if self._ended:
            raise StopAsyncIteration
        while not self._events:
            self._came.clear()
            await self._came.wait()
            if self._ended:
                raise StopAsyncIteration
        output = StepOutput(logprobs=[] if self._with_logprobs else None)
        while self._events:
            event = self._events.popleft()
            if event.finish != "error":
                output.tokens.append(event.id)
                if output.logprobs is not None:
                    output.logprobs.append((event.logprob, event.top))
            self._last = event
            if event.finish:
                output.finish = event.finish
                output.error = _error_of(event)
                self._ended = True
        return output

    def cancel(self) -> None:
        """Ends the request within a step, and the outputs; again does nothing."""
        if self._ended:
            return
        self._ended = True
        self._came.set()
        self._inlet.cancel(self._id)

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self.cancel()


class Inlet:
    """What one event loop has of a service: a native outbox, watched while requests are open."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        from helm import _helm

        self._service = service
        self._loop = weakref.ref(loop)
        self._outbox = _helm.Outbox()
        self._streams: weakref.WeakValueDictionary[int, RequestStream]
        self._streams = weakref.WeakValueDictionary()
        self._open: set[int] = set()
        self._fd = int(self._outbox.event_fd())
        self._gathering = False
        self._quiet_turns = 0  # of the loop, since the last request

    def submit(self, request: EngineRequest) -> RequestStream:
        native = request_of(
            request.tokens,
            request.max_tokens,
            request.stop_tokens,
            request.sampling,
            request.constraint,
            request.client,
            request.streamed,
        )
        stream = RequestStream(self, request)
        (stream._id,) = self._service.submit([native], self._outbox, more=True)
        self._streams[stream._id] = stream
        loop = self._loop()
        assert loop is not None
        if not self._open:
            loop.add_reader(self._fd, self._deliver)
        self._open.add(stream._id)
        if not self._gathering:
            self._gathering = True
            loop.call_soon(self._gather, loop, _MOST_TURNS)
        self._quiet_turns = 0
        return stream

    def _gather(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """An engine at rest begins once some turns of the loop have brought no request: those that
        come together share their first steps."""
        self._quiet_turns += 1
        if self._quiet_turns <= _QUIET_TURNS and turns > 0:
            loop.call_soon(self._gather, loop, turns - 1)
            return
        self._gathering = False
        self._service.begin()

    def cancel(self, request: int) -> None:
        with contextlib.suppress(HelmError):
            self._service.cancel(request)
        self._done(request)

    def _deliver(self) -> None:
        for event in self._outbox.poll():
            stream = self._streams.get(event.request)
            if stream is not None:
                stream.put(event)
            if event.finish:
                self._done(event.request)

    def _done(self, request: int) -> None:
        self._open.discard(request)
        loop = self._loop()
        if not self._open and loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)


def _error_of(event: Any) -> HelmError | None:
    """What a request failed with."""
    try:
        event.rethrow()
    except HelmError as error:
        return error
    except Exception as error:
        return HelmError(str(error) or type(error).__name__)
    return None
