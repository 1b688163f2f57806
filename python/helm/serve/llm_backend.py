"""A backend over one LLM: its engine's thread steps for all. Knows no HTTP."""

from __future__ import annotations

import asyncio

from helm.session.async_llm import AsyncLLM

Scored = tuple[float, list[tuple[int, float]]]


class LlmBackend(AsyncLLM):
    """`Backend` and `ScoringBackend` of an LLM."""

    async def score(self, tokens: list[int], top: int) -> list[Scored | None]:
        """See `ScoringBackend`."""
        return await asyncio.to_thread(self._score, tokens, top)

    def _score(self, tokens: list[int], top: int) -> list[Scored | None]:
        import numpy

        rows = self._llm.logits(tokens)
        found: list[Scored | None] = [None]
        for row, token in zip(rows[:-1], tokens[1:], strict=True):
            high = row.max()
            logs = row - high - numpy.log(numpy.exp(row - high, dtype=numpy.float64).sum())
            best = numpy.argsort(-logs, kind="stable")[:top]
            found.append((float(logs[token]), [(int(i), float(logs[i])) for i in best]))
        return found
