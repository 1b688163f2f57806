"""Where the system starts no more threads: an error that says so, and nobody who waits."""

from __future__ import annotations

import subprocess
import sys

import pytest

import helm
from helm import _helm

_LIMITED = """
import re, resource, sys
from helm import _helm
from helm.errors import OutOfMemoryError
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    {call}
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "call",
    [
        "_helm.Engine(sys.argv[1], sys.argv[2], threads=200)",
        "_helm.stream_read_bytes_per_s(200, 1 << 20, 0.01)",
        "_helm.fma_flops(200, 0.01)",
    ],
)
def test_a_thread_that_cannot_start_is_an_error(call: str) -> None:
    assert _helm
    with helm.LLM(context=64) as llm:
        plan, folder = llm.plan.to_json(), str(llm.folder)
    result = subprocess.run(
        [sys.executable, "-c", _LIMITED.format(call=call), plan, folder],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "of 200 threads" in result.stdout
    assert "use fewer" in result.stdout
