"""What the server asks of an engine. Knows no HTTP and no engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from helm.errors import HelmError
from helm.session.requests import EngineRequest, StepOutput
from helm.text.prompts import Prompts
from helm.text.tokenizer import Tokenizer


class RequestStream(Protocol):
    """The output of one request, as it comes; ends after the one with a finish."""

    @property
    def timings(self) -> dict[str, float]:
        """So far: queue_s, prefill_s, prefill_tokens, cached_tokens, decode_s, decode_tokens."""

    def __aiter__(self) -> AsyncIterator[StepOutput]: ...
    async def __anext__(self) -> StepOutput: ...

    def cancel(self) -> None:
        """Ends it within a step; again does nothing. No output follows."""


class Backend(Protocol):
    """A loaded model that continues requests together.

    prompts: checks prompts. context: positions of one request. concurrency: requests that share
    steps at most. failure: why nothing can be computed any more, as of a device that is lost.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def prompts(self) -> Prompts: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def failure(self) -> HelmError | None: ...

    def submit(self, request: EngineRequest) -> RequestStream:
        """Queues a request. InvalidError, OutOfMemoryError."""

    def stats(self) -> dict[str, float]:
        """running, waiting, kv_blocks_used, kv_blocks_total, steps, tokens."""

    async def drain(self, grace_s: float) -> None:
        """Takes no more; returns once all have ended, at the latest after so many seconds."""

    def close(self) -> None:
        """Ends all, frees the model."""


class ScoringBackend(Backend, Protocol):
    """One that also says how likely the tokens of a prompt are."""

    async def score(
        self, tokens: list[int], top: int
    ) -> list[tuple[float, list[tuple[int, float]]] | None]:
        """Per token, given those before it: (logprob, [(id, logprob), ...] of the `top` likeliest);
        None for the first."""


def scores(backend: Any) -> bool:
    """Whether a backend is a ScoringBackend."""
    return callable(getattr(backend, "score", None))
