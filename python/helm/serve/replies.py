"""How an answer goes out: whole or as events, with an eye on the client. Knows no API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from helm.serve.serving import Record
from helm.serve.sse import EventStream, unless_gone

T = TypeVar("T")


def headers_of(record: Record, ignored: Sequence[str]) -> dict[str, str]:
    """Headers of every answer. ignored: fields that the request had in vain."""
    headers = {"x-request-id": record.request_id}
    words = [name for name in ignored if name.isascii() and name.isidentifier()]
    if words:
        headers["x-helm-ignored"] = ", ".join(word[:64] for word in words)
    return headers


async def collected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which ends where the client leaves."""
    return await unless_gone(request.receive, work)


async def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], headers: dict[str, str]
) -> Response:
    """A stream that begins with the first event, so that what is refused before has a status."""
    record: Record = request.scope["helm.record"]
    try:
        first = await unless_gone(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise

    async def all_events() -> AsyncGenerator[bytes, None]:
        try:
            yield first
            async for piece in events:
                yield piece
        finally:
            await events.aclose()

    def failed(error: Exception) -> None:
        record.error = str(error)

    return EventStream(all_events(), headers, failed)
