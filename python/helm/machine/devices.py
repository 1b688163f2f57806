"""The accelerators that models can run on, by specification: "cuda", "cuda:N" or "sim:...".

Opens devices to see what they are; measures and plans nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from helm.base.arguments import short, shown
from helm.base.sizes import check_size
from helm.errors import DeviceError, InvalidError, NoDeviceError, OutOfMemoryError, printable
from helm.machine.rates import (
    ACCELERATOR_RESERVE_BYTES,
    OPEN_RESERVE_BYTES,
    AcceleratorProfile,
)

CPU = "cpu"
CUDA = "cuda"
SIM = "sim"
HELP = "cpu, cuda, cuda:N or sim:vram=2GiB,link=16GB/s,latency=10us,threads=1"


@dataclass(frozen=True)
class Accelerator:
    """One that can be opened. kind: "sim" or "cuda". free_bytes: when it was looked at.
    locks_mapped: it page-locks files that are mapped, too."""

    specification: str
    kind: str
    name: str
    memory_bytes: int
    free_bytes: int
    locks_mapped: bool = False

    @property
    def reserve_bytes(self) -> int:
        """Of free_bytes, what plans leave. A CUDA device has its context by then; a
        simulated one stands for all memory of a card."""
        return OPEN_RESERVE_BYTES if self.kind == CUDA else ACCELERATOR_RESERVE_BYTES

    def present(self, rates: AcceleratorProfile) -> AcceleratorProfile:
        """`rates` with the memory that this one has now."""
        return dataclasses.replace(
            rates, memory_bytes=self.free_bytes, reserve_bytes=self.reserve_bytes
        )

    @property
    def rates_specification(self) -> str:
        """Without what its speed does not depend on: how much memory a simulated one has."""
        kind, _, options = self.specification.partition(":")
        if kind != SIM:
            return self.specification
        kept = sorted(o for o in options.split(",") if o and not o.startswith("vram="))
        return ":".join(filter(None, (kind, ",".join(kept))))


def cublas_directories() -> list[bytes]:
    """Where the wheel nvidia-cublas has its library, in every folder that Python imports from."""
    places = (
        os.path.join(folder, "nvidia", "cu13", "lib") for folder in sys.path if type(folder) is str
    )
    found = (place for place in places if os.path.isfile(os.path.join(place, "libcublas.so.13")))
    return [os.fsencode(place) for place in found]


def open_accelerator(specification: str) -> Accelerator:
    """What `specification` names. That of a simulated one may say vram (a size), link and memory
    (rates of copies in a direction, and of what stages read), latency (of a copy) and threads.
    Raises InvalidError for a malformed one, and with the reason NoDeviceError where there is no
    such kind of device, DeviceError when it cannot be had."""
    from helm import _helm

    bare = re.search(r"[:,]vram=(\d{1,7})(?=,|$)", specification)
    if bare:
        check_size(int(bare[1]), f"[device] vram is {bare[1]}", f"{bare[1]}GiB")
    info = _helm.accelerator_info(specification)
    return Accelerator(
        specification,
        info.kind,
        info.name,
        info.memory_bytes,
        info.free_bytes,
        info.locks_mapped,
    )


def find_accelerator(device: str | None, notices: list[str] | None = None) -> Accelerator | None:
    """The accelerator to use, None for the CPU alone.

    device None: the CUDA device if there is one that can be opened; "cpu": none; else that one,
    with the errors of `open_accelerator`. notices: takes why a CUDA device that may be there is
    not used.
    """
    if device is not None and not (isinstance(device, str) and device == short(printable(device))):
        raise InvalidError(f"[device] expected {HELP}, got {shown(device)}")
    if device == CPU:
        return None
    if device is not None:
        return open_accelerator(device)
    try:
        return open_accelerator(CUDA)
    except NoDeviceError:
        return None  # as on most machines
    except (DeviceError, OutOfMemoryError) as reason:
        if notices is not None:
            first = _reason(reason).partition("\n")[0].removesuffix(" Tried:")
            notices.append(f"no CUDA device is used: {first} (helm-llm doctor says more)")
        return None


def _reason(error: Exception) -> str:
    """Without the place that begins it."""
    return re.sub(r"^\[\w+\] ", "", str(error))


def device_report() -> list[dict[str, Any]]:
    """What can be asked for, and why not: name, available, text, and bytes where they are known."""
    report: list[dict[str, Any]] = [{"name": CPU, "available": True, "text": "always"}]
    try:
        found = open_accelerator(CUDA)
    except (DeviceError, OutOfMemoryError) as reason:
        report.append({"name": CUDA, "available": False, "text": _reason(reason)})
    else:
        sizes = {"memory_bytes": found.memory_bytes, "free_bytes": found.free_bytes}
        report.append({"name": CUDA, "available": True, "text": found.name, **sizes})
    text = "always; an accelerator of host memory, as sim:vram=2GiB,link=16GB/s"
    report.append({"name": SIM, "available": True, "text": text})
    return report
