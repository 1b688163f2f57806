"""This machine's profile, measured once and kept in the user's cache directory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from helm.calibrate import Progress, identity, measure_profile
from helm.errors import HelmError, ProfileError
from helm.machine import cpu_affinity, cpu_quota, memory_available, memory_capacity
from helm.profile import VERSION, Profile

Measure = Callable[[Progress | None], Profile]


def machine_profile(
    *,
    recalibrate: bool = False,
    progress: Progress | None = None,
    measure: Measure = measure_profile,
) -> Profile:
    """The profile of this machine: from the cache, or measured and cached.

    Hardware, HELM's version, kernel tier, CPU affinity, CPU quota and memory limit make the key; a
    cached file that cannot be read or is not a profile is measured anew. memory_bytes is always
    what is available now. A cache that cannot be written costs only the next measurement.
    """
    path = cache_path()
    found = None if recalibrate else _read(path)
    if found is None:
        found = measure(progress)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, found)
    return dataclasses.replace(
        found, cpu=dataclasses.replace(found.cpu, memory_bytes=memory_available())
    )


def cached_profile() -> Profile | None:
    """This machine's profile if it has been measured before; never measures."""
    return _read(cache_path())


def cache_path() -> Path:
    """Where this machine's profile lies, under $XDG_CACHE_HOME or ~/.cache."""
    return _cache_home() / "helm" / f"profile-{cache_key()}.json"


def _cache_home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home and Path(home).is_absolute():  # the specification: ignore relative ones
        return Path(home)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir()) / f"helm-{os.getuid()}"


def cache_key() -> str:
    """16 hex digits that change with anything the rates depend on."""
    facts = {
        **identity(),
        "profile": VERSION,
        "affinity": sorted(cpu_affinity()),
        "quota": cpu_quota(),
        "memory": memory_capacity(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Profile | None:
    try:
        return Profile.from_json(path.read_bytes(), str(path))
    except (OSError, ProfileError):
        return None


def _write(path: Path, profile: Profile) -> None:
    """Whole or not at all: readers never see a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(profile.to_json())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a profile where the user asked; raises HelmError."""
    try:
        _write(path.resolve(), profile)
    except OSError as reason:
        raise HelmError(
            f"[profile] cannot write {path}: {reason.strerror}; choose another --output"
        ) from None
