"""Whether weights are copied or stay mapped: what either costs. Knows no plan and no file.

Copying takes time once; mapped weights slow down every product that waits for memory. Rates hold
for files in the page cache: nothing is known of the disk that a file may still have to come from,
and both ways wait for it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from helm.compiler.workload import Objective
from helm.errors import InvalidError
from helm.profile import CpuProfile
from helm.units import size_text

Loading = Literal["copied", "mapped"]
WEIGHTS = ("auto", "copied", "mapped")
# Answers until a loaded model is closed, where nobody says: a conversation, a batch, a service.
# On common machines copying pays after one or two of 128 tokens, so that any number above decides
# alike.
ANSWERS = 10
# Of a machine that was not measured: those of the one in bench/README.md. Copying is a share of
# reading, since it is bound by memory too: pages are cleared, the file is read, the copy written.
ASSUMED_MAPPED_RATIO = 0.94
ASSUMED_MATVEC_BYTES_PER_S = 25e9
_ASSUMED_COPY_SHARE = 0.2


@dataclass(frozen=True)
class LoadingRequest:
    """weights: "copied", "mapped", or "auto" for what takes less time in all. tokens: output tokens
    until the model is closed, None: those of ANSWERS answers. objective, batch and cpu, the rates
    of this machine if they are known, count for plans that are made without a profile."""

    weights: str = "auto"
    tokens: int | None = None
    objective: Objective = "total"
    batch: int = 1
    cpu: CpuProfile | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise InvalidError(
                f"[plan] weights must be {', '.join(WEIGHTS)}, got {self.weights!r}; choose one "
                "with --weights"
            )


@dataclass(frozen=True)
class LoadingChoice:
    """Why weights are loaded as they are, for people.

    copy_bytes: weights that the CPU would hold if they were copied, of those that need no
    conversion and could stay mapped. copy_s: what copying them takes. mapped_decode_ratio: decode
    rate with mapped weights over that with copied ones. pays_after_tokens: output tokens from which
    on copying takes less time in all; None: never. assumed: none of this was measured on the
    machine.
    """

    reason: str
    copy_bytes: int
    copy_s: float
    mapped_decode_ratio: float
    pays_after_tokens: float | None
    assumed: bool


@dataclass(frozen=True)
class Waiting:
    """Seconds that an answer to each of `batch` requests waits for copied weights on the CPU: in
    its prefill, and in each of its `output` decode steps, which take step_s."""

    prefill_s: float
    decode_s: float
    step_s: float
    batch: int
    output: int
    objective: Objective


@dataclass(frozen=True)
class Situation:
    """What the choice depends on besides rates. copy_bytes: see LoadingChoice; share: of all bytes
    that the CPU waits for, those. spare_bytes: memory that the plan leaves. visits: whether weights
    visit an accelerator."""

    copy_bytes: int
    share: float
    spare_bytes: int
    visits: bool
    waiting: Waiting


def choose(
    request: LoadingRequest, at: Situation, cpu: CpuProfile | None
) -> tuple[Loading, LoadingChoice]:
    """By price, unless it is asked for or one of them will not do."""
    ratio, copy_rate, assumed = _rates(cpu)
    waiting, tokens = at.waiting, request.tokens
    if tokens is None:
        tokens = ANSWERS * waiting.output * waiting.batch
    slower = at.share * (1.0 / ratio - 1.0)
    copy_s = at.copy_bytes / copy_rate
    saved_s = slower * _counted_s(waiting) / (waiting.output * waiting.batch)
    choice = LoadingChoice(
        reason="",
        copy_bytes=at.copy_bytes,
        copy_s=copy_s,
        mapped_decode_ratio=waiting.step_s / (waiting.step_s + slower * waiting.decode_s),
        pays_after_tokens=copy_s / saved_s if saved_s > 0.0 else None,
        assumed=assumed,
    )
    if waiting.objective == "decode" and saved_s > 0.0:  # which loading is no part of
        choice = dataclasses.replace(choice, pays_after_tokens=0.0)
    loading, reason = _decide(request, at, choice, tokens)
    return loading, dataclasses.replace(choice, reason=reason)


def _rates(cpu: CpuProfile | None) -> tuple[float, float, bool]:
    """(mapped over copied rate, bytes/s of copying, whether they are assumed)"""
    if cpu is None or cpu.mapped_matvec_ratio is None or cpu.copy_bytes_per_s is None:
        read = ASSUMED_MATVEC_BYTES_PER_S if cpu is None else max(cpu.matvec_bytes_per_s.values())
        return ASSUMED_MAPPED_RATIO, _ASSUMED_COPY_SHARE * read, True
    return min(1.0, cpu.mapped_matvec_ratio), cpu.copy_bytes_per_s, False


def _counted_s(waiting: Waiting) -> float:
    """Of an answer, what the objective counts."""
    decode = waiting.output * waiting.decode_s
    if waiting.objective == "ttft":
        return waiting.prefill_s
    return decode if waiting.objective == "decode" else waiting.prefill_s + decode


def _decide(
    request: LoadingRequest, at: Situation, choice: LoadingChoice, tokens: int
) -> tuple[Loading, str]:
    if request.weights != "auto":
        asked: Loading = "mapped" if request.weights == "mapped" else "copied"
        return asked, f"as asked for; {price_text(choice)}" if at.copy_bytes else "as asked for"
    if at.copy_bytes == 0:
        return "copied", "no weights of the CPU could stay in their files as they are"
    if at.visits:
        return "copied", "the accelerator fetches copied weights at the full speed of its link"
    if at.copy_bytes > at.spare_bytes:
        lacking = size_text(at.copy_bytes - at.spare_bytes)
        return "mapped", f"a copy beside the files in the page cache lacks {lacking} of memory"
    after = choice.pays_after_tokens
    text = price_text(choice)
    if after:
        text += f"; {tokens:,} are expected"
    return ("mapped" if after is None or tokens < after else "copied"), text


def price_text(choice: LoadingChoice) -> str:
    """What copying costs and brings."""
    cost = f"copying {size_text(choice.copy_bytes)} takes {choice.copy_s:.2g} s"
    if choice.assumed:
        cost = f"{cost} on a common machine (helm-llm profile measures this one)"
    if choice.pays_after_tokens is None:
        return f"{cost} and saves nothing"
    slower = (1.0 - choice.mapped_decode_ratio) * 100
    text = f"{cost}, decode with mapped weights is {slower:.0f} % slower"
    if choice.pays_after_tokens == 0.0:
        return f"{text}, and decode alone counts"
    return f"{text}: it pays after {math.ceil(choice.pays_after_tokens):,} output tokens"
