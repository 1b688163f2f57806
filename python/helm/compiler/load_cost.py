"""How weights come into the CPU's memory, and what each way costs. Knows no plan and no file.

Copied ones take time once. Mapped ones take none, and slow down every product that waits for
memory. Compressed ones, bf16 in 12 bits each, exactly, take more time than copied ones, and speed
up products that wait for memory; those of several tokens compute, and may become slower. Rates hold
for files in the page cache: nothing is known of the disk that a file may still have to come from,
and all ways wait for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from helm.base.arguments import shown
from helm.base.sizes import size_text
from helm.errors import InvalidError
from helm.machine.rates import CpuProfile, compressed_rate
from helm.plan.records import Loading, LoadingChoice, Objective

WEIGHTS = ("auto", "copied", "mapped", "compressed")
NOTHING_TO_MAP = "no weights of the CPU could stay in their files as they are"
ONLY_COPIED_VISIT = "only copied weights reach the GPU at the full speed of its link"
# Answers until a loaded model is closed, where nobody says: a conversation, a batch, a service.
# On common machines copying pays after one or two of 128 tokens, so that any number above decides
# alike.
ANSWERS = 10
# Of a machine that was not measured: of the Zen 4 one in bench/results. Copying is a share of
# reading, since it is bound by memory too: pages are cleared, the file is read, the copy written.
ASSUMED_MAPPED_RATIO = 0.94
ASSUMED_MATVEC_BYTES_PER_S = 25e9
_ASSUMED_COPY_SHARE = 0.2
_ASSUMED_COMPRESS_SHARE = 0.5  # of copying


@dataclass(frozen=True)
class LoadingRequest:
    """weights: one of WEIGHTS, "auto" for what takes less time in all. tokens: output tokens
    until the model is closed, None: those of ANSWERS answers. objective, batch and cpu, the rates
    of this machine if they are known, count for plans that are made without a profile.
    compressed_ratio: see CpuProfile, for machines of which nothing else is known; where it is not
    known either, "auto" compresses no weights that fit as they are."""

    weights: str = "auto"
    tokens: int | None = None
    objective: Objective = "total"
    batch: int = 1
    cpu: CpuProfile | None = None
    compressed_ratio: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise InvalidError(
                f"[plan] weights must be {', '.join(WEIGHTS)}, got {shown(self.weights)}"
            )


@dataclass(frozen=True)
class Waiting:
    """Seconds that an answer of `output` tokens to each of `batch` requests takes with copied
    weights on the CPU. They run in so many waves of as many at once: of a wave, in its prefill, in
    steps of prompt_tokens, and in each of its decode steps, of step_s in all, whose products have
    decode_tokens rows. prefill_s, decode_s: waiting for weights; prefill_products_s,
    decode_products_s: matrix products, whether they wait or compute."""

    decode_s: float
    decode_products_s: float
    step_s: float
    prompt_tokens: int
    decode_tokens: int
    batch: int
    output: int
    objective: Objective
    waves: int = 1
    prefill_s: float = 0.0
    prefill_products_s: float = 0.0

    @property
    def counted_s(self) -> float:
        """Of the waiting, what the objective counts."""
        return self._counted(self.prefill_s, self.decode_s)

    def saved_by_compressing_s(self, ratios: Mapping[int, float]) -> float:
        """Of what the objective counts, if all weights were compressed; negative: what it costs.
        ratios: see CpuProfile.compressed_ratio."""
        prefill = self.prefill_products_s * _saved(ratios, self.prompt_tokens)
        return self._counted(prefill, self.decode_products_s * _saved(ratios, self.decode_tokens))

    def _counted(self, prefill_s: float, decode_s: float) -> float:
        if self.objective == "ttft":
            return self.waves * prefill_s
        if self.objective == "decode":
            return self.waves * self.output * decode_s
        return self.waves * (prefill_s + (self.output - 1) * decode_s)  # prefill gives the first


def _saved(ratios: Mapping[int, float], tokens: int) -> float:
    """Share of the time of products of so many tokens."""
    return 1.0 - 1.0 / compressed_rate(ratios, tokens)


@dataclass(frozen=True)
class Situation:
    """What the choice depends on besides rates. copy_bytes, compress_bytes, compressed_bytes: see
    LoadingChoice; share, compress_share: of the bytes of all its matrices, those. spare_bytes:
    memory that the plan with copied weights leaves. visits: whether weights visit an
    accelerator."""

    copy_bytes: int
    share: float
    spare_bytes: int
    visits: bool
    waiting: Waiting
    compress_bytes: int = 0
    compressed_bytes: int = 0
    compress_share: float = 0.0


@dataclass(frozen=True)
class _Rates:
    """Of reading mapped weights over that of copied ones; CpuProfile.compressed_ratio; bytes/s of
    loading."""

    mapped: float
    compressed: Mapping[int, float] | None
    copy: float
    compress: float
    assumed: bool


def choose(
    request: LoadingRequest, at: Situation, cpu: CpuProfile | None
) -> tuple[Loading, LoadingChoice]:
    """By price, unless it is asked for or one of them will not do."""
    rates = _rates(cpu, request.compressed_ratio)
    waiting, tokens = at.waiting, request.tokens
    if tokens is None:
        tokens = ANSWERS * waiting.output * waiting.batch
    slower = at.share * (1.0 / rates.mapped - 1.0)
    answer_s, faster = 0.0, None  # what compressing saves, and the decode rate then
    if rates.compressed is not None:
        answer_s = at.compress_share * waiting.saved_by_compressing_s(rates.compressed)
        saved = at.compress_share * _saved(rates.compressed, waiting.decode_tokens)
        faster = waiting.step_s / (waiting.step_s - saved * waiting.decode_products_s)
    copy_s = at.copy_bytes / rates.copy
    compress_s = at.compress_bytes * max(0.0, 1.0 / rates.compress - 1.0 / rates.copy)
    choice = LoadingChoice(
        reason="",
        copy_bytes=at.copy_bytes,
        copy_s=copy_s,
        mapped_decode_ratio=waiting.step_s / (waiting.step_s + slower * waiting.decode_s),
        pays_after_tokens=_pays_after(copy_s, slower * waiting.counted_s, waiting),
        compress_bytes=at.compress_bytes,
        compressed_bytes=at.compressed_bytes,
        compress_s=compress_s,
        compressed_decode_ratio=faster,
        compressing_pays_after_tokens=_pays_after(compress_s, answer_s, waiting),
        assumed=rates.assumed,
    )
    answers = tokens / (waiting.output * waiting.batch)
    loads = 0.0 if waiting.objective == "decode" else 1.0
    seconds: dict[Loading, float] = {  # what the ways differ by, from loading to closing
        "mapped": answers * slower * waiting.counted_s,
        "copied": loads * copy_s,
        "compressed": loads * (copy_s + compress_s) - answers * answer_s,
    }
    loading, reason = _decide(request, at, choice, seconds, tokens)
    return loading, dataclasses.replace(choice, reason=reason)


def _rates(cpu: CpuProfile | None, compressed: Mapping[int, float] | None) -> _Rates:
    if cpu is not None and cpu.compressed_ratio is not None:
        compressed = cpu.compressed_ratio
    assumed = cpu is None or cpu.mapped_matvec_ratio is None or cpu.copy_bytes_per_s is None
    if assumed:
        read = ASSUMED_MATVEC_BYTES_PER_S if cpu is None else max(cpu.matvec_bytes_per_s.values())
        mapped, copy = ASSUMED_MAPPED_RATIO, _ASSUMED_COPY_SHARE * read
    else:
        assert cpu is not None
        assert cpu.mapped_matvec_ratio is not None
        assert cpu.copy_bytes_per_s is not None
        mapped, copy = min(1.0, cpu.mapped_matvec_ratio), cpu.copy_bytes_per_s
    compress = None if cpu is None else cpu.compress_bytes_per_s
    return _Rates(mapped, compressed, copy, compress or _ASSUMED_COMPRESS_SHARE * copy, assumed)


def _pays_after(load_s: float, answer_s: float, waiting: Waiting) -> float | None:
    """Output tokens after which a way that takes load_s longer to load, and saves answer_s of an
    answer, takes less time in all; None: never."""
    saved_s = answer_s / (waiting.output * waiting.batch)
    if saved_s <= 0.0:
        return None
    return 0.0 if waiting.objective == "decode" else load_s / saved_s  # loading is no part of it


def _decide(
    request: LoadingRequest,
    at: Situation,
    choice: LoadingChoice,
    seconds: dict[Loading, float],
    tokens: int,
) -> tuple[Loading, str]:
    text = price_text(choice)
    if request.weights != "auto":
        asked: Loading = request.weights  # type: ignore[assignment]  # checked by LoadingRequest
        return asked, f"as asked for; {text}" if text else "as asked for"
    if at.visits and at.copy_bytes > 0:
        return "copied", ONLY_COPIED_VISIT
    ways: list[Loading] = ["copied"] if at.copy_bytes == 0 else ["mapped", "copied"]
    if at.compress_bytes > 0 and choice.compressed_decode_ratio is not None and not at.visits:
        ways.append("compressed")
    if ways == ["copied"]:
        return "copied", NOTHING_TO_MAP
    best = min(ways, key=lambda way: seconds[way])
    room = at.spare_bytes
    if best == "compressed":
        room += at.compress_bytes - at.compressed_bytes
    if at.copy_bytes > room:
        lacking = size_text(at.copy_bytes - room)
        return "mapped", f"a copy beside the files in the page cache lacks {lacking} of memory"
    if choice.pays_after_tokens or choice.compressing_pays_after_tokens:
        text += f"; {tokens:,} are expected"
    return best, text


def price_text(choice: LoadingChoice) -> str:
    """What copying and compressing cost and bring; empty where there is nothing of either."""
    parts = []
    if choice.copy_bytes > 0:
        parts.append(_copying_text(choice))
    if choice.compress_bytes > 0:
        parts.append(_compressing_text(choice))
    return "; ".join(parts)


def _copying_text(choice: LoadingChoice) -> str:
    cost = f"copying {size_text(choice.copy_bytes)} takes {choice.copy_s:.2g} s"
    if choice.assumed:
        cost = f"{cost} on a common machine (helm-llm profile measures this one)"
    slower = (1.0 - choice.mapped_decode_ratio) * 100
    benefit = f"decode with mapped weights is {slower:.0f} % slower"
    return _paying_text(cost, benefit, choice.pays_after_tokens)


def _compressing_text(choice: LoadingChoice) -> str:
    cost = (
        f"compressing {size_text(choice.compress_bytes)} to {size_text(choice.compressed_bytes)}, "
        f"exactly, takes {choice.compress_s:.2g} s more"
    )
    if choice.compressed_decode_ratio is None:
        return f"{cost}, for a rate that helm-llm profile measures"
    faster = (choice.compressed_decode_ratio - 1.0) * 100
    if faster < -0.5:
        return f"{cost}, and decode is {-faster:.0f} % slower then"
    return _paying_text(
        cost, f"decode is {faster:.0f} % faster then", choice.compressing_pays_after_tokens
    )


def _paying_text(cost: str, benefit: str, after: float | None) -> str:
    if after is None:
        return f"{cost} and saves nothing"
    if after == 0.0:
        return f"{cost}, {benefit}, and decode alone counts"
    return f"{cost}, {benefit}: it pays after {math.ceil(after):,} output tokens"
