"""What of this process is resident in memory."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_bytes() -> int:
    """Now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """The most so far. (ru_maxrss begins with what the process that started it had resident.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
