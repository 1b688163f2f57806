"""The routes, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helm.errors import HelmError
from helm.serve import http_body
from helm.serve.auth import Access
from helm.serve.errors import ApiError, api_error
from helm.serve.gate import Gate
from helm.serve.http_body import Json, error_response
from helm.serve.openai_chat import chat, chat_tokenizer, template_source
from helm.serve.openai_completions import completions
from helm.serve.openai_schema import MOST_IDS, read_body, read_prompt_of_template
from helm.serve.serving import BYTES_A_CHARACTER, Record, Serving
from helm.text.literal_text import literal_tokens
from helm.text.prompts import Template
from helm.text.tokenizer import Tokenizer

_LATER: Mapping[str, str] = {
    "/v1/embeddings": "HELM computes no embeddings yet",
    "/v1/responses": "use /v1/chat/completions, which the same clients speak",
    "/v1/messages": "use /v1/chat/completions",
}


def make_app(
    serving: Serving,
    access: Access,
    log: Callable[[str], None] = lambda _line: None,
    log_json: bool = False,
    page: list[Route] | None = None,
) -> ASGIApp:
    """The application. log: called with one line per request. page: routes of the chat page."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenizer_info),
            Route("/apply-template", apply_template, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
            *(Route(path, _later(path, reason), methods=["POST"])
              for path, reason in _LATER.items()),
            *(page or []),
        ],
        exception_handlers={
            HTTPException: _no_route,
            ApiError: _refused,
            HelmError: _refused,
        },
    )  # fmt: skip
    app.state.serving = serving
    return Gate(app, serving, access, log, log_json)


async def models(request: Request) -> Response:
    """The one model."""
    return Json({"object": "list", "data": [_card(request.app.state.serving)]})


async def model(request: Request) -> Response:
    """The one model, by its name."""
    serving: Serving = request.app.state.serving
    serving.check_model(request.path_params["model"])
    return Json(_card(serving))


def _card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "helm",
        "aliases": [*serving.aliases, serving.backend.name],
        "max_model_len": serving.backend.context,
    }


async def tokenize(request: Request) -> Response:
    """Token ids of "content", or "prompt"; add_special (false), with_pieces (false)."""
    serving, tokenizer = _with_tokenizer(request)
    node = read_body(await http_body.read(request))
    field = "content" if "content" in node.names() else "prompt"
    text = node[field].string()
    special = any(node.get(name, False).boolean() for name in ("add_special", "add_special_tokens"))
    tokens = await serving.run(len(text), tokenizer.encode, text, special)
    shown: list[Any] = list(tokens)
    if node.get("with_pieces", False).boolean():
        shown = [{"id": token, "piece": tokenizer.token_text(token)} for token in tokens]
    context = serving.backend.context
    return Json({"tokens": shown, "count": len(tokens), "max_model_len": context})


async def detokenize(request: Request) -> Response:
    """The text of "tokens"."""
    serving, tokenizer = _with_tokenizer(request)
    node = read_body(await http_body.read(request))
    tokens = node["tokens"].integers(0, serving.backend.vocab_size - 1, MOST_IDS)
    text = await serving.run(8 * len(tokens), tokenizer.decode, tokens, False)
    return Json({"content": text, "prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Special tokens by their purpose ("eos_token"), and "chat_template", as vLLM names them."""
    _, tokenizer = _with_tokenizer(request)
    return Json({**tokenizer.special_tokens, "chat_template": template_source(tokenizer, None)})


def _with_tokenizer(request: Request) -> tuple[Serving, Tokenizer]:
    serving: Serving = request.app.state.serving
    if serving.backend.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer")
    return serving, serving.backend.tokenizer


async def apply_template(request: Request) -> Response:
    """The prompt that a conversation becomes."""
    serving: Serving = request.app.state.serving
    tokenizer = chat_tokenizer(serving)
    body = await http_body.read(request)
    messages, tools, variables, continues = await serving.run(
        len(body) // BYTES_A_CHARACTER, lambda: read_prompt_of_template(read_body(body))
    )
    template = Template(tools, variables, None, continues)
    text, _ = literal_tokens(tokenizer, messages, lambda m: template.render(tokenizer, m))
    return Json({"prompt": text})


async def health(request: Request) -> Response:
    """Whether requests are computed, and why not."""
    state, reason = request.app.state.serving.state()
    body = {"status": state, **({"reason": reason} if reason else {})}
    return Json(body, 200 if state == "ok" else 503)


async def metrics(request: Request) -> Response:
    """Prometheus' text."""
    serving: Serving = request.app.state.serving
    admission = serving.admission
    text = serving.metrics.text(
        serving.backend.stats(),
        admission.waiting,
        admission.rejected,
        serving.state()[0] == "ok",
        _gauges(serving),
    )
    return Response(text, media_type="text/plain; version=0.0.4")


def _gauges(serving: Serving) -> dict[str, tuple[str, float]]:
    connections = serving.connections
    found = {
        "tasks": ("tasks of the server", float(len(asyncio.all_tasks()))),
        "request_body_bytes": ("bodies of unanswered requests", float(serving.bodies_bytes)),
    }
    if connections is not None:
        found["connections"] = ("open connections", float(connections.open))
        found["connections_refused"] = ("connections beyond the most", float(connections.refused))
    return found


def _later(path: str, reason: str) -> Callable[[Request], Any]:
    async def refuse(_request: Request) -> Response:
        raise ApiError(501, f"{path} is not implemented: {reason}", code="not_implemented")

    return refuse


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: "there is no such address; see /v1/models, /v1/chat/completions, /v1/completions",
        405: "this address takes another method",
    }.get(error.status_code, str(error.detail))
    answer = ApiError(error.status_code, message, headers=error.headers)
    return _noted(request, answer)


async def _refused(request: Request, error: Exception) -> Response:
    return _noted(request, api_error(error))


def _noted(request: Request, answer: ApiError) -> Response:
    record: Record | None = request.scope.get("helm.record")
    if record is not None:
        record.error = answer.message
    return error_response(answer)
