"""bench/compare.py from end to end with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench_config import CONFIG
from compare_plots import draw

BENCH = Path(__file__).parents[2] / "bench"
TINY = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCH / "compare.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def test_peak_memory_is_the_process_own() -> None:
    held = np.ones(1 << 26)  # by this process
    code = "from worker import peak_rss_bytes; print(peak_rss_bytes())"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=True
    )
    assert 1 << 20 < int(run.stdout) < held.nbytes


@pytest.mark.slow
def test_engines_are_verified_measured_saved_and_shown_again(tiny: Path) -> None:
    out = tiny / "out.json"
    run = bench(
        "--shapes", tiny / "config.json", "--dtypes", "bf16", "--rounds", "2", "--tokens", "8",
        "--engines", "helm", "helm:scalar", "transformers:f32", "--root", tiny, "--json", out,
        "--scenarios", "decode", "prefill-70", "decode-x4", "decode@1500", "--decode-prompt", "9",
        "--repeats", "0", "--probe-mib", "8",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    document = json.loads(out.read_text())
    assert not {"root", "json"} & set(document["settings"])  # results are published
    (model,) = document["models"]
    assert model["left_out"] == []
    for number, processes in enumerate(model["rounds"]):
        order = ["helm", "helm:scalar", "transformers:f32"]
        assert [p["engine"] for p in processes] == (order[::-1] if number else order)
        for process in processes:
            assert 0 <= process["deviation"] < 0.05
            assert 0 < process["load_s"] <= process["first_token_s"]
            helm = process["engine"] == "helm"
            for measured in process["runs"]:
                assert measured["seconds"] > 0
                assert measured["typical_seconds"] > 0
                assert 0 < sum(measured["ops"].values()) <= measured["seconds"] or not helm
                parts = {"decode": 2, "decode-x4": 2, "decode@1500": 1, "prefill-70": 1}
                assert len(measured["ceilings"]) == parts[measured["scenario"]] + 1
                beside = helm and measured["scenario"] == "decode-x4"
                assert (measured["alone_seconds"] > 0) == beside
        (scalar,) = [p for p in processes if p["engine"] == "helm:scalar"]
        assert scalar["details"] == {"isa": "scalar", "weights": "copied"}
        assert scalar["weight_bytes"] > 0
    names = [r["scenario"] for r in model["rounds"][0][0]["runs"]]
    assert names == ["decode", "prefill-70", "decode-x4", "decode@1500"]
    assert set(model["rounds"][0][0]["runs"][0]["ops"]) >= {"linear", "attention", "norm"}

    plot = tiny / "out.svg"
    again = bench("--from", out, "--markdown", "--plot", plot)
    assert again.returncode == 0, again.stderr
    assert "| decode@1500 | helm |" in again.stdout
    assert plot.read_text().rstrip().endswith("</svg>")
    assert [file.name for file in draw([document, document], plot)] == [
        f"out-{tiny.name}-bf16.svg"
    ] * 2


@pytest.mark.slow
def test_an_engine_with_other_logits_is_not_timed(tiny: Path) -> None:
    folder = tiny / f"{tiny.name}-f32"
    common = ["--shapes", tiny / "config.json", "--dtypes", "f32", "--root", tiny, "--rounds", "1"]
    common += ["--engines", "helm", "--scenarios", "decode", "--tokens", "2", "--probe-mib", "8"]
    assert bench(*common).returncode == 0
    reference = np.load(folder / "reference.npy")
    reference[-1] = reference[0]
    np.save(folder / "reference.npy", reference)
    run = bench(*common)
    assert run.returncode == 1
    assert "helm: it computes other logits than transformers:f32" in run.stdout


def test_an_engine_that_does_not_exist_and_a_setting_that_hides_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench("--shapes", tiny / "config.json", "--root", tiny, "--engines", "llama.cpp:avx2")
    assert run.returncode == 1
    assert "no engine 'llama.cpp:avx2'" in run.stderr
    monkeypatch.setenv("HELM_CPU_ISA", "scalar")
    run = bench("--shapes", tiny / "config.json", "--root", tiny, "--engines", "helm")
    assert "HELM_CPU_ISA is set" in run.stderr
