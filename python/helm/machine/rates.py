"""The calibrated roofline of a machine's parts: rates of a device by dtype and count, of the link
between two. Measures and prices nothing, reads no file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from helm.base.formats import DTYPE_BYTES, FORMATS, KV_ELEMENT_BYTES
from helm.errors import ProfileError

# Of an accelerator's memory, left for the driver's context, its libraries and what fragmentation
# takes; less is left of what is free once they are there.
ACCELERATOR_RESERVE_BYTES = 512 << 20
OPEN_RESERVE_BYTES = 256 << 20
KV_TABLES = ("attention_bytes_per_s", "attention_flops")
# Weights have rates by format class, by the bytes that are read of them; bf16c, whose rate over
# that of bf16 was measured, by those of bf16. One format is measured for all of a packed class.
PACKED_CLASSES = {"q8": "c8.s32", "q4": "c4.km32"}
_PACKED_CLASS = {"c8": "q8", "c6": "q8", **dict.fromkeys(("c5", "c4", "nl4", "mx4"), "q4")}
_FEW_TOKENS = 8  # of a product that a GPU computes from packed weights as they lie
_EXPANDED_TOKENS = (_FEW_TOKENS, _FEW_TOKENS + 1, 16, 64, 512)
_WEIGHT_BYTES = {  # of a weight, or of an element of the KV cache
    **KV_ELEMENT_BYTES,
    "bf16c": KV_ELEMENT_BYTES["bf16"],
    **{kind: FORMATS[name].bytes(256, 256) / 256**2 for kind, name in PACKED_CLASSES.items()},
}


def rate_class(format: str) -> str:
    """The class by which profiles know the rate of a weight format."""
    codes = FORMATS[format].codes
    return _PACKED_CLASS.get(codes, codes)


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Rates of one device by format class of the weights, or by dtype of the KV cache.

    matmul_flops: class -> tokens in the product -> FLOP/s. attention_flops: dtype -> rows that
    share a KV head (queries times query heads per KV head) -> FLOP/s. op_s: fixed cost of one op;
    step_s: of one step of the device; attention_query_s: of attention, for each query and head of a
    prompt, 0 where unknown.
    """

    memory_bytes: int
    matvec_bytes_per_s: Mapping[str, float]
    matmul_flops: Mapping[str, Mapping[int, float]]
    attention_bytes_per_s: Mapping[str, float]
    attention_flops: Mapping[str, Mapping[int, float]]
    op_s: float
    step_s: float
    activation_bytes_per_s: float
    attention_query_s: float = 0.0
    site: ClassVar[str]

    def rate(self, table: str, dtype: str) -> float:
        """`table`[dtype]; ProfileError naming the field when the profile lacks it."""
        found: float = self._lookup(table, dtype)
        return found

    def matmul_rate(self, dtype: str, tokens: int | npt.ArrayLike) -> npt.NDArray[np.float64]:
        """FLOP/s of a product of `tokens` rows, interpolated between the measured counts on
        logarithmic axes and constant outside of them."""
        return self._rate_at("matmul_flops", dtype, tokens)

    def attention_rate(self, dtype: str, rows: int | npt.ArrayLike) -> npt.NDArray[np.float64]:
        """FLOP/s of attention of `rows` that share a KV head, interpolated likewise."""
        return self._rate_at("attention_flops", dtype, rows)

    def _rate_at(
        self, table: str, dtype: str, counts: int | npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        if not isinstance(counts, int):
            return _interpolated(self._lookup(table, dtype), counts)
        key = (table, dtype, counts)
        if key not in self._known_rates:
            self._known_rates[key] = _interpolated(self._lookup(table, dtype), counts)
        return self._known_rates[key]

    @functools.cached_property
    def _known_rates(self) -> dict[tuple[str, str, int], npt.NDArray[np.float64]]:
        return {}  # a search asks for few counts, each often

    def _lookup(self, table: str, dtype: str) -> Any:
        rates = getattr(self, table)
        if dtype not in rates:
            option = "kv_dtype=" if table in KV_TABLES else "dtype="
            known = ", ".join(sorted(rates.keys() & KV_ELEMENT_BYTES.keys()))
            raise ProfileError(
                f"[profile] {table} has no rate for {dtype}, only for {known}; "
                f"choose one of those with {option}, or another profile=; where it is this "
                "machine's, measure again, or leave the device out with device='cpu'"
            )
        return rates[dtype]


Device = TypeVar("Device", bound=DeviceProfile)


def beside_another(device: Device, share: float) -> Device:
    """The rates while another device works that reads the same memory. Nothing is read faster than
    at `share` of the rate of weights in elements, or of others where there are none; arithmetic
    keeps its rates."""
    if share >= 1.0:
        return device
    reads = device.matvec_bytes_per_s
    plain = [rate for kind, rate in reads.items() if kind in DTYPE_BYTES]
    most = max(plain or reads.values(), default=0.0)

    def left(rates: Mapping[str, float]) -> dict[str, float]:
        return {kind: r * min(1.0, share * max(1.0, most / r)) for kind, r in rates.items()}

    return dataclasses.replace(
        device,
        matvec_bytes_per_s=left(reads),
        attention_bytes_per_s=left(device.attention_bytes_per_s),
    )


def _with_packed(device: Device) -> Device:
    """Packed weights that were not measured are read at as many bytes a second as bf16, and
    multiplied as fast."""
    reads, products = dict(device.matvec_bytes_per_s), dict(device.matmul_flops)
    plain = next((d for d in ("bf16", "f16", "f32") if d in reads and d in products), None)
    if plain is None:
        return device
    for kind in PACKED_CLASSES:
        products.setdefault(kind, _of_fewer_bytes(products[plain], reads[plain], plain, kind))
        reads.setdefault(kind, reads[plain])
    return dataclasses.replace(device, matvec_bytes_per_s=reads, matmul_flops=products)


def _interpolated(
    table: Mapping[int, float], counts: int | npt.ArrayLike
) -> npt.NDArray[np.float64]:
    known = sorted(table)
    logs = np.interp(
        np.log(np.asarray(counts, np.float64)),
        np.log(known),
        np.log([table[count] for count in known]),
    )
    return np.asarray(np.exp(logs))


@dataclass(frozen=True)
class MemoryTier:
    """Host memory on a node without cores of ours. memory_bytes: that models may take.
    bytes_per_s: at which products of one token read weights there, with all threads."""

    node: int
    memory_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class CpuProfile(DeviceProfile):
    """threads: with how many the rates were measured. thread_sweep: threads -> matrix-vector
    bytes/s, in the dtype that was swept. mapped_matvec_ratio: rate of reading weights from the
    pages of a mapped file over that of copied ones. copy_bytes_per_s: of copying them from the
    page cache. lone_op_s: op_s of one thread, which hands nothing to another.
    compressed_ratio: tokens -> rate of products of so many with compressed bf16 weights over that
    with plain ones. compress_bytes_per_s: of compressing plain ones from the page cache. None: not
    measured. tiers: of memory_bytes what lies on slower nodes, the fastest first. left_out: why
    nodes are none of these."""

    threads: int
    thread_sweep: Mapping[int, float]
    mapped_matvec_ratio: float | None = None
    copy_bytes_per_s: float | None = None
    lone_op_s: float | None = None
    compressed_ratio: Mapping[int, float] | None = None
    compress_bytes_per_s: float | None = None
    tiers: tuple[MemoryTier, ...] = ()
    left_out: tuple[str, ...] = ()
    site: ClassVar[str] = "cpu"

    @functools.cached_property
    def complete(self) -> CpuProfile:
        """With rates of every format class; those of bf16c are bf16's where no ratio is known."""
        every = _with_packed(self)
        reads, products = dict(every.matvec_bytes_per_s), dict(every.matmul_flops)
        ratios = {1: 1.0} if self.compressed_ratio is None else self.compressed_ratio
        if "bf16" in reads:
            reads.setdefault("bf16c", reads["bf16"] * compressed_rate(ratios, 1))
        if "bf16" in products:
            faster = {
                tokens: rate * compressed_rate(ratios, tokens)
                for tokens, rate in products["bf16"].items()
            }
            products.setdefault("bf16c", faster)
        return dataclasses.replace(every, matvec_bytes_per_s=reads, matmul_flops=products)

    def with_mapped_weights(self, share: float = 1.0) -> CpuProfile:
        """The rates when `share` of the weight bytes is read from mapped files; the same where
        nothing is known of that."""
        if self.mapped_matvec_ratio is None:
            return self
        slower = 1.0 - share + share / min(1.0, self.mapped_matvec_ratio)
        return dataclasses.replace(
            self, matvec_bytes_per_s=_scaled(self.matvec_bytes_per_s, 1.0 / slower)
        )

    def with_tiers(self, shares: Sequence[float]) -> CpuProfile:
        """The rates where such shares of the weights that a step reads lie in the tiers."""
        slower = 1.0
        for share, tier in zip(shares, self.tiers, strict=True):
            slower += share * (max(1.0, self.thread_sweep[self.threads] / tier.bytes_per_s) - 1.0)
        reads, products = self.matvec_bytes_per_s, self.matmul_flops
        return dataclasses.replace(
            self,
            matvec_bytes_per_s=_scaled(reads, 1.0 / slower),
            matmul_flops=scaled_flops(products, reads, 1.0 / slower, 1.0),
        )

    def with_threads(self, threads: int) -> CpuProfile:
        """The rates with another number of threads of the sweep. Bandwidths follow the sweep, and
        FLOP rates that are bound by them; others are taken to fall in proportion below the measured
        count and, as nothing was measured there, not to rise above it."""
        if threads == self.threads:
            return self
        if threads not in self.thread_sweep:
            known = ", ".join(map(str, sorted(self.thread_sweep)))
            raise ProfileError(
                f"[profile] thread_sweep has no entry for {threads} threads, only for {known}; "
                "choose one of those, or measure the machine again"
            )
        memory = self.thread_sweep[threads] / self.thread_sweep[self.threads]
        compute = min(1.0, threads / self.threads)
        copy, compress = self.copy_bytes_per_s, self.compress_bytes_per_s
        op_s = self.op_s if threads > 1 or self.lone_op_s is None else self.lone_op_s
        return dataclasses.replace(
            self,
            threads=threads,
            op_s=op_s,
            attention_query_s=self.attention_query_s / compute,
            copy_bytes_per_s=None if copy is None else copy * compute,
            compress_bytes_per_s=None if compress is None else compress * compute,
            matvec_bytes_per_s=_scaled(self.matvec_bytes_per_s, memory),
            attention_bytes_per_s=_scaled(self.attention_bytes_per_s, memory),
            attention_flops=scaled_flops(
                self.attention_flops, self.attention_bytes_per_s, memory, compute
            ),
            matmul_flops=scaled_flops(self.matmul_flops, self.matvec_bytes_per_s, memory, compute),
            activation_bytes_per_s=self.activation_bytes_per_s * compute,
        )


def compressed_rate(ratios: Mapping[int, float], tokens: int) -> float:
    """CpuProfile.compressed_ratio of products of `tokens` rows, interpolated between the measured
    counts; of more tokens than were measured none is taken to be faster."""
    ratio = float(_interpolated(ratios, tokens))
    return ratio if tokens <= max(ratios) else min(1.0, ratio)


def _scaled(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    return {dtype: rate * factor for dtype, rate in rates.items()}


def _of_fewer_bytes(
    products: Mapping[int, float], bytes_per_s: float, plain: str, kind: str
) -> dict[int, float]:
    """tokens -> FLOP/s with weights of class `kind` where `products` are those with `plain` ones:
    more where that is the rate of reading them, but no more than the most that is computed."""
    fewer, most = _WEIGHT_BYTES[plain] / _WEIGHT_BYTES[kind], max(products.values())
    return {
        tokens: min(rate * fewer, most) if _reads(plain, tokens, rate, bytes_per_s) else rate
        for tokens, rate in products.items()
    }


def _expanded(products: Mapping[int, float], weight_s: float) -> dict[int, float]:
    """tokens -> FLOP/s where products of many take weight_s more for each weight."""
    rates = {n: float(_interpolated(products, n)) for n in {*products, *_EXPANDED_TOKENS}}
    return {
        n: rate if n <= _FEW_TOKENS else 2 * n / (2 * n / rate + weight_s)
        for n, rate in sorted(rates.items())
    }


def _reads(kind: str, rows: int, rate: float, bytes_per_s: float) -> bool:
    """Whether a measured FLOP rate is that of reading the operand that all rows share."""
    if rows == 1:
        return True
    reading = 2.0 * rows / _WEIGHT_BYTES[kind] * bytes_per_s
    return 0.8 <= rate / reading <= 1.25


def scaled_flops(
    tables: Mapping[str, Mapping[int, float]],
    bytes_per_s: Mapping[str, float],
    memory: float,
    compute: float,
) -> dict[str, dict[int, float]]:
    """class -> rows -> FLOP/s times `memory` for one row and where the measured rate is that of
    reading the operand that all rows share, by `bytes_per_s` of its class; else times `compute`."""

    def factor(kind: str, rows: int, rate: float) -> float:
        if rows == 1:
            return memory
        known = kind in bytes_per_s and _reads(kind, rows, rate, bytes_per_s[kind])
        return memory if known else compute

    return {
        kind: {rows: rate * factor(kind, rows, rate) for rows, rate in table.items()}
        for kind, table in tables.items()
    }


@dataclass(frozen=True, kw_only=True)
class AcceleratorProfile(DeviceProfile):
    """reserve_bytes: of memory_bytes, what plans leave. stage_s: fixed cost of each further stage
    of a step, which steps with KV pages in host memory have; None: not measured."""

    name: str
    reserve_bytes: int = ACCELERATOR_RESERVE_BYTES
    stage_s: float | None = None
    site: ClassVar[str] = "accelerator"

    @functools.cached_property
    def complete(self) -> AcceleratorProfile:
        """With rates of every format class that an accelerator may hold. Of packed weights that
        were not measured: a product of many tokens first writes them in 16 bits and reads these."""
        every = _with_packed(self)
        products = {
            kind: table
            if kind in self.matmul_flops or kind not in PACKED_CLASSES
            else _expanded(table, 2 * KV_ELEMENT_BYTES["f16"] / every.matvec_bytes_per_s[kind])
            for kind, table in every.matmul_flops.items()
        }
        return dataclasses.replace(every, matmul_flops=products)


def capped_reserve(cap_bytes: int | None) -> int | None:
    """What plans leave of an accelerator's memory when they may take `cap_bytes`: all that a cap is
    meant for. None without one: what the profile states."""
    return None if cap_bytes is None else ACCELERATOR_RESERVE_BYTES


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """Between host and accelerator. cpu_rate_while_copying: share of the CPU's rates that is
    left while a copy runs, 0 < share <= 1. rate_while_both_compute: share of their rates of reading
    weights that both devices keep while both do: 1 where each has memory of its own, 0.5 where it
    is as if they took turns. locks_mapped: mapped files are page-locked where they visit, too.
    latency_s: what a copy that somebody waits for takes beside its bytes. queued_copy_s: what one
    behind another takes, None: as much."""

    to_accelerator_bytes_per_s: float
    to_host_bytes_per_s: float
    pageable_to_accelerator_bytes_per_s: float
    pageable_to_host_bytes_per_s: float
    latency_s: float
    cpu_rate_while_copying: float
    rate_while_both_compute: float = 1.0
    locks_mapped: bool = False
    queued_copy_s: float | None = None

    @property
    def page_s(self) -> float:
        """Seconds that a page takes beside its bytes, as one of many."""
        return self.latency_s if self.queued_copy_s is None else self.queued_copy_s

    def with_tiers(self, shares: Sequence[float], tiers: Sequence[MemoryTier]) -> LinkProfile:
        """The rates where such shares of what goes up come from these."""
        own, slower = self.to_accelerator_bytes_per_s, 1.0
        for share, tier in zip(shares, tiers, strict=True):
            slower += share * (max(1.0, own / tier.bytes_per_s) - 1.0)
        return dataclasses.replace(self, to_accelerator_bytes_per_s=own / slower)

    def beside_copies(
        self, cpu_s: npt.NDArray[np.float64], copies_s: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Seconds of what takes the CPU cpu_s alone, beside so much copying."""
        rate = self.cpu_rate_while_copying
        return np.minimum(cpu_s / rate, cpu_s + (1.0 - rate) * copies_s)
