"""The benchmark of plans over two devices, on the simulated accelerator with a tiny model."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_shape import TINY

import partitioned
from device_profiles import fast_accelerator
from peers import partitioned_peer

BENCH = Path(__file__).parents[2] / "bench"


def arguments(folder: Path, *vram: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "profile.json").write_text(fast_accelerator().to_json())
    return [
        "--device", "sim:vram=1GiB,threads=1", "--shapes", str(folder / "config.json"),
        "--layers", "3", "--vram", *vram, "--profile", str(folder / "profile.json"),
        "--cpu-blocks", "1", "--rounds", "2", "--prefill", "24", "40", "--context", "20",
        "--tokens", "4", "--json", str(folder / "out.json"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it printed and its JSON: one case that fits, one device too small."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(BENCH / "partitioned.py"), *arguments(folder, "1GiB", "2GiB")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((folder / "out.json").read_text())


def test_a_case_is_predicted_verified_measured_and_set_beside_the_roofline(
    ran: tuple[str, dict[str, Any]],
) -> None:
    case = ran[1]["results"][0]
    assert (case["layers"], case["vram_bytes"], case["skipped"]) == (3, 1 << 30, "")
    assert (case["plan"]["units_cpu"], case["plan"]["units_accelerator"]) == (2, 3)
    assert case["plan"]["memory"]["accelerator"]["weights_bytes"] > 0
    assert all(size > 0 for size in case["plan"]["weights_read_bytes"].values())
    assert case["verified"]["deviation"] == 0.0
    assert case["verified"]["greedy_tokens_repeated"] == 16
    assert case["predicted"]["decode_s"] > 0
    assert set(case["predicted"]["prefill_s"]) == {"24", "40"}
    assert 1 <= len(case["rounds"]) <= 2
    for measured in case["rounds"]:
        assert measured["decode_s"] > 0
        assert measured["dram_bytes_per_s"] > 1e8
        assert all(seconds > 0 for seconds in measured["prefill_s"].values())
    figures = case["figures"]
    rates = sorted(figures["decode_tokens_per_s"])
    assert rates == sorted(1 / measured["decode_s"] for measured in case["rounds"])
    assert figures["roofline_share"] > 0
    assert set(figures["prefill_error"]) == {"24", "40"}
    assert figures["over_peer"] is None


def test_what_cannot_be_run_is_skipped_with_the_reason(ran: tuple[str, dict[str, Any]]) -> None:
    case, large = ran[1]["results"]
    assert "does not run on sim" in case["peer"]["skipped"]
    assert "1.00 GiB free" in large["skipped"]
    assert large["rounds"] == []


def test_the_prediction_is_printed_before_the_table(ran: tuple[str, dict[str, Any]]) -> None:
    printed, document = ran
    assert 0 <= printed.index("predicted") < printed.index("median [least, most]")
    assert document["machine"]["device"] == "simulated accelerator"
    assert document["profile"]["format"] == "helm-profile"
    assert document["settings"]["cpu_blocks"] == 1
    assert "json" not in document["settings"]  # results are published


def test_what_was_measured_is_kept_before_the_peer_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the peer may come in a run of its own."""
    steps, seen = [2.0, 3.0, 5.0], []

    def stand_in(_raw: dict[str, Any], cap: int, args: Any) -> dict[str, Any]:
        [kept] = json.loads((tmp_path / "out.json").read_text())["results"]
        seen.append((cap, args.peer_seconds, len(kept["rounds"]) > 0, kept["peer"]))
        return {"decode_s": steps}

    monkeypatch.setattr(partitioned, "run_peer", stand_in)
    monkeypatch.setattr(partitioned_peer, "run_peer", stand_in)
    given = arguments(tmp_path, "1GiB")
    for more in ([], ["--only-peer", "--peer-seconds", "7"]):
        monkeypatch.setattr(sys, "argv", ["partitioned.py", *given, *more])
        partitioned.main()
        [result] = json.loads((tmp_path / "out.json").read_text())["results"]
        assert result["peer"] == {"decode_s": steps}
        typical = statistics.median(measured["decode_s"] for measured in result["rounds"])
        assert result["figures"]["over_peer"] == pytest.approx(3 / typical)
    assert seen == [(1 << 30, 120.0, True, {}), (1 << 30, 7.0, True, {"decode_s": steps})]


def test_a_peer_needs_results_of_the_same_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {"results": [{"shape": "other", "vram_bytes": 1 << 30}]}
    given = arguments(tmp_path, "1GiB")
    (tmp_path / "out.json").write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["partitioned.py", *given, "--only-peer"])
    with pytest.raises(SystemExit, match=r"has results of \[\('other', 1073741824\)\]"):
        partitioned.main()


def test_a_peer_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "peer.py"
    slow.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(partitioned_peer, "PEER", slow)
    args = argparse.Namespace(
        no_peer=False, device="cuda", dtype="bf16", context=8, prefill=[8], rounds=1, seconds=1.0,
        peer_seconds=0.5,
    )  # fmt: skip
    assert partitioned_peer.run_peer(TINY, 1 << 30, args) == {"skipped": "took more than 0.5 s"}


def test_nothing_measured_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(tmp_path, "2GiB")
    monkeypatch.setattr(sys, "argv", ["partitioned.py", *given])
    with pytest.raises(SystemExit) as ended:
        partitioned.main()
    assert ended.value.code == partitioned_peer.SKIPPED
