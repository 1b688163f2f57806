"""Numbers with units, as people read them. Knows nothing else."""

from __future__ import annotations


def size_text(size: float) -> str:
    """`size` bytes as people read them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
