"""How events of a stream go out: what comes together is one."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from scripted_backend import ScriptedBackend, says, served

TEXT = "A story of a cat and a dog that went to the sea and came back in the rain. " * 2


def _events(url: str) -> list[tuple[float, Any]]:
    """When each came, in seconds from the first."""
    found: list[tuple[float, Any]] = []
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append((time.monotonic(), json.loads(line[6:])))
    return [(at - found[0][0], event) for at, event in found]


def _text(events: list[tuple[float, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for _, event in events)


def test_what_comes_within_the_interval_is_one_event() -> None:
    backend = ScriptedBackend(says(TEXT), step_s=0.002)
    with served(backend) as (url, _):
        many = _events(url)
    with served(backend, sse_interval_s=0.1) as (url, _):
        few = _events(url)
    assert _text(few) == _text(many) == TEXT
    assert few[-1][1]["choices"][0]["finish_reason"] == "stop"
    assert len(few) <= 4 + 10 * few[-1][0]  # role, first, last two, and ten a second
    assert len(few) < len(many) / 2


def test_the_end_does_not_wait_for_the_interval() -> None:
    with served(ScriptedBackend(says("Yes"), step_s=0.001), sse_interval_s=20.0) as (url, _):
        events = _events(url)
    assert _text(events) == "Yes"
    assert events[-1][0] < 10
