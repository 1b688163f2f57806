"""This machine's profile, measured once and kept in the user's cache directory, as are other rates
of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from helm.base import own_folder
from helm.errors import HelmError, ProfileError
from helm.machine.devices import Accelerator
from helm.machine.memory_nodes import tiers_here
from helm.machine.profile import VERSION, Profile
from helm.machine.rates import AcceleratorProfile, CpuProfile, LinkProfile
from helm.machine.resources import cpu_affinity, cpu_quota, memory_available, memory_capacity
from helm.measure.accelerator import measure_accelerator
from helm.measure.cpu import identity, measure_profile
from helm.measure.quantity import Progress

Measure = Callable[[Progress | None], Profile]
MeasureDevice = Callable[
    [Accelerator, CpuProfile, Progress | None],
    tuple[AcceleratorProfile, LinkProfile, tuple[str, ...]],
]
_UNSETTLED_S = 3600.0  # what other programs disturbed is measured again after so long
_CPU_SHARE = 0.6  # of the progress when an accelerator follows


def machine_profile(
    device: Accelerator | None = None,
    *,
    recalibrate: bool = False,
    progress: Progress | None = None,
    measure: Measure = measure_profile,
    measure_device: MeasureDevice = measure_accelerator,
) -> Profile:
    """The profile of this machine, with `device` if one is given: from the cache, or measured and
    cached.

    Hardware, HELM's version, isa, CPU affinity, CPU quota and memory limit make the key,
    and the device; a cached file that cannot be read, is not a profile or not of this user is
    measured anew.
    memory_bytes is always what is available now, of tiers and on the accelerator too. A cache
    that cannot be written costs only the next measurement. What other programs disturbed is
    measured again after an hour.
    """
    found = None if recalibrate else _kept(cache_path())
    whole = None if recalibrate or device is None else _kept(cache_path(device))
    if found is None:
        # Once the accelerator is measured, its bar starts where the CPU's has ended.
        share = 1.0 if device is None or whole is not None else _CPU_SHARE
        found = measure(_part(progress, 0.0, share))
        keep(cache_path(), found.to_json())
    cpu = tiers_here(found.cpu, memory_available(), cpu_affinity())
    found = dataclasses.replace(found, cpu=cpu)
    if device is None:
        return found
    if whole is None or whole.accelerator is None:
        own, link, names = measure_device(device, found.cpu, _part(progress, _CPU_SHARE, 1.0))
        whole = dataclasses.replace(found, accelerator=own, link=link, unsettled=names)
        keep(cache_path(device), whole.to_json())
    assert whole.accelerator is not None
    own = device.present(whole.accelerator)
    return dataclasses.replace(
        found, accelerator=own, link=whole.link, unsettled=(*found.unsettled, *whole.unsettled)
    )


def _part(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Reports as the part from `begin` to `end` of the whole."""
    if progress is None:
        return None
    report = progress
    return lambda what, share: report(what, begin + (end - begin) * share)


def cached_profile() -> Profile | None:
    """This machine's profile, without an accelerator, if it has been measured before; never
    measures."""
    return _read(cache_path())[0]


def cache_path(device: Accelerator | None = None) -> Path:
    """Where this machine's profile lies."""
    return cached_file("profile", device)


def cached_file(what: str, device: Accelerator | None = None) -> Path:
    """Where something that was measured on this machine lies."""
    return own_folder.cache_folder() / f"{what}-{cache_key(device)}.json"


def keep(path: Path, content: str) -> None:
    """Writes to the cache, if it can be written to."""
    with contextlib.suppress(OSError):
        own_folder.write(path, content)


def cache_key(device: Accelerator | None = None) -> str:
    """16 hex digits that change with anything the rates depend on."""
    facts: dict[str, object] = {
        **identity(),
        "profile": VERSION,
        "affinity": sorted(cpu_affinity()),
        "quota": cpu_quota(),
        "memory": memory_capacity(),
    }
    if device is not None:
        facts["device"] = [device.rates_specification, device.name]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _kept(path: Path) -> Profile | None:
    found, written_s = _read(path)
    return None if found is None or outdated(written_s, not found.unsettled) else found


def outdated(written_s: float, settled: bool) -> bool:
    """Whether a measurement that was kept then is to be made again."""
    return not settled and time.time() - written_s > _UNSETTLED_S


def _read(path: Path) -> tuple[Profile | None, float]:
    """What is kept, and since when."""
    try:
        content, written_s = own_folder.read(path)
        return Profile.from_json(content, str(path)), written_s
    except (OSError, ProfileError):
        return None, 0.0


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a profile where the user asked, as a shell's redirection would: through links, to a
    pipe or device, into a file that keeps its mode. Raises HelmError."""
    try:
        path.write_text(profile.to_json(), encoding="utf-8")
    except OSError as reason:
        raise HelmError(
            f"[profile] cannot write {path}: {reason.strerror}; choose another file"
        ) from None
