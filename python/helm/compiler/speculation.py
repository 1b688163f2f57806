"""From which acceptance on guesses of tokens pay, by prices of longer steps. Guesses nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from helm.compiler.solve import Study
from helm.compiler.steps import PlannedSteps
from helm.compiler.timeline import played

MOST = 8  # guesses of a sequence that are priced
_TURNS = "two groups of requests take turns, in whose steps nothing is guessed"
_FAR = "KV pages overflow to host memory, where a step of several tokens is computed otherwise"
_ROOM = "steps have no rows of logits for guesses"
_CLOSE = 1e-6
_SUREST = 0.99  # share of right guesses that is ever counted on


@dataclass(frozen=True)
class GuessPrice:
    """guesses: of each sequence in a step. step_s: seconds of the step with them. pays_from: the
    share of guesses that must be right, token by token, for as many tokens/s as without them; None:
    not even if nearly all are."""

    guesses: int
    step_s: float
    pays_from: float | None


@dataclass(frozen=True)
class GuessPrices:
    """alone_s: seconds of a step without guesses. prices: by their number, from one on. reason: why
    nothing is guessed with this plan; then there are no prices."""

    alone_s: float
    prices: tuple[GuessPrice, ...]
    reason: str = ""

    @property
    def least(self) -> GuessPrice | None:
        """The one that pays from the least share on; None if none does."""
        paying = [price for price in self.prices if price.pays_from is not None]
        return min(paying, key=lambda price: price.pays_from or 0.0, default=None)

    def best(self, rate: float) -> tuple[int, float]:
        """Of guesses that are right at this rate, how many bring most, and how many times the
        tokens/s without any; (0, 1.0) if none pays."""
        gains = [(expected(rate, p.guesses) * self.alone_s / p.step_s, p) for p in self.prices]
        gain, price = max(gains, key=lambda pair: pair[0], default=(1.0, None))
        return (0, 1.0) if price is None or gain <= 1.0 else (price.guesses, gain)

    def to_dict(self) -> dict[str, Any]:
        least = self.least
        return {
            "step_s": {0: self.alone_s, **{price.guesses: price.step_s for price in self.prices}},
            "pays_from": None if least is None else least.pays_from,
            "guesses": 0 if least is None else least.guesses,
            "reason": self.reason,
        }


def guess_prices(study: Study) -> GuessPrices:
    """Of the study's plan, by its own model of time."""
    best, plan = study.best, study.placed
    alone_s = step_s(study, 0)
    reason = _TURNS if best.decode_groups > 1 else _FAR if plan.overflows else ""
    most = min(MOST, min(plan.limits.step_outputs, best.step_tokens) // best.sequences - 1)
    if reason or most < 1:
        return GuessPrices(alone_s, (), reason or _ROOM)
    prices = []
    for guesses in range(1, most + 1):
        seconds = step_s(study, guesses)
        prices.append(GuessPrice(guesses, seconds, break_even(guesses, seconds / alone_s)))
    return GuessPrices(alone_s, tuple(prices))


def step_s(study: Study, guesses: int) -> float:
    """Seconds of a decode step in which each sequence has so many guesses, at the expected context.

    Priced as one of as many more sequences, which read as many positions in all: rows of one
    sequence read its KV together.
    """
    best, rows = study.best, 1 + guesses
    groups = best.decode_groups if guesses == 0 else 1
    wider = dataclasses.replace(best, sequences=rows * best.sequences, decode_groups=groups)
    context = max(1, study.workload.expected_context // rows)
    flights = PlannedSteps(study.search, wider, study.placed).decode(context)
    return float(played(flights, groups)[1])


def expected(rate: float, guesses: int) -> float:
    """Tokens that a step brings on average: 1 + rate + ... + rate^guesses."""
    return sum(rate**right for right in range(guesses + 1))


def break_even(guesses: int, ratio: float) -> float | None:
    """The rate at which so many guesses bring as many tokens as a step takes times as long; None if
    there is none that may be counted on."""
    if ratio > expected(_SUREST, guesses):
        return None
    low, high = 0.0, _SUREST
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if expected(middle, guesses) >= ratio else (middle, high)
    return high
