"""What stands around every route: who may ask, the request's id, its line in the log, errors."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helm.serve.auth import Access
from helm.serve.errors import ClientGone, api_error
from helm.serve.http_body import error_response
from helm.serve.serving import Record, Serving

_MOST_ADDRESS = 64
_MOST_PATH = 200  # characters in the log
_CORS = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type",
    "access-control-max-age": "600",
}


class Gate:
    """An ASGI application around another. log: called with each line."""

    def __init__(
        self, app: ASGIApp, serving: Serving, access: Access, log: Callable[[str], None],
        log_json: bool = False,
    ) -> None:  # fmt: skip
        self._app = app
        self._serving = serving
        self._access = access
        self._log = log
        self._log_json = log_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(f"req-{secrets.token_hex(8)}", asyncio.get_running_loop().time())
        scope["helm.record"] = record
        status = 0
        allowed = ""

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", record.request_id)
                headers.setdefault("x-content-type-options", "nosniff")
                if allowed:
                    headers["access-control-allow-origin"] = allowed
                    headers.append("vary", "Origin")
            await send(message)

        try:
            headers = Headers(scope=scope)
            origin, host = headers.get("origin"), headers.get("host")
            self._access.check_host(host)
            if self._access.check_origin(origin, host):
                allowed = origin or ""
            if allowed and scope["method"] == "OPTIONS":
                await _preflight(sending)
                return
            address = str((scope.get("client") or ("unix",))[0])
            key = headers.get("authorization")
            record.client = self._access.client(scope["path"], key, address)
            record.has_key = bool(self._access.keys)
            await self._app(scope, receive, sending)
        except ClientGone:
            status = 499
        except asyncio.CancelledError:
            status = status or 499
            record.error = record.error or "cancelled"
            raise
        except Exception as error:
            answer = api_error(error)
            record.error = answer.message
            if answer.status == 500:
                sys.stderr.write(escaped(traceback.format_exc(), keep="\n"))
            if status == 0:
                await error_response(answer)(scope, receive, sending)
        finally:
            self._serving.bodies_bytes -= record.body_bytes
            self._note(scope, record, status)

    def _note(self, scope: Scope, record: Record, status: int) -> None:
        seconds = asyncio.get_running_loop().time() - record.begun_s
        route = getattr(scope.get("route"), "path", "other")
        self._serving.metrics.answered(route, status, seconds)
        facts = _facts(scope, record, status, seconds)
        if self._log_json:
            self._log(json.dumps(facts))
        elif route not in ("/health", "/metrics") or status >= 400:
            self._log(_line(facts))


async def _preflight(send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in _CORS.items()]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _facts(scope: Scope, record: Record, status: int, seconds: float) -> dict[str, Any]:
    """What the log says; no keys, and texts of prompts where the record has any."""
    client = scope.get("client")
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.wall_s)),
        "method": str(scope["method"]),
        "path": str(scope["path"])[:_MOST_PATH],
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": record.request_id,
        "client": str(client[0])[:_MOST_ADDRESS] if client else "",
    }
    if record.prompt_tokens:
        facts |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "queue_s": round(record.queue_s or 0.0, 4),
            "first_token_s": round(record.first_s or 0.0, 4),
            "tokens_per_s": round(record.tokens_per_s, 2),
            "finish": record.finish,
        }
    if record.prompt:
        facts["prompt"] = record.prompt
    if record.error:
        facts["error"] = record.error
    return facts


def _line(facts: dict[str, Any]) -> str:
    parts = [f"{facts['time']} {facts['method']} {facts['path']} {facts['status']}"]
    parts.append(f"{facts['seconds'] * 1e3:,.0f} ms | {facts['request_id']} {facts['client']}")
    if "prompt_tokens" in facts:
        parts.append(
            f"| prompt {facts['prompt_tokens']} ({facts['cached_tokens']} reused), "
            f"output {facts['output_tokens']}, queue {facts['queue_s'] * 1e3:,.0f} ms, "
            f"first token {facts['first_token_s'] * 1e3:,.0f} ms, "
            f"{facts['tokens_per_s']:,.1f} tokens/s, {facts['finish'] or 'not begun'}"
        )
    if "prompt" in facts:
        parts.append(f"| prompt {json.dumps(facts['prompt'], ensure_ascii=False)}")
    if "error" in facts:
        parts.append(f"| {facts['error'][:300]}")
    return escaped(" ".join(parts))


def escaped(text: str, keep: str = "") -> str:
    """`text` on one line of a terminal: what does not show is escaped."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
