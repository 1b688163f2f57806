"""What every test and every process that it starts relies on."""

from __future__ import annotations

import signal

import pytest

# A shell's background job begins with Ctrl-C ignored, what nohup starts with SIGHUP; children
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first: whoever works beside them fills what is left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
