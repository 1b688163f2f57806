"""What all requests share, and what is noted of each. Knows no routes."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from helm.serve.admission import Admission
from helm.serve.backend import Backend
from helm.serve.connection import Limits
from helm.serve.errors import ApiError
from helm.serve.metrics import Metrics
from helm.text.thinking import Marks, thinking_marks

P = ParamSpec("P")
T = TypeVar("T")
_MOST_CHARACTERS = 512  # of a token; those of vocabularies are shorter
LONG = 2000  # characters; shorter texts are encoded at once
_MOST_LOGGED = 10_000  # characters of a prompt
BYTES_A_CHARACTER = 32  # of JSON that are read while one is encoded


@dataclass
class Record:
    """One request, for its line in the log and its usage. Times in seconds of the loop."""

    request_id: str
    begun_s: float
    wall_s: float = field(default_factory=time.time)  # since 1970
    client: int = 0
    has_key: bool = False  # whose the client is
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prompt: str = ""  # what the log shows of it
    queue_s: float | None = None
    first_s: float | None = None  # from arrival to the first token
    finish: str = ""
    timed_out: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    error: str = ""
    body_bytes: int = 0

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, with HELM's timings."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "helm": {"timings": self.timings},
        }

    def head(self, kind: str, prefix: str, model: str) -> dict[str, Any]:
        """What every response begins with; kind: OpenAI's name of the object, prefix: of its id."""
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(self.wall_s),
            "model": model,
        }

    @property
    def tokens_per_s(self) -> float:
        """Of the choice that ended last, after its first token."""
        decode_s = self.timings.get("decode_s", 0.0)
        return self.timings.get("decode_tokens", 0) / decode_s if decode_s > 0 else 0.0


@dataclass
class Serving:
    """A backend as it is served. aliases: names that requests may use for it beside its own; the
    first is shown. request_timeout_s: how long one is computed at most. sse_interval_s: between two
    events of a stream at least, but for the first and the last; what comes meanwhile is one event.
    log_prompts: whether the log shows texts of prompts."""

    backend: Backend
    admission: Admission
    aliases: tuple[str, ...] = ()
    request_timeout_s: float = 600.0
    sse_interval_s: float = 0.0
    log_prompts: bool = False
    draining: bool = False
    bodies_bytes: int = 0  # of all requests that have not been answered
    connections: Limits | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(default_factory=Metrics)
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="helm-text")
    )

    @property
    def name(self) -> str:
        """What the model is called in responses."""
        return self.aliases[0] if self.aliases else self.backend.name

    @functools.cached_property
    def marks(self) -> Marks | None:
        """What stands around a model's thinking."""
        tokenizer = self.backend.tokenizer
        return None if tokenizer is None else thinking_marks(tokenizer)

    def check_model(self, model: str | None) -> None:
        """404 for another model than the one there is; none is as good as that."""
        names = (*self.aliases, self.backend.name, "default", "")
        if model is not None and model not in names:
            shown = model if len(model) <= 100 else f"{model[:97]}..."
            raise ApiError(
                404,
                f"the model {shown!r} is not served here; there is {self.name!r}",
                code="model_not_found",
                param="model",
            )

    def note_prompt(self, record: Record, text: str) -> None:
        """Adds a prompt to what the log says of its request, where it is to."""
        if self.log_prompts:
            whole = f"{record.prompt}\n{text}" if record.prompt else text
            cut = len(whole) > _MOST_LOGGED
            record.prompt = f"{whole[: _MOST_LOGGED - 3]}..." if cut else whole

    def note_user(self, record: Record, user: str) -> None:
        """Users that a client tells apart take turns as clients do, unless it has a key: then its
        users share that key's turns."""
        if user and not record.has_key:
            record.client = zlib.crc32(f"{record.client} {user}".encode())

    def state(self) -> tuple[str, str]:
        """ "ok", "draining" or "failed", and why."""
        if self.backend.failure is not None:
            return "failed", str(self.backend.failure)
        return ("draining", "the server is going down") if self.draining else ("ok", "")

    def check_length(self, characters: int, param: str) -> None:
        """400 for a text that is too long before its tokens are known."""
        most = self.backend.context * _MOST_CHARACTERS
        if characters > most:
            raise ApiError(
                400,
                f"the text has {characters} characters, the context of {self.backend.context} "
                f"tokens holds fewer than {most}; shorten it",
                code="context_length_exceeded",
                param=param,
            )

    def check_ready(self) -> None:
        """503 where nothing new is computed, 429 where one more would wait for too long. Costs next
        to nothing: what is refused need not be read before."""
        state, reason = self.state()
        if state != "ok":
            headers = {"retry-after": "30"} if state == "draining" else {}
            raise ApiError(503, f"{state}: {reason}", code=state, headers=headers)
        self.admission.check()

    async def run(self, characters: int, work: Callable[P, T], *args: P.args) -> T:  # type: ignore[valid-type]
        """`work` on a text: on another thread where it is long."""
        if characters < LONG:
            return work(*args)  # type: ignore[call-arg]
        return await asyncio.get_running_loop().run_in_executor(self.executor, work, *args)
