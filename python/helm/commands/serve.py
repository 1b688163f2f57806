"""`helm-llm serve`: an HTTP server that OpenAI's clients speak to; its log goes to stderr."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from helm.base.arguments import count
from helm.commands import common, options
from helm.commands.lines import say
from helm.commands.parser import More, Parser
from helm.errors import InvalidError

if TYPE_CHECKING:
    from helm.session.llm import LLM

HELP = "serve a model over HTTP, as OpenAI's clients expect it"
EPILOG = """examples:
  helm-llm serve
  helm-llm serve Qwen/Qwen3-0.6B --alias qwen --port 8080
  helm-llm serve ./my-model --host 0.0.0.0 --api-key-file keys.txt
"""
_CONCURRENCY = 8
_GRACE_S = 30.0
_SSE_INTERVAL_MS = 33.0
_MOST_MS = 60_000  # of a step, and between events
_NEEDED = ("starlette", "uvicorn")


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser)
    group = parser.add_argument_group("server")
    for name, kind, default, metavar, text in (
        ("--host", str, "127.0.0.1", "NAME", "address to listen at"),
        ("--port", int, 8000, "N", "0 takes one that is free"),
        ("--concurrency", int, _CONCURRENCY, "N", "requests computed at once"),
        ("--max-waiting", int, 256, "N", More("requests that wait at most")),
        ("--queue-timeout", float, 60.0, "S", More("seconds that one waits at most")),
        ("--request-timeout", float, 600.0, "S", More("seconds that one is computed at most")),
        (
            "--sse-interval",
            float,
            _SSE_INTERVAL_MS,
            "MS",
            More("between events of a stream; 0 sends each piece of text at once"),
        ),
        (
            "--tbt",
            float,
            0.0,
            "MS",
            More(
                "that a step may take where prompts join answers; 0: 2.25 times one without, or 50"
            ),
        ),
        ("--grace", float, _GRACE_S, "S", More("seconds that requests have left on SIGTERM")),
    ):
        shown = type(text)(f"{text} (default: {default:g})" if kind is not str else
                           f"{text} (default: {default})")  # fmt: skip
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=shown)
    group.add_argument(
        "--alias", action="append", default=[], metavar="NAME",
        help="name of the model in requests; may be repeated (default: its own)",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", metavar="FILE",
        help="keys that may ask, one a line (default: HELM_API_KEY, or anyone here)",
    )  # fmt: skip
    group.add_argument(
        "--no-auth", action="store_true",
        help=More("other machines may ask without a key (default: refused)"),
    )  # fmt: skip
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help=More("a site whose pages may ask; may be repeated (default: none)"),
    )  # fmt: skip
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", metavar="HOW",
        help=More("text or json, one line per request (default: text)"),
    )  # fmt: skip
    group.add_argument(
        "--log-prompts", action="store_true",
        help=More("lines of the log have the text of prompts (default: no text)"),
    )  # fmt: skip
    group.add_argument(
        "--no-web", action="store_true", help=More("no chat page at / (default: there is one)")
    )
    options.add_model_arguments(parser)
    parser.set_defaults(page_tokens=None, objective=None)
    options.add_speculation(parser)


def run(args: argparse.Namespace) -> int:
    """Serves; 0 once SIGTERM or Ctrl-C has drained it, 130 or 143 after a second one, 1 where the
    device failed."""
    _check(args)
    from helm.serve import auth, server

    if args.objective is None:
        args.objective = "serve" if args.concurrency > 1 else "total"
    access = auth.access(
        args.host, auth.read_keys(args.api_key_file), args.cors_origin, args.no_auth
    )
    with server.bind(args.host, args.port) as listening, common.load(args) as llm:
        if not args.quiet:
            common.say_plan(llm)
        return _serve(args, llm, access, listening)


def _serve(args: argparse.Namespace, llm: LLM, access: Any, listening: Any) -> int:
    from helm.serve import server
    from helm.serve.admission import Admission
    from helm.serve.app import make_app
    from helm.serve.llm_backend import LlmBackend
    from helm.serve.page import page_routes
    from helm.serve.serving import Serving

    llm.generate([llm.plan.model.vocab_size // 2], max_tokens=2, ignore_eos=True)  # warms up
    backend = LlmBackend.over(llm)
    backend.pace(args.tbt / 1e3)
    admission = Admission(backend.concurrency, args.max_waiting, args.queue_timeout)
    serving = Serving(
        backend, admission, tuple(args.alias), args.request_timeout,
        sse_interval_s=args.sse_interval / 1e3, log_prompts=args.log_prompts,
    )  # fmt: skip
    log = args.log_format == "json"
    app = make_app(serving, access, _log, log, [] if args.no_web else page_routes())
    serves = server.Server(
        app, serving, args.grace, lambda: say("draining: running requests end; again to end now")
    )
    listening.listen(server.BACKLOG)  # whoever reads the next line may connect
    say(f"serving {serving.name} at {server.url_of(listening)} {_rates(llm, backend.concurrency)}")
    return server.run(serves, listening)


def _rates(llm: LLM, most: int) -> str:
    prediction = llm.plan.prediction
    known = 1 if prediction is None else prediction.predicted.sequences
    rates = {n: common.predicted_rate(llm, n) for n in (known, most)}
    shown = ", ".join(
        f"{rate:,.1f} of {'one' if n == 1 else f'{n} together'}"
        for n, rate in rates.items()
        if rate is not None
    )
    return f"(up to {most} requests at once{shown and f'; predicted tokens/s: {shown}'})"


def _check(args: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidError(
            f"[serve] {' and '.join(missing)} cannot be imported; install them with "
            "pip install 'helm-llm[serve]'"
        )
    for name in ("concurrency", "max_waiting"):
        count(getattr(args, name), f"[serve] --{name.replace('_', '-')}")
    for name in ("queue_timeout", "request_timeout"):
        if not 0 < getattr(args, name) <= 1e6:
            shown = name.replace("_", "-")
            raise InvalidError(f"[serve] --{shown} must be a number of seconds above 0")
    for name in ("sse_interval", "tbt"):
        if not 0 <= getattr(args, name) <= _MOST_MS:
            shown = name.replace("_", "-")
            raise InvalidError(f"[serve] --{shown} must be from 0 to {_MOST_MS} milliseconds")
    if not 0 <= args.port <= 65535:
        raise InvalidError(f"[serve] port must be from 0 to 65535, got {args.port}")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
