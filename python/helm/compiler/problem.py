"""What the search must keep to: the limits of memory, and the decisions that it may take. Prices
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from helm.base.arguments import shown
from helm.base.sizes import size_text
from helm.errors import InvalidError
from helm.plan.records import WATERMARK

Overflow = Literal["stream", "cpu"]
Mode = Literal["compute", "visit"]
Policy = Literal[
    "auto", "layer-partition", "cut", "zigzag", "helm-placement", "all-cpu", "workload-distribution"
]
# The last are published by others, see `helm.compiler.visits.policies`.
PUBLISHED_POLICIES: tuple[Policy, ...] = (
    "zigzag", "helm-placement", "all-cpu", "workload-distribution",
)  # fmt: skip
POLICIES: tuple[Policy, ...] = ("auto", "layer-partition", "cut", *PUBLISHED_POLICIES)
KvPlace = Literal["device", "host", "any"]
# Of the host's memory, left for what a process takes while it runs a plan: page tables, results,
# buffers of loading, threads; interpreter and tokenizer are there before. SmolLM2-135M grew by
# 5 MiB of resident memory beyond its plan. Where an accelerator takes part, for its driver, too.
LEAST_RESERVE_BYTES = 64 << 20
MOST_RESERVE_BYTES = 512 << 20
_RESERVE_SHARE = 16  # of the memory, between the two


def host_reserve(taken_bytes: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What stays free beside a plan on the CPU alone that takes so much: a sixteenth of the memory
    that both need, within bounds."""
    share = -(-np.asarray(taken_bytes, np.int64) // (_RESERVE_SHARE - 1))
    return np.clip(share, LEAST_RESERVE_BYTES, MOST_RESERVE_BYTES)


def beside_reserve(memory_bytes: int) -> int:
    """The most that a plan may take of so much memory; negative where that is less than a
    reserve."""
    share = -(-memory_bytes // _RESERVE_SHARE)
    return memory_bytes - min(max(share, LEAST_RESERVE_BYTES), MOST_RESERVE_BYTES)


@dataclass(frozen=True)
class Slower:
    """Memory on slower nodes that weights may lie on. shares: of the weights that a step reads, for
    each tier of the profile. near_bytes: near the cores, for all but weights; None: there is no
    other."""

    shares: tuple[float, ...] = ()
    near_bytes: int | None = None


@dataclass(frozen=True)
class ResourceLimits:
    """What a plan may take. None takes all that the profile states.

    accelerator_weights_bytes, accelerator_kv_bytes: bounds on weights and on KV pages alone within
    accelerator_bytes. cpu_near_bytes: a bound on all of the CPU but weights. cpu_reserve_bytes
    None: what `host_reserve` says, and MOST_RESERVE_BYTES beside an accelerator;
    accelerator_reserve_bytes None: what the profile states. sequences and step_tokens size the
    activation buffers; steps may be longer where weights visit. watermark: the share of the
    accelerator's slots for KV blocks that stays in use once blocks leave for host memory.
    """

    cpu_bytes: int | None = None
    accelerator_bytes: int | None = None
    accelerator_weights_bytes: int | None = None
    accelerator_kv_bytes: int | None = None
    cpu_near_bytes: int | None = None
    cpu_reserve_bytes: int | None = None
    accelerator_reserve_bytes: int | None = None
    step_tokens: int = 512
    page_tokens: int = 512
    sequences: int = 1
    watermark: float = WATERMARK

    def __post_init__(self) -> None:
        for name in (
            "cpu_bytes",
            "accelerator_bytes",
            "accelerator_weights_bytes",
            "accelerator_kv_bytes",
            "cpu_near_bytes",
            "cpu_reserve_bytes",
            "accelerator_reserve_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= 2**60):
                raise InvalidError(f"[plan] {name} is {shown(value)}; expected bytes from 0")
        for name, most in (("step_tokens", 2**20), ("page_tokens", 2**20), ("sequences", 4096)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidError(f"[plan] {name} is {shown(value)}; expected 1 to {most}")
        check_watermark(self.watermark, "[plan] watermark")


def check_watermark(value: object, what: str) -> None:
    """InvalidError that begins with `what` unless `value` is a share."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidError(f"{what} is {shown(value)}; expected a share from 0 to 1")


@dataclass(frozen=True)
class DiskWeights:
    """Weights of a unit, by its place in the graph, that may be read from disk in every step.
    names: their tensors; held_bytes: what they take in memory; read_bytes: what a read takes, with
    what aligns it."""

    number: int
    names: tuple[str, ...]
    held_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class Drive:
    """What it gives of the checkpoint's files in `folder` while all drives are read."""

    folder: str
    bytes_per_s: float


@dataclass(frozen=True)
class DiskSpace:
    """In the order of a step. drives: each has them all."""

    weights: tuple[DiskWeights, ...]
    drives: tuple[Drive, ...]

    @property
    def bytes_per_s(self) -> float:
        """Of all drives at once, which share by their rates."""
        return sum(drive.bytes_per_s for drive in self.drives)

    @property
    def rate_text(self) -> str:
        """That rate and, of several drives, what each gives."""
        text = f"{size_text(int(self.bytes_per_s))} per second"
        if len(self.drives) == 1:
            return text
        each = [f"{size_text(int(drive.bytes_per_s))} of {drive.folder}" for drive in self.drives]
        return f"{text} from {len(each)} drives at once ({', '.join(each)})"


@dataclass(frozen=True)
class Space:
    """The decisions that the search may take; narrow it to fix one.

    one_boundary: the published layer partition, a single cut of the list of layers: the first on
    the CPU, the rest on the accelerator. kv: where pages of accelerator layers lie: "any" in the
    accelerator's memory, as many as may be, and the rest in host memory, "device" all in the
    accelerator's, "host" all in host memory, which the runtime does not execute. overflow: how
    attention reaches those in host memory. visit_steps: tokens a step may have where weights of
    CPU layers visit the accelerator, besides those of the limits. decode_groups: sequences take
    turns in so many groups. threads None: all counts of the sweep. mapped_weights: those of the CPU
    lie in mapped files, from where they visit the accelerator more slowly if it cannot lock them.
    policy: "auto": layers and the head may be cut between both devices, "layer-partition": none is,
    "cut": some are, else a published one. columns: a multiple of which columns of weights are cut;
    uncut: why the weights cannot be cut, "" if they can. disk: what may be read from disk where
    nothing else fits.
    """

    one_boundary: bool = False
    kv: KvPlace = "any"
    overflow: tuple[Overflow, ...] = ("stream", "cpu")
    prefill: tuple[Mode, ...] = ("compute", "visit")
    visit_steps: tuple[int, ...] = (2048, 8192)
    overlap: tuple[bool, ...] = (False, True)
    decode_groups: tuple[int, ...] = (1, 2)
    threads: tuple[int, ...] | None = None
    mapped_weights: bool = False
    policy: Policy = "layer-partition"
    columns: int = 32
    uncut: str = ""
    disk: DiskSpace | None = None
