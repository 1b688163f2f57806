"""The fuzzer's short form: a few inputs of each kind, of fixed seeds. `tests/fuzz/run` has more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import watch
from fuzz.kinds import KINDS, inputs_of, unavailable

SEED = "1"
# Inputs of each kind, for a second or two each.
COUNTS = {
    "checkpoint": 10,
    "shards": 8,
    "quantized": 10,
    "pieces": 20,
    "gguf": 30,
    "config": 10,
    "generation_config": 8,
    "plan_command": 2,
    "tokenizer": 15,
    "template": 25,
    "plan": 10,
    "native_plan": 6,
    "profile": 5,
    "kv_file": 10,
    "arguments": 15,
    "native_calls": 10,
    "fault": 2,
    "signal": 1,
    "container": 1,
}


@pytest.fixture(scope="module")
def watched() -> Iterator[watch.Watched]:
    """One process for all kinds, unless it ends."""
    found = watch.Watched(SEED)
    yield found
    found.end()


@pytest.mark.parametrize("name", KINDS)
def test_hostile_inputs_are_taken_or_refused(name: str, watched: watch.Watched) -> None:
    if reason := unavailable(name):
        pytest.skip(reason)
    report = watch.Report()
    inputs = inputs_of({name: COUNTS[name]})
    watch.run_in(watched, inputs, {name: KINDS[name].limit_s}, report)
    findings = [f"{f.command(SEED)}\n{f.what}\n{f.detail}" for f in report.findings]
    assert not findings, "\n\n".join(findings)
    assert sum(report.outcomes.values()) == COUNTS[name]


# --- what the watcher itself notices -------------------------------------------------------------

BROKEN = '''
import ctypes, os, time
from fuzz.kind import Kind, sensible
from helm.errors import InvalidError

class Broken(Kind):
    """Each index is broken in its own way."""
    name, inputs, most_bytes = "broken", 9, 64 << 20
    def __init__(self, folder): pass
    def run(self, random, folder):
        index = int(folder.name.split("-")[-2])
        if index == 0: ctypes.string_at(0)
        if index == 1: os._exit(3)
        if index == 2: time.sleep(60)
        if index == 3: {}["absent"]
        if index == 4: self.held = bytearray(b"x") * (90 << 20)
        if index == 5: sensible(False, "two and two are five")
        if index == 6: raise InvalidError("[test] refused, as it should be")
        if index == 7: raise InvalidError("")
'''


def test_the_watcher_notices_what_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kind.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    watched, report = watch.Watched(SEED), watch.Report()
    try:
        watch.run_in(
            watched, inputs_of({"broken_kind.Broken": 9}), {"broken_kind.Broken": 1.0}, report
        )
    finally:
        watched.end()
    found = {finding.index: finding.what for finding in report.findings}
    assert "SIGSEGV" in found.pop(0)
    assert "exit of 3" in found.pop(1)
    assert "no answer in 1 s" in found.pop(2)
    assert "foreign KeyError" in found.pop(3)
    assert "memory: " in found.pop(4)
    assert "two and two are five" in found.pop(5)
    assert "foreign InvalidError" in found.pop(7)
    assert not found
    assert report.outcomes["broken_kind.Broken", "refused"] == 1
    assert report.outcomes["broken_kind.Broken", "accepted"] == 1
