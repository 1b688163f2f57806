"""Errors as OpenAI's clients expect them. Knows no routes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from helm.base.familiar import as_options
from helm.errors import CapacityError, HelmError, InvalidError, OutOfMemoryError

_PLACE = re.compile(r"^\[[\w ]+\] ")
_FIELD = re.compile(r"^\[request\] ([\w.\[\]]+): |^\[sampling\] (\w+) must")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
}


class RequestError(InvalidError):
    """A field of a request is malformed; the message begins with "[request] field: "."""


class ApiError(Exception):
    """Becomes a response. status: of HTTP. code: a word for programs. param: the field that is
    wrong. headers: of the response."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


def api_error(error: Exception) -> ApiError:
    """The response to an error of HELM; a fault of the server for all others."""
    if isinstance(error, ApiError):
        return error
    text = _PLACE.sub("", as_options(str(error)))
    if isinstance(error, CapacityError):
        return ApiError(400, text, code="context_length_exceeded")
    if isinstance(error, InvalidError):
        found = _FIELD.match(str(error))
        return ApiError(400, text, param=found and (found[1] or found[2]))
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, text, code="out_of_memory")
    if isinstance(error, HelmError):
        return ApiError(500, text, code="engine_error")
    return ApiError(500, "the server failed at this request; its log says why")


def too_long(tokens: int, context: int, what: str) -> ApiError:
    """For a prompt that the context does not hold."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens, but {what} has {tokens}; "
        "shorten it, or start the server with a larger --context",
        code="context_length_exceeded",
        param="messages" if what == "the conversation" else "prompt",
    )


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8. Lone surrogates, which UTF-8 has not, stay escapes of JSON."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")
