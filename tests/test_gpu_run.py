"""tests/gpu/run.sh: both parts on the emulation of the CUDA runtime, what its steps may meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from gpu import run, target
from gpu.step import Failed, Skipped, Step

RUN = Path(__file__).parent / "gpu" / "run.sh"
PYTHON = sys.executable
MINUTES = 9.5  # of the ten that a part may take on a machine with a GPU


def execute(out: Path, build: Path, *words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Status and summary of a run on the emulation."""
    given = {
        **os.environ, "HELM_GPU_EMULATED": "1", "HELM_GPU_BUILD": str(build),
        "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", **environment,
    }  # fmt: skip
    status = subprocess.run([RUN, out, *words], env=given, stdout=subprocess.DEVNULL).returncode
    return status, json.loads((out / "summary.json").read_text())


def results(summary: dict[str, Any]) -> dict[str, str]:
    return {step["step"]: step["result"] for step in summary["steps"]}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", run.PARTS)
def test_a_part_passes_on_the_emulation(part: str, build: Path, tmp_path: Path) -> None:
    status, summary = execute(tmp_path, build, part)
    found = results(summary)
    assert status == 0, summary
    assert summary["status"] == "passed"
    assert list(found) == list(run.PARTS[part])
    reasons = {
        "memcheck": "skipped: compute-sanitizer needs a GPU",
        "racecheck": "skipped: compute-sanitizer needs a GPU",
    }
    skipped = {name: result for name, result in found.items() if result != "passed"}
    peer = skipped.pop("peer", "skipped: torch 2 sees no CUDA device")
    assert peer.startswith("skipped: torch")
    assert peer.endswith("sees no CUDA device")
    assert skipped == {name: reasons[name] for name in reasons if name in found}
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    benchmarks = {"first": ["bench.json"], "second": ["partitioned-8b.json"]}
    assert files == sorted(["logs.tar.gz", "machine.txt", "summary.json", *benchmarks[part]])
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert set(archive.getnames()) == {"logs", *(f"logs/{name}.log" for name in found)}
    if part == "first":
        cases = json.loads((tmp_path / "bench.json").read_text())["results"]
        assert all(case["median"] > 0 for case in cases)
        kinds = {case["case"].partition(" ")[0] for case in cases}
        assert kinds == {
            "matvec", "packed", "attention", "attend", "prompt", "layer", "norm", "activation"
        }  # fmt: skip
    else:
        [case] = json.loads((tmp_path / "partitioned-8b.json").read_text())["results"]
        assert case["plan"]["units_accelerator"] > 0
        assert case["verified"]["deviation"] <= case["verified"]["allowed"]
        assert "sees no CUDA device" in case["peer"]["skipped"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_step_that_fails_is_told_and_what_needs_it_is_skipped(
    build: Path, tmp_path: Path
) -> None:
    """A device without memory fails the device's tests, not the build."""
    status, summary = execute(tmp_path, build, "conformance", CUDA_EMULATION_BYTES="4096")
    assert status == 1
    assert summary["status"] == "failed"
    assert results(summary)["build"] == "passed"
    [failed] = [step for step in summary["steps"] if step["step"] == "conformance"]
    assert failed["result"] == "failed: helm_cuda_gpu_tests ended with status 1; see its log"
    assert "4096 bytes free" in failed["tail"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_installed_package_finds_cublas_where_python_imports_from(
    build: Path, tmp_path: Path
) -> None:
    """Plans, probes and engines, without any name in the environment."""
    assert execute(tmp_path, build, "package")[0] == 0
    libraries = build / "native" / "tests" / "native" / "emulated"
    wheel = tmp_path / "packages" / "nvidia" / "cu13" / "lib"
    driver = tmp_path / "driver"
    for folder, library in ((wheel, "libcublas.so.13"), (driver, "libcuda.so.1")):
        folder.mkdir(parents=True)
        (folder / library).symlink_to(libraries / library)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    environment.pop("HELM_CUBLAS_DIR", None)
    for folder, status in ((tmp_path, 1), (tmp_path / "packages", 0)):
        support = Path(__file__).parent / "support"
        environment["PYTHONPATH"] = f"{build / 'site'}:{folder}:{support}"
        ran = subprocess.run(
            [PYTHON, "-c", USES], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        if status == 1 and ran.returncode == 0:
            pytest.skip("this machine has a cuBLAS of its own")
        assert ran.returncode == status, ran.stderr
        assert status == 0 or "cuBLAS 13 was not found" in ran.stderr


USES = """
import helm
from device_profiles import fast_accelerator
from helm import _helm

assert _helm.accelerator_info("cuda").name == "Emulated device"
_helm.DeviceProbe("cuda", 1 << 20)
with helm.LLM(device="cuda", profile=fast_accelerator()) as llm:
    assert llm.plan.units_accelerator > 0
    assert len(llm.generate("A", max_tokens=2, ignore_eos=True).tokens) == 2
"""


def test_the_limits_of_a_part_leave_time_for_its_results() -> None:
    for names in run.PARTS.values():
        assert sum(run.KINDS[name].limit_s for name in names) <= MINUTES * 60


def test_what_a_step_needs_comes_before_it() -> None:
    assert run.steps_of(["peer"]) == ["package", "partitioned", "peer"]
    assert run.steps_of(["first"]) == list(run.PARTS["first"])
    assert run.steps_of(["second", "bench"]) == ["build", "bench", *run.PARTS["second"]]


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.steps_of(["frist"])
    assert 'there is no step "frist"; there are first, second, build' in capsys.readouterr().err


def test_commands_of_a_step_share_its_limit(tmp_path: Path) -> None:
    """Whatever they started ends with them."""
    begin = time.monotonic()
    with Step(tmp_path / "log", 4.0, {}) as step:
        step.run("echo", "first")
        with pytest.raises(Failed, match=r"took more than 4 s"):
            step.run("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    assert 4 <= step.seconds <= time.monotonic() - begin < 60
    assert "first\n" in step.text()
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    while child.exists() and child.read_bytes():  # empty: it waits for init to take note
        assert time.monotonic() - begin < 60
        time.sleep(0.1)


def test_a_step_says_why_it_failed_or_is_skipped(tmp_path: Path) -> None:
    with Step(tmp_path / "log", 60.0, {"WHY": "no such thing"}) as step:
        with pytest.raises(Skipped, match=r"^no such thing$"):
            step.run(PYTHON, "-c", "import os; print(os.environ['WHY']); raise SystemExit(77)")
        with pytest.raises(Failed, match=r"ended with status 3"):
            step.run(PYTHON, "-c", "raise SystemExit(3)")
        with pytest.raises(Failed, match=r"no-such-program"):
            step.run("no-such-program")


def test_a_sanitizer_that_does_not_know_the_device_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '========= Error: Device not supported'; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    at = run.Place(target.Gpu(), tmp_path, tmp_path)
    at.logs.mkdir()
    outcome = run.run_step("memcheck", at, [])
    assert outcome.result == "skipped: compute-sanitizer says: Device not supported"
    tool.write_text("#!/bin/sh\necho '========= Invalid read'; exit 1\n")
    outcome = run.run_step("memcheck", at, [])
    assert outcome.result.startswith("failed: compute-sanitizer ended with status 1")
    assert "Invalid read" in outcome.tail


def test_what_needs_a_failed_step_does_not_run(tmp_path: Path) -> None:
    at = run.Place(target.Gpu(), tmp_path, tmp_path)
    at.logs.mkdir()
    before = [run.Outcome("package", 1.0, 1.0, "failed: some reason")]
    assert run.run_step("models", at, before).result == "skipped: package failed"


def test_headers_that_came_along_are_given_to_cmake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("along", "named"):
        for header in target.HEADERS.values():
            (tmp_path / folder / header).parent.mkdir(parents=True)
            (tmp_path / folder / header).touch()
    monkeypatch.setattr(target, "FOLDER", tmp_path / "along")
    monkeypatch.setenv("HELM_JSON_INCLUDE", str(tmp_path / "named"))
    assert f"HELM_JSON_INCLUDE={tmp_path}/along" in target.Gpu().options()
    (tmp_path / "along" / target.HEADERS["HELM_JSON_INCLUDE"]).unlink()
    assert f"HELM_JSON_INCLUDE={tmp_path}/named" in target.Gpu().options()
    assert f"HELM_DOCTEST_INCLUDE={tmp_path}/along" in target.Gpu().options()


def test_native_tests_are_told_where_cublas_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "nvidia" / "cu13" / "lib"
    wheel.mkdir(parents=True)
    (wheel / "libcublas.so.13").touch()
    monkeypatch.setattr(sys, "path", ["/no/such/folder", str(tmp_path)])
    monkeypatch.setenv("HELM_CUBLAS_DIR", "/named")
    assert target.Gpu().environment(tmp_path) == {"HELM_CUBLAS_DIR": f"/named:{wheel}"}
