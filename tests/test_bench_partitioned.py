"""The benchmark of plans over two devices, on the simulated accelerator with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from device_profiles import fast_accelerator

BENCH = Path(__file__).parents[1] / "bench"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it printed and its JSON: one case that fits, one device too small."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "profile.json").write_text(fast_accelerator().to_json())
    command = [
        sys.executable, BENCH / "partitioned.py", "--device", "sim:vram=1GiB,threads=1",
        "--shapes", folder / "config.json", "--layers", "3", "--vram", "1GiB", "2GiB",
        "--profile", folder / "profile.json", "--cpu-blocks", "1", "--rounds", "2",
        "--prefill", "24", "40", "--context", "20", "--tokens", "4", "--json", folder / "out.json",
    ]  # fmt: skip
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
