"""The benchmark of KV that overflows, on the simulated accelerator with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import long_context
import pytest
from tiny_shape import TINY

from device_profiles import fast_accelerator


def test_errors_are_of_each_round_by_what_most_measurements_say() -> None:
    row = long_context.Row("cpu", 600, 1.0, [2.0, 1.0], [1.0, 1.5, 9.0])
    assert row.errors == [-0.25, 0.5]


def test_overflow_is_verified_measured_and_set_beside_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, out = tmp_path / "profile.json", tmp_path / "out.json"
    profile.write_text(fast_accelerator().to_json())
    monkeypatch.setitem(long_context.SHAPES, "tiny", {**TINY, "max_position_embeddings": 2048})
    monkeypatch.setattr(long_context, "PROBE_S", 0.01)
    monkeypatch.setattr(sys, "argv", [
        "long_context.py", "--shape", "tiny", "--budget", "512", "--page-tokens", "16",
        "--contexts", "600", "1200", "--rounds", "2", "--device", "sim:vram=1GiB,threads=1",
        "--threads", "1", "--profile", str(profile), "--json", str(out),
    ])  # fmt: skip
    long_context.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["name"], row["context"]) for row in rows] == [
        (site, context) for site in ("stream", "cpu") for context in (600, 1200)
    ]
    for near, far in zip(rows[::2], rows[1::2], strict=True):
        assert near["evicted_blocks"] < far["evicted_blocks"]
        assert near["bytes"] < far["bytes"]
        for row in (near, far):
            assert len(row["seconds"]) == 2
            assert len(row["predicted_s"]) == 5  # before, and after each site
            assert min(row["predicted_s"]) > 0
