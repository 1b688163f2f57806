"""Machine profiles: what the calibrated roofline knows of a machine. Measures and prices nothing.

A profile is JSON (format "helm-profile"), read as hostile input. Presets lie in `profiles/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from helm.base.arguments import short, shown
from helm.base.files import present, read_file
from helm.base.formats import DTYPES, KV_DTYPES
from helm.base.jsonio import Reader, parse
from helm.base.sizes import counted
from helm.errors import ProfileError
from helm.machine.rates import (
    ACCELERATOR_RESERVE_BYTES,
    KV_TABLES,
    PACKED_CLASSES,
    AcceleratorProfile,
    CpuProfile,
    LinkProfile,
    MemoryTier,
    rate_class,
)

FORMAT = "helm-profile"
VERSION = 2
_MOST, _LEAST_RATIO = 1e30, 1e-6
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_MAX_FILE_BYTES = 4 << 20
_TABLES = ("matvec_bytes_per_s", "matmul_flops", *KV_TABLES)
_TIMES = ("op_s", "step_s")
# Of the CPU; older profiles lack them.
_NEWER = (
    "mapped_matvec_ratio",
    "copy_bytes_per_s",
    "lone_op_s",
    "compressed_ratio",
    "compress_bytes_per_s",
)
_NODES = ("tiers", "left_out")  # absent where there are none
_OLDER = "compressed_matvec_ratio"  # compressed_ratio of one token, as profiles had it before
# What noise can make of 1, and of 4 / 3.
MOST_MAPPED_RATIO, MOST_COMPRESSED_RATIO = 1.2, 1.6
_DEVICE_KEYS = ("memory_bytes", *_TABLES, *_TIMES, "attention_query_s", "activation_bytes_per_s")
_LINK_RATES = (
    "to_accelerator_bytes_per_s",
    "to_host_bytes_per_s",
    "pageable_to_accelerator_bytes_per_s",
    "pageable_to_host_bytes_per_s",
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine. estimated: not measured on it. identity: free text and numbers that say which
    machine this is and where the figures come from ("source"). unsettled: names of quantities for
    which too few undisturbed runs were found, so that their figures may be off. disk_bytes_per_s:
    of the disk that models lie on; None: not known, as that of a checkpoint is measured."""

    name: str
    estimated: bool
    identity: Mapping[str, str | int | float]
    cpu: CpuProfile
    accelerator: AcceleratorProfile | None = None
    link: LinkProfile | None = None
    unsettled: tuple[str, ...] = ()
    disk_bytes_per_s: float | None = None

    @property
    def notices(self) -> list[str]:
        """What whoever has just measured it, or plans with it, wants to know."""
        if not self.unsettled:
            return [*self.cpu.left_out]
        return [
            *self.cpu.left_out,
            f"other programs disturbed {counted(len(self.unsettled), 'measurement')} of {self.name}"
            ", so another plan may be better; helm-llm profile says which, and --recalibrate "
            "measures them again",
        ]

    def notices_of(self, formats: Iterable[str]) -> list[str]:
        """What whoever plans weights of these formats with it wants to know."""
        kinds = {rate_class(name) for name in formats} & PACKED_CLASSES.keys()
        if self.estimated or kinds <= self.cpu.matvec_bytes_per_s.keys():
            return []
        return [
            f"{self.name} has no rates for weights in 8 and 4 bits; those of bf16 stand for them, "
            "so another plan may be better; helm-llm profile --output FILE measures them"
        ]

    def with_tiers(self, shares: Sequence[float]) -> Profile:
        """The rates where such shares of the weights that a step reads lie in the CPU's tiers."""
        if not any(shares):
            return self
        link = None if self.link is None else self.link.with_tiers(shares, self.cpu.tiers)
        return dataclasses.replace(self, cpu=self.cpu.with_tiers(shares), link=link)

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain JSON values."""
        fields = dataclasses.asdict(self)
        for device in (fields["cpu"], fields["accelerator"]):
            if device is not None:
                for name in ("matmul_flops", "attention_flops"):
                    device[name] = {d: _text_keys(rates) for d, rates in device[name].items()}
        fields["cpu"]["thread_sweep"] = _text_keys(fields["cpu"]["thread_sweep"])
        if self.cpu.compressed_ratio is not None:
            fields["cpu"]["compressed_ratio"] = _text_keys(self.cpu.compressed_ratio)
        for name in _NEWER:
            if fields["cpu"][name] is None:
                del fields["cpu"][name]
        for name in _NODES:
            fields["cpu"][name] = list(fields["cpu"][name])
            if not fields["cpu"][name]:
                del fields["cpu"][name]
        if self.accelerator is not None and self.accelerator.stage_s is None:
            del fields["accelerator"]["stage_s"]
        if self.link is not None and self.link.queued_copy_s is None:
            del fields["link"]["queued_copy_s"]
        fields["unsettled"] = list(self.unsettled)
        if self.disk_bytes_per_s is None:
            del fields["disk_bytes_per_s"]
        return {"format": FORMAT, "version": VERSION, **fields}

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` is its inverse."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "profile") -> Profile:
        """Reads and checks a profile. Raises ProfileError naming `source` and the field."""
        return _read(parse(text, source, ProfileError))

    @property
    def digest(self) -> str:
        """SHA-256 in hex of the content, in one canonical form."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _text_keys(table: Mapping[int, float]) -> dict[str, float]:
    return {str(count): rate for count, rate in sorted(table.items())}


def _read(root: Reader) -> Profile:
    if root["format"].string() != FORMAT:
        root["format"].reject(f"expected {FORMAT!r}, found {root['format'].value!r}")
    version = root["version"].integer(0, 2**31)
    if version != VERSION:
        root["version"].reject(f"expected {VERSION}, found {version}; measure the machine anew")
    root.only(
        ("format", "version", "name", "estimated", "identity", "cpu", "accelerator", "link",
         "unsettled", "disk_bytes_per_s")
    )  # fmt: skip
    unsettled, disk = root.get("unsettled"), root.get("disk_bytes_per_s")
    accelerator, link = root.get("accelerator"), root.get("link")
    if accelerator.null != link.null:
        missing = link if link.null else accelerator
        missing.reject("accelerator and link must be given together, or both be null")
    return Profile(
        name=root["name"].string(),
        estimated=root["estimated"].boolean(),
        identity={key: _scalar(root["identity"][key]) for key in root["identity"].names()},
        cpu=_read_cpu(root["cpu"]),
        accelerator=None if accelerator.null else _read_accelerator(accelerator),
        link=None if link.null else _read_link(link),
        unsettled=() if unsettled.null else tuple(item.string() for item in unsettled.items()),
        disk_bytes_per_s=None if disk.null else _rate(disk),
    )


def _scalar(node: Reader) -> str | int | float:
    if isinstance(node.value, str):
        return node.value
    node.number()
    number: int | float = node.value
    return number


def _rate(node: Reader, least: float = 1.0) -> float:
    """Not so small that times lose all meaning."""
    rate = node.number(-_MOST, _MOST)
    if rate < least:
        node.reject(f"expected a rate of at least {least:g}, found {node.value!r}")
    return rate


def _counts(node: Reader, most: int = 2**20, least_rate: float = 1.0) -> dict[int, float]:
    """{"1": rate, "2": rate, ...} with at least one entry."""
    found: dict[int, float] = {}
    for key in node.names():
        if not (_COUNT.fullmatch(key) and int(key) <= most):
            node.reject(f"expected counts from 1 to {most} as keys, found {key!r}")
        found[int(key)] = _rate(node[key], least_rate)
    if not found:
        node.reject("expected at least one entry")
    return found


def _by_rows(node: Reader) -> dict[int, float]:
    """The same, or one rate for all counts."""
    return _counts(node) if isinstance(node.value, dict) else {1: _rate(node)}


_READ = {"matmul_flops": _counts, "attention_flops": _by_rows}


def _by_dtype(node: Reader, dtypes: tuple[str, ...]) -> list[tuple[str, Reader]]:
    node.only(dtypes)
    if not node.names():
        node.reject("expected at least one dtype of " + ", ".join(dtypes))
    return [(dtype, node[dtype]) for dtype in node.names()]


def _device(node: Reader, own: tuple[str, ...]) -> dict[str, Any]:
    node.only((*_DEVICE_KEYS, *own))
    fields: dict[str, Any] = {"memory_bytes": node["memory_bytes"].integer(0, 2**60)}
    for table in _TABLES:
        read = _READ.get(table, _rate)
        dtypes = KV_DTYPES if table in KV_TABLES else (*DTYPES, *PACKED_CLASSES)
        fields[table] = {dtype: read(rates) for dtype, rates in _by_dtype(node[table], dtypes)}
    for name in _TIMES:
        fields[name] = node[name].number(0.0, 1e6)
    fields["attention_query_s"] = node.get("attention_query_s", 0.0).number(0.0, 1e6)
    fields["activation_bytes_per_s"] = _rate(node["activation_bytes_per_s"])
    return fields


def _read_cpu(node: Reader) -> CpuProfile:
    fields = _device(node, ("threads", "thread_sweep", *_NEWER, *_NODES, _OLDER))
    mapped, copy, lone, compressed, compress = (node.get(name) for name in _NEWER)
    one_token = node.get(_OLDER)
    ratios = None if one_token.null else {1: _ratio(one_token, MOST_COMPRESSED_RATIO)}
    if not compressed.null:
        ratios = read_compressed_ratio(compressed)
    threads, sweep = node["threads"].integer(1, 4096), _counts(node["thread_sweep"], 4096)
    if threads not in sweep:
        node["thread_sweep"].reject(f"has no entry for the chosen {threads} threads")
    return CpuProfile(
        **fields,
        threads=threads,
        thread_sweep=sweep,
        mapped_matvec_ratio=None if mapped.null else _ratio(mapped, MOST_MAPPED_RATIO),
        copy_bytes_per_s=None if copy.null else _rate(copy),
        lone_op_s=None if lone.null else lone.number(0.0, 1e6),
        compressed_ratio=ratios,
        compress_bytes_per_s=None if compress.null else _rate(compress),
        tiers=_read_tiers(node.get("tiers", []), fields["memory_bytes"]),
        left_out=tuple(item.string() for item in node.get("left_out", []).items()),
    )


def _read_tiers(node: Reader, memory_bytes: int) -> tuple[MemoryTier, ...]:
    """Each node once, the fastest first, together no more than all memory."""
    tiers = list[MemoryTier]()
    for item in node.items():
        item.only(("node", "memory_bytes", "bytes_per_s"))
        rate, left = _rate(item["bytes_per_s"]), memory_bytes - sum(t.memory_bytes for t in tiers)
        one = MemoryTier(item["node"].integer(0, 1023), item["memory_bytes"].integer(0, left), rate)
        if any(one.node == other.node for other in tiers):
            item["node"].reject(f"{one.node} is listed twice")
        if tiers and rate > tiers[-1].bytes_per_s:
            item["bytes_per_s"].reject("expected the fastest first")
        tiers.append(one)
    return tuple(tiers)


def read_compressed_ratio(node: Reader) -> dict[int, float]:
    """CpuProfile.compressed_ratio, {"1": ratio, ...}. Raises ProfileError naming what is wrong."""
    ratios = _counts(node, least_rate=_LEAST_RATIO)
    for name in node.names():
        _ratio(node[name], MOST_COMPRESSED_RATIO)
    return ratios


def _ratio(node: Reader, most: float) -> float:
    ratio = _rate(node, _LEAST_RATIO)
    if ratio > most:
        node.reject(f"expected at most {most:g}, found {node.value!r}")
    return ratio


def _read_accelerator(node: Reader) -> AcceleratorProfile:
    fields = _device(node, ("name", "reserve_bytes", "stage_s"))
    stage = node.get("stage_s")
    reserve = node.get("reserve_bytes", ACCELERATOR_RESERVE_BYTES).integer(0, 2**60)
    return AcceleratorProfile(
        **fields,
        name=node["name"].string(),
        reserve_bytes=reserve,
        stage_s=None if stage.null else stage.number(0.0, 1e6),
    )


def _read_link(node: Reader) -> LinkProfile:
    shares = ("cpu_rate_while_copying", "rate_while_both_compute")
    node.only((*_LINK_RATES, "latency_s", *shares, "locks_mapped", "queued_copy_s"))
    queued = node.get("queued_copy_s")
    return LinkProfile(
        **{name: _rate(node[name]) for name in _LINK_RATES},
        latency_s=node["latency_s"].number(0.0, 1e6),
        cpu_rate_while_copying=_share(node[shares[0]]),
        rate_while_both_compute=_share(node.get(shares[1], 1.0), 0.5),
        locks_mapped=node.get("locks_mapped", False).boolean(),
        queued_copy_s=None if queued.null else queued.number(0.0, 1e6),
    )


def _share(node: Reader, least: float = 0.0) -> float:
    share = _rate(node, _LEAST_RATIO)
    if not least <= share <= 1.0:
        bounds = f"{least:g} to 1" if least else "at most 1"
        node.reject(f"expected a share of {bounds}, found {share:g}")
    return share


def preset_names() -> list[str]:
    """The names of the presets that `load_profile` knows, sorted."""
    folder = resources.files("helm.machine") / "presets"
    return sorted(
        entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json")
    )


def as_profile(given: Profile | str | os.PathLike[str] | None) -> Profile | None:
    """As it is, or what `load_profile` takes by name or path."""
    return given if given is None or isinstance(given, Profile) else load_profile(given)


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """A preset by name, or else a profile file. Raises ProfileError."""
    name = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(name, str):
        raise ProfileError(
            f"[profile] expected a preset's name, a file or a Profile, got {shown(name_or_path)}"
        )
    if name in preset_names():
        text = (resources.files("helm.machine") / "presets" / f"{name}.json").read_bytes()
        return Profile.from_json(text, f"profile {name}")
    path = Path(name)
    if not present(path, ProfileError, "profile"):
        raise ProfileError(
            f"[profile] {short(name)} is neither a preset nor a file; presets are "
            + ", ".join(preset_names())
        )
    return Profile.from_json(read_file(path, ProfileError, "profile", _MAX_FILE_BYTES), name)
