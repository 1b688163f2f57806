"""Runs the cases of one client and says how each went, a line of JSON apiece. Needs no HELM."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable


def run(cases: dict[str, Callable[[], object]]) -> None:
    """Each case returns what it found, for the table; what it raises is its failure."""
    for name, case in cases.items():
        before = time.monotonic()
        try:
            found, good = str(case()), True
        except Exception:
            found, good = traceback.format_exc(), False
        seconds = time.monotonic() - before
        print(json.dumps({"case": name, "good": good, "found": found, "seconds": seconds}))
