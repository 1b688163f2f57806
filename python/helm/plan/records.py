"""What a plan says beside what the runtime executes: the workload that it was made for, what was
predicted, and why weights are loaded as they are. Computes none of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from helm.base.arguments import is_one_of, shown
from helm.base.jsonio import Reader, decode
from helm.errors import InvalidError, PlanError

Objective = Literal["decode", "ttft", "total", "throughput", "serve"]
Loading = Literal["copied", "mapped", "compressed"]
OBJECTIVES: tuple[Objective, ...] = ("decode", "ttft", "total", "throughput", "serve")
# Share of an accelerator's slots for KV blocks that stays in use once blocks leave for host memory;
# the rest takes a step's new blocks while old ones leave.
WATERMARK = 0.8


def tokens_within(
    context: int, prompt: int | None = None, output: int | None = None
) -> tuple[int, int]:
    """Tokens of a prompt and of an answer; None: 512 and 128, or what the context holds."""
    if prompt is None:
        prompt = max(1, min(512, context // 2 if output is None else context - output))
    return prompt, max(1, min(128, context - prompt)) if output is None else output


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `prompt` tokens that each want `output` tokens.

    context: positions for which KV pages are reserved per sequence; 0 means prompt + output.
    objective: what to make least: the time of one decode step, the time to first token, the time
    of the whole workload, that time with fewer sequences at once allowed, or the time of a token
    while requests come and go, `batch` of them at once.
    """

    prompt: int = 512
    output: int = 128
    batch: int = 1
    context: int = 0
    objective: Objective = "total"

    def __post_init__(self) -> None:
        for name, most in (("prompt", 2**30), ("output", 2**30), ("batch", 4096)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidError(f"[plan] {name} is {shown(value)}; expected 1 to {most}")
        if not is_one_of(self.objective, OBJECTIVES):
            raise InvalidError(
                f"[plan] objective is {shown(self.objective)}; expected {', '.join(OBJECTIVES)}"
            )
        if self.context == 0:
            object.__setattr__(self, "context", self.prompt + self.output)
        if type(self.context) is not int or self.context < self.prompt + self.output:
            raise InvalidError(
                f"[plan] context is {shown(self.context)}, prompt and output take "
                f"{self.prompt + self.output}; raise the context or shorten them"
            )

    @classmethod
    def within(cls, context: int) -> Workload:
        """One request that has as many tokens as are usual, or as the context holds."""
        prompt, output = tokens_within(context)
        return cls(prompt, output, context=max(2, context))

    @property
    def expected_context(self) -> int:
        """Positions attended by the middle output token."""
        return self.prompt + (self.output + 1) // 2


@dataclass(frozen=True)
class Predicted:
    """Predicted seconds and rates. decode_s: until all sequences have one more token, at the
    expected context.
    total_s: the workload from its first to its last token. The terms add up to decode_s and
    ttft_s; see `helm.compiler.times.TERMS`."""

    ttft_s: float
    decode_s: float
    decode_tokens_per_s: float
    full_context_decode_s: float
    full_context_decode_tokens_per_s: float
    total_s: float
    tokens_per_s: float
    decode_terms: dict[str, float]
    prefill_terms: dict[str, float]

    @property
    def sequences(self) -> int:
        """How many run at once."""
        return round(self.decode_tokens_per_s * self.decode_s)


@dataclass(frozen=True)
class LoadingChoice:
    """Why weights are loaded as they are, for people.

    copy_bytes: weights that the CPU would hold if they were copied, of those that need no
    conversion and could stay mapped. copy_s: what copying them takes. mapped_decode_ratio: decode
    rate with mapped weights over that with copied ones. pays_after_tokens: output tokens from which
    on copying takes less time in all than mapping; None: never. compress_bytes: weights on the CPU,
    as they are copied, that could be compressed; compressed_bytes: what they take then. compress_s:
    what compressing takes longer than copying. compressed_decode_ratio: decode rate with compressed
    weights over that with copied ones, None: not known. compressing_pays_after_tokens: output
    tokens from which on it takes less time in all than copying; None: never. assumed: none of this
    was measured on the machine but, if it is known, compressed_decode_ratio.
    """

    reason: str
    copy_bytes: int
    copy_s: float
    mapped_decode_ratio: float
    pays_after_tokens: float | None
    compress_bytes: int
    compressed_bytes: int
    compress_s: float
    compressed_decode_ratio: float | None
    compressing_pays_after_tokens: float | None
    assumed: bool


@dataclass(frozen=True)
class ProfileIdentity:
    """The profile that predicted. digest: `Profile.digest`."""

    name: str
    estimated: bool
    digest: str


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen and the reason. missing: device -> bytes it lacks there. The
    times of a plan that does not fit are those it would reach with that memory."""

    label: str
    units_cpu: int
    units_accelerator: int
    embedding: str
    head: str
    fits: bool
    ttft_s: float
    decode_tokens_per_s: float
    missing: dict[str, int]
    reason: str


@dataclass(frozen=True)
class Prediction:
    """What the search knew when it chose; written at the top level of a plan, null without a
    profile. label: "all-cpu", "all-accelerator", "fill-accelerator", or "search" for any other."""

    label: str
    workload: Workload
    profile: ProfileIdentity
    predicted: Predicted
    bottleneck: str
    alternatives: tuple[Alternative, ...]


NO_PREDICTION: dict[str, Any] = dict.fromkeys(
    ("label", "workload", "profile", "predicted", "bottleneck", "alternatives")
)


def decode_prediction(root: Reader) -> Prediction | None:
    if root["predicted"].null:
        for key in NO_PREDICTION:
            if root[key].value not in (None, []):
                root[key].reject("expected null, as predicted is")
        return None
    try:
        workload = decode(Workload, root["workload"])
    except PlanError:
        raise
    except InvalidError as reason:
        root["workload"].reject(str(reason))
    predicted = decode(Predicted, root["predicted"])
    for key in ("ttft_s", "decode_s", "total_s"):
        root["predicted"][key].number(0.0)
    return Prediction(
        label=root["label"].string(),
        workload=workload,
        profile=decode(ProfileIdentity, root["profile"]),
        predicted=predicted,
        bottleneck=root["bottleneck"].string(),
        alternatives=tuple(decode(Alternative, item) for item in root["alternatives"].items()),
    )
