"""Results of a generation, and the assembly of their text; knows nothing of engines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from helm.text.stop_strings import TextAssembler
from helm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Timings:
    """What a generation took; rates are 0 where nothing was measured.

    ttft_s: from the call to the first token, waiting included.
    prefill_s, prefill_tokens: from admission to the first token; prompt tokens computed (those
    reused from a kept KV cache are not among them).
    decode_s, decode_tokens: from the first token to the last; tokens after the first.
    decode_bytes: weights and KV read for them.
    guessed_tokens, accepted_tokens: computed on a guess, and of them those that were right, which
    took no step of their own. saved_s: of decode by that; below 0 where it took longer.
    """

    ttft_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_bytes: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    saved_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return _rate(self.prefill_tokens, self.prefill_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Generated tokens per second after the first."""
        return _rate(self.decode_tokens, self.decode_s)

    @property
    def decode_bytes_per_s(self) -> float:
        """Memory bandwidth reached while decoding, bytes/s."""
        return _rate(self.decode_bytes, self.decode_s)

    @classmethod
    def from_native(cls, native: dict[str, Any]) -> Timings:
        """From the runtime's per-request counters."""
        return cls(
            ttft_s=float(native["first_token_s"]),
            queue_s=float(native["queue_s"]),
            prefill_s=float(native["prefill_s"]),
            prefill_tokens=int(native["prefill_tokens"]),
            decode_s=float(native["decode_s"]),
            decode_tokens=int(native["decode_tokens"]),
            decode_bytes=int(native["decode_bytes"]),
            guessed_tokens=int(native["guessed_tokens"]),
            accepted_tokens=int(native["accepted_tokens"]),
            saved_s=float(native["saved_s"]),
        )

    def to_dict(self) -> dict[str, float]:
        """All fields and rates, for JSON."""
        return {
            **asdict(self),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "decode_bytes_per_s": self.decode_bytes_per_s,
        }


@dataclass(frozen=True)
class Completion:
    """A finished (or cancelled) generation.

    text: what was generated, without special tokens, cut before a stop string.
    tokens: every generated token, the end-of-sequence token included.
    prompt_tokens: length of the prompt, special tokens included.
    finish_reason: "stop" (end of sequence or stop string), "length", "cancelled", or "error": this
    one of several prompts failed, with the message `error`; the text is what came before.
    logprobs: when asked for, one record per token: {"token", "token_id", "logprob",
    "top_logprobs": [{"token", "token_id", "logprob"}, ...]}, natural logarithms.
    seed: what was used to draw; the same seed and parameters give the same tokens.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    timings: Timings
    seed: int
    logprobs: list[dict[str, Any]] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `prompt_tokens` is the count."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "logprobs": self.logprobs,
            "seed": self.seed,
            "timings": self.timings.to_dict(),
        }


@dataclass(frozen=True)
class TextChunk:
    """A piece of a streamed generation.

    text: the new text; concatenated over all chunks it equals the completion's.
    tokens: the tokens since the previous chunk.
    finish_reason: None until the last chunk, which also carries the `completion`.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    completion: Completion | None = None


class NativeToken(Protocol):
    """What the runtime reports of one generated token."""

    @property
    def id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...
    @property
    def finish(self) -> str: ...


@dataclass
class Output:
    """One request's result while it grows."""

    assembler: TextAssembler
    prompt_tokens: int
    seed: int
    tokenizer: Tokenizer | None = None
    with_logprobs: bool = False
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    failure: Exception | None = None
    _streamed: int = 0  # tokens already in a chunk

    def add(self, token: NativeToken) -> str:
        """Takes one token of the runtime; returns the text it releases."""
        if self.finish_reason is not None:
            return ""  # computed in the same call, after a stop string ended the text
        self.tokens.append(token.id)
        if self.with_logprobs:
            self.logprobs.append(self._record(token))
        text = self.assembler.push(token.id, shown=token.finish != "stop")
        if not self.assembler.stopped and token.finish:
            text += self.assembler.flush()
        if self.assembler.stopped:
            self.finish_reason = "stop"
        elif token.finish:
            self.finish_reason = token.finish
        self.pieces.append(text)
        return text

    def cancel(self) -> str:
        """Ends an unfinished result; returns the text that was still held back."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason = "cancelled"
        text = self.assembler.flush()
        self.pieces.append(text)
        return text

    def fail(self, error: Exception) -> None:
        """Ends the result with what has been shown of it."""
        self.finish_reason, self.failure = "error", error

    def chunk(self, text: str, completion: Completion | None = None) -> TextChunk:
        """The stream's next piece: `text` and the tokens since the last one."""
        start, self._streamed = self._streamed, len(self.tokens)
        return TextChunk(
            text=text,
            tokens=self.tokens[start:],
            finish_reason=completion.finish_reason if completion else None,
            logprobs=self.logprobs[start:] if self.with_logprobs else None,
            completion=completion,
        )

    def completion(self, timings: Timings) -> Completion:
        """The result so far."""
        return Completion(
            text="".join(self.pieces),
            tokens=list(self.tokens),
            prompt_tokens=self.prompt_tokens,
            finish_reason=self.finish_reason or "cancelled",
            timings=timings,
            seed=self.seed,
            logprobs=list(self.logprobs) if self.with_logprobs else None,
            error=None if self.failure is None else _message(self.failure),
        )

    def _record(self, token: NativeToken) -> dict[str, Any]:
        return {
            **self._entry(token.id, token.logprob),
            "top_logprobs": [self._entry(i, logprob) for i, logprob in token.top],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.token_text(token) if self.tokenizer else None
        return {"token": text, "token_id": int(token), "logprob": float(logprob)}


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


def _rate(amount: float, seconds: float) -> float:
    rate = amount / seconds if seconds > 0 else 0.0
    return rate if math.isfinite(rate) else 0.0
