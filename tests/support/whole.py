"""Long sweeps in short. HELM_TEST_WHOLE=1 leaves nothing out."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
WHOLE = os.environ.get("HELM_TEST_WHOLE") == "1"


def one_in(of: int, items: Iterable[T], key: str = "") -> list[T]:
    """One of so many, from a place that `key` chooses: sweeps of many keys hold all together."""
    each = list(items)
    return each if WHOLE else each[zlib.crc32(key.encode()) % min(of, len(each) or 1) :: of]
