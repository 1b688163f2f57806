"""What is asked of a running engine, and what it gives back: token ids alone, no text."""

from __future__ import annotations

from dataclasses import dataclass, field

from helm.errors import HelmError
from helm.text.sampling import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt to continue.

    tokens: the whole context so far, checked to fit. max_tokens: new tokens at most. sampling:
    resolved; its stop strings are the caller's business. stop_tokens: ids that end the output.
    client: whose request it is. constraint: what the output must obey, see helm.text.structured.
    streamed: whether somebody reads its tokens as they come; prompts are paced beside such
    requests alone.
    """

    tokens: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_tokens: tuple[int, ...]
    client: int = 0
    constraint: object | None = None
    streamed: bool = True


@dataclass
class StepOutput:
    """What came since the last one.

    tokens: new ids; the one that ended the output is among them. logprobs: per token (logprob,
    [(id, logprob), ...] of the likeliest), natural logarithms; None: not asked for. finish:
    "stop", "length" or "error" with the last tokens, else None. error: why it failed.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    finish: str | None = None
    error: HelmError | None = None
