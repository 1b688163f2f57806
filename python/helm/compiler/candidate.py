"""A candidate plan: its placement, predicted times, memory and the reason if it does not fit.

Holds what the search found; searches and prices nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from helm.base.sizes import size_text
from helm.compiler.problem import Drive, Mode, Overflow
from helm.compiler.times import F64
from helm.plan.records import Predicted, Workload

Seconds = TypeVar("Seconds", float, F64)
_CLOSE = 1e-9
_BOTTLENECKS = {
    "cpu_memory_s": "CPU memory bandwidth",
    "cpu_compute_s": "CPU matrix products",
    "cpu_attention_s": "CPU attention",
    "cpu_elementwise_s": "CPU elementwise ops",
    "cpu_fixed_s": "CPU fixed cost of ops",
    "accelerator_memory_s": "GPU memory bandwidth",
    "accelerator_compute_s": "GPU matrix products",
    "accelerator_attention_s": "GPU attention",
    "accelerator_elementwise_s": "GPU elementwise ops",
    "accelerator_fixed_s": "GPU fixed cost of ops",
    "link_s": "transfers between CPU and GPU",
    "overflow_s": "KV cache in RAM",
    "stream_s": "weights copied to the GPU",
    "disk_s": "weights read from disk",
}


@dataclass(frozen=True)
class Missing:
    """Bytes by which a candidate exceeds each memory."""

    cpu: int
    accelerator: int

    @property
    def total(self) -> int:
        return self.cpu + self.accelerator


@dataclass(frozen=True)
class SitePrice:
    """Predicted seconds of a decode step at the expected and at the full context if attention
    reaches pages in host memory this way."""

    site: Overflow
    decode_s: float
    full_context_decode_s: float


@dataclass(frozen=True)
class OverflowUse:
    """KV blocks that leave the accelerator. watermark: see `ResourceLimits`. near_positions: of
    each sequence, up to which none leave. far_blocks: of all sequences together, in host memory
    at the full context. sites: those that were priced."""

    watermark: float
    near_positions: int
    far_blocks: int
    sites: tuple[SitePrice, ...]


@dataclass(frozen=True)
class DiskUse:
    """What every step reads from disk. tensors: their names. held_bytes: what they would take in
    memory. step_bytes: what is read of them, with what aligns reads. ring_bytes: of memory that
    they pass through. drives: as of the DiskSpace."""

    tensors: tuple[str, ...]
    held_bytes: int
    step_bytes: int
    ring_bytes: int
    drives: tuple[Drive, ...]

    @property
    def bytes_per_s(self) -> float:
        """Of all drives at once."""
        return sum(drive.bytes_per_s for drive in self.drives)


BOTH = "both"  # in place of a device: a cut layer's, and a cut head's


@dataclass(frozen=True)
class CutUse:
    """How layers and the head are cut: `layers` of them behind those of the CPU. heads, elements,
    rows: KV heads, intermediate elements and rows of the vocabulary on the CPU, `of_...` how many
    of each there are; none or all leave attentions, mlps or the head whole. home: the device that
    keeps the residual."""

    layers: int
    heads: int
    of_heads: int
    elements: int
    of_elements: int
    rows: int
    of_rows: int
    home: str

    @property
    def text(self) -> str:
        """In words, as "34 layers cut: the CPU has 3 of 8 KV heads and 2,816 of 12,288
        elements"."""
        said = []
        if self.layers:
            layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
            if self.heads in (0, self.of_heads) and self.elements in (0, self.of_elements):
                there, here = (
                    ("attention", "the MLP") if self.heads == 0 else ("the MLP", "attention")
                )
                said.append(f"of {layers} the GPU has {there}, the CPU {here}")
                return self._with_head(said)
            attention = _share_text(self.heads, self.of_heads, "KV heads", "attention")
            mlp = _share_text(self.elements, self.of_elements, "elements", "the MLP")
            said.append(f"{layers} cut: the CPU has {attention} and {mlp}")
        return self._with_head(said)

    def _with_head(self, said: list[str]) -> str:
        if 0 < self.rows < self.of_rows:
            said = [*said, f"head cut: the CPU has {self.rows:,} of {self.of_rows:,} rows"]
        return "; ".join(said)


def _share_text(count: int, whole: int, what: str, unit: str) -> str:
    if 0 < count < whole:
        return f"{count:,} of {whole:,} {what}"
    return f"all of {unit}" if count else f"none of {unit}"


@dataclass(frozen=True)
class VisitUse:
    """How the layers' weights visit the accelerator in every step. policy: a published one, or
    "auto". buffers: of the ring, each of buffer_bytes. host_bytes: of all layers in host memory, of
    matrix_bytes, that visit. attention, mlp: the shares of their matrices that stay on the
    accelerator. splits: whether rows of a matrix may be apart."""

    policy: str
    buffers: int
    buffer_bytes: int
    host_bytes: int
    matrix_bytes: int
    attention: float = 0.0
    mlp: float = 0.0
    splits: bool = True

    @property
    def text(self) -> str:
        """In words, as "policy zigzag: 5.1 GiB of 13.0 GiB of weights visit the GPU in each step,
        once for all requests, through 3 buffers of 150.0 MiB"."""
        size, whole = size_text(self.host_bytes), size_text(self.matrix_bytes)
        if self.host_bytes == 0:
            return f"policy {self.policy}: all layers stay on the GPU"
        policy = "" if self.policy == "auto" else f"policy {self.policy}: "
        return (
            f"{policy}{size} of {whole} of weights visit the GPU in each step, once for all "
            f"requests, through {self.buffers} buffers of {size_text(self.buffer_bytes)}"
        )


def goals(
    workload: Workload, batch: int, ttft_s: Seconds, decode_s: Seconds
) -> tuple[Seconds, Seconds]:
    """What is to be small, and what breaks ties, where so many sequences run at once, in waves."""
    if workload.objective == "decode":
        return decode_s, ttft_s
    if workload.objective == "ttft":
        return ttft_s, decode_s
    return total_s(workload, batch, ttft_s, decode_s), decode_s


def total_s(workload: Workload, batch: int, ttft_s: Seconds, decode_s: Seconds) -> Seconds:
    """Of the workload in waves of `batch` sequences."""
    return -(-workload.batch // batch) * (ttft_s + (workload.output - 1) * decode_s)


def predicted(
    workload: Workload, batch: int, seconds: tuple[float, float, float],
    terms: Sequence[dict[str, float]],
) -> Predicted:  # fmt: skip
    """seconds: until the first token, of a decode step, and of one at the full context. terms: of
    decode and of prefill."""
    ttft_s, decode_s, full_s = seconds
    total = total_s(workload, batch, ttft_s, decode_s)
    return Predicted(
        ttft_s=ttft_s,
        decode_s=decode_s,
        decode_tokens_per_s=batch / decode_s,
        full_context_decode_s=full_s,
        full_context_decode_tokens_per_s=batch / full_s,
        total_s=total,
        tokens_per_s=workload.batch * workload.output / total,
        decode_terms=terms[0],
        prefill_terms=terms[1],
    )


@dataclass(frozen=True)
class Candidate:
    """One placement with its schedule.

    cpu_blocks: how many layers, from the first, the CPU holds. embedding and head: "cpu" or
    "accelerator", or "both" of a head that is cut. cut: what is, None if nothing. visit: where
    weights visit by a published policy; layers of the accelerator then need not lie there.
    kv_blocks, accelerator_kv_blocks: pages of each sequence and layer, in all and
    those that the accelerator has room for, of the layers there. overflow: how attention reaches
    the others, kv: what is known of them, None if there are none. sequences: how many run at
    once, taking turns in decode_groups. step_tokens: the most of one step. visit_tokens: the
    least tokens of a step in which the weights of CPU layers visit the accelerator, and
    visit_pages the page slots for their K and V meanwhile; both 0 if none do.
    """

    blocks: int
    cpu_blocks: int
    embedding: str
    head: str
    kv_blocks: int
    accelerator_kv_blocks: int
    overflow: Overflow
    kv: OverflowUse | None
    decode_groups: int
    prefill_mode: Mode
    prefill_overlap: bool
    step_tokens: int
    visit_tokens: int
    visit_pages: int
    threads: int
    sequences: int
    predicted: Predicted
    memory: Mapping[str, Mapping[str, int]]  # device -> purpose -> bytes
    missing: Missing
    objective_s: float
    cut: CutUse | None = None
    visit: VisitUse | None = None
    disk: DiskUse | None = None

    @property
    def fits(self) -> bool:
        return self.missing.total == 0

    @property
    def accelerator_blocks(self) -> int:
        return self.blocks - self.cpu_blocks - self.cut_blocks

    @property
    def cut_blocks(self) -> int:
        return 0 if self.cut is None else self.cut.layers

    @property
    def units_cpu(self) -> int:
        return self.devices().count("cpu")

    @property
    def units_accelerator(self) -> int:
        return self.devices().count("accelerator")

    @property
    def layout(self) -> tuple[object, ...]:
        """(embedding, cpu_blocks, head), and what is cut, visits or is on disk: tells candidates of
        one result apart."""
        own = [use for use in (self.cut, self.visit, self.disk) if use is not None]
        return (self.embedding, self.cpu_blocks, self.head, *own)

    @property
    def uses_accelerator(self) -> bool:
        return any(self.memory["accelerator"].values())

    @property
    def bottleneck(self) -> str:
        """What decode spends most of its time on."""
        return bottleneck(self.predicted.decode_terms)

    @property
    def prefill_bottleneck(self) -> str:
        return bottleneck(self.predicted.prefill_terms)

    def total_bytes(self, device: str) -> int:
        return sum(self.memory[device].values())

    def devices(self) -> tuple[str, ...]:
        """The devices of the embedding, every layer and the head, "both" of what is cut."""
        blocks = ("cpu",) * self.cpu_blocks + (BOTH,) * self.cut_blocks
        own = ("accelerator",) * self.accelerator_blocks
        return (self.embedding, *blocks, *own, self.head)

    @property
    def reason(self) -> str:
        """Why the candidate does not fit; empty if it does."""
        memories = (("VRAM", self.missing.accelerator), ("RAM", self.missing.cpu))
        lacks = [f"{size_text(missing)} of {memory}" for memory, missing in memories if missing]
        return f"lacks {' and '.join(lacks)}" if lacks else ""

    def reason_against(self, best: Candidate) -> str:
        """Why `best` was chosen instead."""
        if not self.fits:
            return self.reason
        if self.objective_s < best.objective_s * (1 - _CLOSE):
            return f"{(best.objective_s / self.objective_s - 1) * 100:.1f} % faster"
        if self.objective_s <= best.objective_s:
            return "as fast"
        return f"{(self.objective_s / best.objective_s - 1) * 100:.1f} % slower"


def term_name(term: str) -> str:
    """A term of `helm.compiler.times.TERMS` in words."""
    return _BOTTLENECKS.get(term, "saved by overlap")


def bottleneck(terms: Mapping[str, float]) -> str:
    """The name of the largest term."""
    return _BOTTLENECKS[max(_BOTTLENECKS, key=lambda name: terms.get(name, 0.0))]
