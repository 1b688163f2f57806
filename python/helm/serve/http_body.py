"""The body of a request, within bounds of size and time; JSON responses. Knows no API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helm.serve.errors import ApiError, ClientGone, dumps

MOST_BYTES = 32 << 20
ALL_BYTES = 128 << 20  # of all requests at once
_BODY_S = 60.0


async def read(request: Request) -> bytes:
    """The whole body. 413 for one that is too large, 408 for one that comes too slowly, 503 where
    all together are too large."""
    serving, record = request.app.state.serving, request.scope["helm.record"]
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > MOST_BYTES):
        raise _too_large()
    found = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                found += piece
                record.body_bytes += len(piece)
                serving.bodies_bytes += len(piece)
                if len(found) > MOST_BYTES:
                    raise _too_large()
                if serving.bodies_bytes > ALL_BYTES:
                    raise _too_many()
                if not message.get("more_body", False):
                    return bytes(found)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {_BODY_S:.0f} s",
            code="timeout",
            headers={"connection": "close"},
        ) from None


class Json(Response):
    """A value as JSON."""

    media_type = "application/json"

    def __init__(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(dumps(value), status, headers)


def error_response(error: ApiError) -> Json:
    """OpenAI's error object with its status and headers."""
    return Json(error.body(), error.status, error.headers)


def _too_many() -> ApiError:
    return ApiError(
        503,
        f"all bodies together have more than {ALL_BYTES >> 20} MiB; try again in 5 s",
        code="server_busy",
        headers={"connection": "close", "retry-after": "5"},
    )


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body has more than {MOST_BYTES >> 20} MiB",
        code="body_too_large",
        headers={"connection": "close"},
    )
