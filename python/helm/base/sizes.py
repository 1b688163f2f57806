"""Numbers with units, as people read them. Knows nothing else."""

from __future__ import annotations

import re

from helm.base.arguments import shown
from helm.errors import InvalidError

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([KMGT]?)(i?)B?", re.IGNORECASE)
_LEAST_BYTES = 1 << 20
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_text(size: float) -> str:
    """`size` bytes as people read them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def rate_text(rate: float) -> str:
    """A rate as people read it: "123", "12.3", "1.23"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}" if rate >= 10 else f"{rate:,.2f}"


def seconds_text(seconds: float) -> str:
    """A time as people read it: "12.3 s", "4.5 ms"."""
    size = abs(seconds)
    if size >= 100:
        return f"{seconds:,.0f} s"
    if size >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if size >= 1e-3 else f"{seconds * 1e6:.1f} us"


def counted(number: int, noun: str) -> str:
    """ "1 token", "1,024 tokens"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def parse_size(text: str, what: str) -> int:
    """Bytes of "8GiB", "12GB", "8G" (GiB) or a plain number; InvalidError naming `what`, also for
    a size that no memory has."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidError(
            f"[plan] {what} is {shown(text)}; expected a size such as 8GiB, 12GB or 512MiB"
        )
    number, prefix, binary = found[1], found[2].upper(), bool(found[3])
    decimal = text.strip().upper().endswith("B") and not binary
    size = int(float(number) * (1000 if decimal else 1024) ** _EXPONENTS[prefix])
    meant = f"{number}GiB" if not prefix else "8GiB"
    return check_size(size, f"[plan] {what} is {shown(text)}", meant)


def check_size(size: int, what: str, meant: str) -> int:
    """`size` in bytes; InvalidError where its unit was forgotten, as nothing fits in so little.
    what: begins the message; meant: a size as the caller would write it."""
    if 0 < size < _LEAST_BYTES:
        raise InvalidError(f"{what}, which is less than 1 MiB; did you mean {meant}?")
    return size
