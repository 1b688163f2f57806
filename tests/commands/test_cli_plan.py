"""helm-llm plan as users run it: without weights, without a GPU, for machines they do not have."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from plans import make_plan

import command
from helm.commands import common
from helm.compiler.problem import Space
from helm.machine.profile import load_profile, preset_names
from helm.model.families import read_config
from helm.plan.records import Workload

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
QWEN = str(CONFIGS / "qwen3-8b.json")
LLAMA = str(CONFIGS / "llama-3.1-70b.json")
PURPOSES = ("weights", "kv", "activations", "workspace", "staging", "reserve")


def helm(*arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    return command.helm("plan", *arguments, status=status, **variables)


def helm_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(helm(*arguments, "--json").stdout)
    return found


def test_what_is_cut_is_on_both_lanes_of_the_picture() -> None:
    out = helm(QWEN, "--profile", "thesis-4060", "--objective", "decode", "--policy", "cut").stdout
    lanes = re.findall(r"^  (CPU|GPU) ([ECGH ]+?) *$", out, re.M)
    assert [device for device, _ in lanes] == ["CPU", "GPU"]
    shared = sum(a != " " != b for a, b in zip(lanes[0][1], lanes[1][1], strict=False))
    assert f"{shared} cut between both" in out
    assert "layers cut: the CPU has" in out
    assert "whole layers" in out


def test_published_policies_are_planned_and_shown_beside_the_plan() -> None:
    given = (QWEN, "--profile", "rtx-3060-12gb-ddr4", "--ram", "48GiB")
    out = helm(*given, "--policies").stdout
    assert max(map(len, out.splitlines())) <= 80
    shown = out.split("Published policies\n")[1]
    for policy in ("zigzag", "helm-placement", "all-cpu", "workload-distribution"):
        assert re.search(rf"^  {policy} +\d +[\d.]+ .iB +[\d.]+ ", shown, re.M), policy
        assert f"  {policy}: " in shown
    one = helm(*given, "--policy", "zigzag").stdout
    assert "layers 0-35 (visit)" in one
    said = " ".join(one.split())
    assert "visit the GPU in each step, once for all requests, through" in said
    refused = helm(QWEN, "--profile", "thesis-4060", "--policy", "all-cpu", status=1).stderr
    assert re.search(r"--policy all-cpu .*lacks 1\.\d+ GiB of RAM", refused), refused


def test_the_plan_is_a_picture_with_its_reasons() -> None:
    given = ("--profile", "thesis-4060", "--objective", "decode", "--policy", "layer-partition")
    out = helm(QWEN, *given).stdout
    assert "\x1b" not in out, "no colours in a pipe"
    assert max(map(len, out.splitlines())) <= 80
    lanes = re.findall(r"^  (CPU|GPU) ([ECGH ]+?) *$", out, re.M)
    held = [(device, cells.replace(" ", "")) for device, cells in lanes]
    assert held == [("CPU", "E" + "C" * 16 + "H"), ("GPU", "G" * 20)]
    for text in (
        "an estimate, not measured", "layers 0-15", "layers 16-35", "KV cache", "limit",
        "time to first token", "at 576 positions", "at the full context of 4,096",
        "bottleneck: CPU memory bandwidth", "+1 GiB VRAM", "+10 GB/s RAM bandwidth",
        "all on the GPU", "fill the GPU", "all on the CPU", "% slower",
    ):  # fmt: skip
        assert text in " ".join(out.split()), text
    assert re.search(r"lacks \d+\.\d\d GiB of VRAM", out)


@pytest.mark.parametrize(
    ("preset", "columns"),
    [
        ("thesis-4060", 80),
        ("thesis-4060", 120),
        ("cpu-desktop-64gb-ddr5", 80),
        ("cpu-laptop-16gb", 80),
    ],
)
def test_no_word_is_broken_at_the_edge_of_a_terminal(columns: int, preset: str) -> None:
    """What does not fit there either is an error, which wraps as well."""
    arguments = ("plan", QWEN, "--profile", preset, "-c", "32768")
    with command.Terminal(arguments, columns) as terminal:
        status = terminal.status()
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.output).replace("\r", "")
    assert max(map(len, shown.splitlines())) <= columns
    piped = command.helm(*arguments, status=status)
    # Lanes of letters and bars are as wide as the terminal allows.
    words = {
        word for word in (piped.stdout + piped.stderr).split() if not re.match(r"[#ECGH]+$", word)
    }
    assert words <= set(shown.split())


def test_the_documents_show_what_is_printed() -> None:
    document = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    example = "$ helm-llm plan tests/data/configs/qwen3-8b.json "
    shown = document.split(example)[1].split("```")[0].splitlines()
    out = [line.rstrip() for line in helm(QWEN, *shown[0].split()).stdout.splitlines()]
    assert [line for line in shown[1:] if line != "..." and line not in out] == []


def test_json_has_the_documented_names_and_the_plan_s_values() -> None:
    found = helm_json(QWEN, "--profile", "thesis-4060", "--context", "2048")
    plan = make_plan(
        read_config(Path(QWEN)), None, max_sequences=1, profile=load_profile("thesis-4060"),
        workload=Workload(context=2048, objective="total"), space=Space(policy="auto"),
    )  # fmt: skip
    assert plan.prediction is not None
    units = [found[f"units_{where}"] for where in ("cpu", "cut", "accelerator")]
    assert units == [plan.units_cpu, plan.units_cut, plan.units_accelerator]
    assert sum(units) == 38
    predicted = plan.prediction.predicted
    assert found["predicted"]["ttft_s"] == predicted.ttft_s
    assert found["predicted"]["decode_tokens_per_s"] == predicted.decode_tokens_per_s
    for device in ("cpu", "accelerator"):
        for purpose in PURPOSES:
            size = getattr(plan.memory[device], f"{purpose}_bytes")
            assert found["memory"][device][f"{purpose}_bytes"] == size
    assert found["bottleneck"] == plan.prediction.bottleneck
    assert [a["label"] for a in found["alternatives"]] == [
        a.label for a in plan.prediction.alternatives
    ]
    assert found["profile"]["estimated"] is True


@pytest.mark.parametrize("objective", ["decode", "ttft", "total", "throughput"])
def test_every_objective_is_best_at_itself(objective: str) -> None:
    key = {"decode": "decode_s", "ttft": "ttft_s"}.get(objective, "total_s")
    other = "ttft" if objective == "decode" else "decode"
    assert predicted_for(objective)[key] <= predicted_for(other)[key]


@cache
def predicted_for(objective: str) -> dict[str, Any]:
    arguments = (QWEN, "--profile", "rtx-4070-12gb-ddr5", "--batch", "2")
    found: dict[str, Any] = helm_json(*arguments, "--objective", objective)["predicted"]
    return found


def test_options_reach_the_plan() -> None:
    found = helm_json(
        LLAMA, "--profile", "thesis-3090", "--ram", "300GB", "--vram", "10GiB",
        "--prompt-tokens", "100", "--output-tokens", "20", "--batch", "2", "--context", "1000",
        "--dtype", "half", "--kv-dtype", "float32",
    )  # fmt: skip
    assert found["workload"] == {
        "prompt": 100, "output": 20, "batch": 2, "context": 1000, "objective": "total",
    }  # fmt: skip
    assert found["limits"] == {"cpu": 300 * 10**9, "accelerator": 10 << 30}
    assert sum(found["memory"]["accelerator"].values()) <= 10 << 30
    assert found["model"]["dtypes"] == ["f16"]
    assert found["model"]["kv_dtype"] == "f32"


def test_an_80_layer_model_fits_80_columns() -> None:
    out = helm(LLAMA, "--profile", "thesis-3090", "--ram", "200GiB").stdout
    assert "(one letter for 2 layers)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_bundled_model_and_a_folder_without_weights(tmp_path: Path) -> None:
    assert "bundled" in helm("--profile", "cpu-laptop-16gb").stdout
    (tmp_path / "config.json").write_text(Path(QWEN).read_text())
    found = helm_json(str(tmp_path), "--profile", "rtx-4090-24gb-ddr5")
    assert found["model"]["name"] == tmp_path.name
    assert found["units_cpu"] <= 1  # the embedding, of which a token needs one row
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    shown = helm(str(tmp_path), "--profile", "rtx-4090-24gb-ddr5")
    assert "note: planned from config.json alone" in " ".join(shown.stdout.split())
    (notice,) = helm_json(str(tmp_path), "--profile", "rtx-4090-24gb-ddr5")["notices"]
    assert "planned from config.json alone" in notice


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plots(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    file = tmp_path / f"plan.{suffix}"
    helm(QWEN, "--profile", "thesis-4060", "--plot", str(file))
    data = file.read_bytes()
    assert len(data) > 5000
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert data.startswith(magic)


@pytest.mark.parametrize(
    ("profile", "lanes"),
    [
        ("thesis-4060", {"cpu", "accelerator", "up", "down"}),
        ("cpu-desktop-64gb-ddr5", {"cpu"}),
    ],
)
def test_a_timeline_is_drawn_and_listed(profile: str, lanes: set[str], tmp_path: Path) -> None:
    file = tmp_path / "steps.svg"
    found = helm_json(QWEN, "--profile", profile, "--objective", "total", "--timeline", str(file))
    decode, prompt = found["timeline"]
    assert decode["seconds"] == pytest.approx(found["predicted"]["decode_s"])
    assert prompt["seconds"] == pytest.approx(found["predicted"]["ttft_s"])
    assert {task["lane"] for task in decode["tasks"]} == lanes
    for steps in (decode, prompt):
        assert max(task["end_s"] for task in steps["tasks"]) <= steps["seconds"] * (1 + 1e-9)
    root = ElementTree.fromstring(file.read_text())
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(decode["tasks"]) + len(prompt["tasks"])
    assert any(title.startswith("run embedding..") for title in titles)
    texts = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("predicted: ") for text in texts)
    assert any(text.startswith("Decode at 576 positions") for text in texts)


def test_a_plot_of_a_machine_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    file = tmp_path / "plan.png"
    helm(QWEN, "--profile", "cpu-desktop-64gb-ddr5", "--objective", "total", "--plot", str(file))
    assert len(file.read_bytes()) > 5000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = helm(
        QWEN, "--profile", "thesis-4060", "--plot", "x.png", status=2, PYTHONPATH=path
    )  # fmt: skip
    assert "pip install 'helm-llm[plot]'" in result.stderr


def test_profiles_are_listed() -> None:
    out = helm("--list-profiles").stdout
    assert all(name in out for name in preset_names())
    assert "estimates" in out


def test_a_model_too_large_says_what_is_missing_where() -> None:
    result = helm(LLAMA, "--profile", "rtx-4060-8gb-ddr5", status=1)
    assert result.stdout == ""
    assert re.search(r"lacks \d+\.\d\d GiB of V?RAM", result.stderr)
    assert re.search(r"it would fit with \d+\.\d\d GiB more RAM", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((QWEN, "--profile", "rtx-9999"), "presets are .*thesis-4060"),
        ((QWEN, "--profile", "thesis-4060", "--vram", "lots"), "--vram is 'lots'; expected a size"),
        ((QWEN, "--profile", "thesis-4060", "--ram=-1"), "--ram is '-1'; expected a size"),
        ((QWEN, "--profile", "cpu-laptop-16gb", "--vram", "8GiB"), "has no accelerator"),
        ((QWEN, "--profile", "thesis-4060", "--context", "0"), "--context must be .* got 0"),
        ((QWEN, "--profile", "thesis-4060", "--context", "99999"), "the model allows 1 to 40960"),
        (
            (QWEN, "--profile", "thesis-4060", "--batch", "0"),
            "--batch must be .* got 0",
        ),
        (
            (QWEN, "--profile", "thesis-4060", "--prompt-tokens", "0"),
            "--prompt-tokens must be .* got 0",
        ),
        ((QWEN, "--profile", "thesis-4060", "--plot", "plan.gif"), "ending in .png"),
        ((QWEN, "--profile", "thesis-4060", "--timeline", "x.png"), "ending in .svg"),
        ((QWEN, "--profile", "thesis-4060", "--timeline", "/absent/x.svg"), "write to /absent"),
        ((QWEN, "--formats", "--timeline", "x.svg"), "leave --timeline out"),
        ((QWEN, "--profile", "thesis-4060", "--plot", "/absent/x.png"), "cannot write to /absent"),
        ((QWEN, "--profile", "thesis-4060", "--write", "x"), "--write needs the model's weights"),
        (("--profile", "cpu-laptop-16gb", "--write", "/absent/x"), "cannot write /absent/x: No su"),
        (("/absent/config.json", "--profile", "thesis-4060"), "does not exist"),
        (("/absent", "--profile", "thesis-4060"), "no folder /absent"),
        (("Absent/Model", "--profile", "thesis-4060"), "HF_HUB_OFFLINE is set"),
        ((__file__, "--profile", "thesis-4060"), "test_cli_plan.py"),
    ],
)
def test_wrong_input_is_named(arguments: tuple[str, ...], message: str) -> None:
    assert re.search(message, helm(*arguments, status=2).stderr)


def test_throughput_where_the_other_objectives_do_not_fit() -> None:
    options = ("--batch", "8", "--context", "4096", "--ram", "13.2GiB", "--vram", "4GiB")
    machine = (QWEN, "--profile", "thesis-4060", *options)
    assert "does not fit on thesis-4060" in helm(*machine, status=1).stderr
    planned = helm(*machine, "--objective", "throughput").stdout
    assert "requests wait while it is full" in " ".join(planned.split())
    less = helm(*machine, "--objective", "throughput", "--ram", "7GiB", status=1).stderr
    more = re.search(
        r"one at a time, does not fit .*; it would fit with ([\d.]+) GiB more RAM", less
    )
    assert more
    assert "smaller batch" not in less
    enough = f"{7.01 + float(more[1]):.2f}GiB"
    planned = helm(*machine, "--objective", "throughput", "--ram", enough).stdout
    assert "requests wait" in " ".join(planned.split())


def test_disturbed_measurements_are_mentioned(tmp_path: Path) -> None:
    disturbed = dataclasses.replace(load_profile("thesis-4060"), unsettled=("one", "another"))
    (tmp_path / "mine.json").write_text(disturbed.to_json())
    shown = helm(QWEN, "--profile", str(tmp_path / "mine.json"), "--context", "512").stdout
    assert "disturbed 2 measurements of thesis-4060" in " ".join(shown.split())


def test_rates_that_were_not_measured_are_mentioned(tmp_path: Path) -> None:
    whole = load_profile("cpu-desktop-64gb-ddr5").to_dict()
    whole.update(estimated=False, name="an older one")
    older = tmp_path / "older.json"
    older.write_text(json.dumps(whole), encoding="utf-8")
    said = "an older one has no rates for weights in 8 and 4 bits"
    for dtype, told in (("q8", True), ("q4", True), ("bf16", False)):
        notices = helm_json(QWEN, "--profile", str(older), "--dtype", dtype)["notices"]
        assert any(notice.startswith(said) for notice in notices) == told


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    result = helm(str(tmp_path), "--profile", "thesis-4060", status=2)
    assert "config.json does not exist" in result.stderr


def test_the_presets_as_json() -> None:
    rows = {row["name"]: row for row in json.loads(helm("--list-profiles", "--json").stdout)}
    assert sorted(rows) == preset_names()
    own = load_profile("thesis-4060").accelerator
    assert own is not None
    assert rows["thesis-4060"]["vram_bytes"] == own.memory_bytes
    assert rows["thesis-4060"]["vram_bytes_per_s"] == max(own.matvec_bytes_per_s.values())
    assert rows["cpu-laptop-16gb"]["accelerator"] is None
    assert rows["cpu-laptop-16gb"]["vram_bytes"] is None


def test_remedies_are_possible() -> None:
    refused = helm(QWEN, "--profile", "thesis-4060", "--kv-dtype", "i8", status=2).stderr
    assert "or another --profile" in refused
    limited = command.helm("run", "--ram", "69MiB", status=1).stderr
    assert "allow more with --ram if that was limited, or choose a smaller model\n" in limited
    wide = command.helm("run", "--ram", "69MiB", "--dtype", "f32", status=1).stderr
    assert "a smaller model or a 16-bit --dtype\n" in wide


@pytest.mark.parametrize("model", ["~nouser/x", "a long prompt without a model " * 10])
def test_a_model_that_can_be_no_folder(model: str) -> None:
    for name in ("plan", "run", "bench"):
        arguments = (model, "--profile", "thesis-4060") if name == "plan" else (model,)
        result = command.helm(name, *arguments, status=2)
        assert result.stderr.startswith(f"error: [model] no folder {model[:40]}")
        assert len(result.stderr) < 200


@pytest.mark.parametrize("rate", ["NaN", "-1", "0", "Infinity", "null"])
def test_a_profile_with_an_impossible_rate(rate: str, tmp_path: Path) -> None:
    text = load_profile("thesis-4060").to_json()
    file = tmp_path / "mine.json"
    file.write_text(
        re.sub(r'("latency_s": )[^,]+,', rf"\g<1>{'-1' if rate == '0' else rate},", text)
    )
    result = helm(QWEN, "--profile", str(file), status=2)
    assert "mine.json" in result.stderr


def test_the_rate_that_is_shown_is_of_one_sequence() -> None:
    for batch in (1, 4):
        plan = make_plan(
            read_config(Path(QWEN)), None, profile=load_profile("thesis-4060"),
            workload=Workload(512, 128, batch, 4096), memory_bytes=64 << 30,
        )  # fmt: skip
        assert plan.prediction is not None
        shown = common.predicted_rate(SimpleNamespace(plan=plan))  # type: ignore[arg-type]
        assert shown == pytest.approx(1.0 / plan.prediction.predicted.decode_s)


def test_run_predicts_when_the_machine_has_been_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("helm._helm", reason="the native module is not built")
    from helm.measure.profile_cache import cache_path, save_profile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*arguments: str, status: int = 0) -> str:
        return command.helm("run", "--max-tokens", "4", *arguments, status=status).stderr

    def plan_line() -> str:
        return next(line for line in run().splitlines() if line.startswith("[plan"))

    assert "predicted" not in plan_line()
    assert not list(tmp_path.rglob("*.json")), "run must not measure"
    cache_path().parent.mkdir(parents=True)
    save_profile(load_profile("cpu-desktop-64gb-ddr5"), cache_path())
    assert re.search(r"\| predicted [\d,]+\.\d tokens/s\]$", plan_line())
    assert "1.0 MiB are available" in run("--ram", "1MiB", status=1)
