"""Checks and measures HELM on this machine's NVIDIA GPU, without network.

    tests/gpu/run.sh OUT first|second|STEP...

Each part takes less than ten minutes, on a machine of its own or on the same:

    first    build        the plugin for this GPU, native tests and the benchmark, in build/gpu
             conformance  the device and its stages against the scalar oracle, and engines whose KV
                          pages overflow into host memory; without and with HELM_CUDA_PDL
             memcheck     the former under compute-sanitizer
             racecheck    its stages under compute-sanitizer's search for races
             bench        helm-bench-cuda
             package      pip install of the whole of HELM into build/gpu/site; opens the GPU
    second   models       that package: every family at every cut gives the tokens of the CPU
             partitioned  bench/partitioned.py: Qwen3-8B's shape in 8 GiB
             peer         Accelerate with the same memory
    by name  larger       bench/partitioned.py: Qwen3-14B's and Qwen3-32B's shapes in 24 GiB

What a step needs runs before it. OUT gets summary.json and logs.tar.gz, both rewritten after every
step, machine.txt, and the JSON of the benchmarks; what lies there by these names is replaced. The
status is 1 if a step failed. A step whose command ends with 77 is skipped, with its last line as
the reason.

Needed are CUDA 13's nvcc, cmake, ninja, and the headers nlohmann/json.hpp and doctest/doctest.h, in
build/gpu-headers (headers.sh puts them there), HELM_JSON_INCLUDE and HELM_DOCTEST_INCLUDE, or the
system. With HELM_GPU_EMULATED=1 all runs on the emulation of the CUDA runtime instead, small: that
the steps work, not the GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.step import ROOT, Failed, Skipped, Step
from gpu.target import Emulated, Gpu, Target

PARTS = {
    "first": ("build", "conformance", "memcheck", "racecheck", "bench", "package"),
    "second": ("package", "models", "partitioned", "peer"),
}
LARGER = ["--shapes", "qwen3-14b", "qwen3-32b", "--vram", "24GiB"]


@dataclass(frozen=True)
class Place:
    """Where a run works. build: outputs that later runs build upon. out: its results."""

    target: Target
    build: Path
    out: Path

    @property
    def tree(self) -> Path:
        return self.build / "native"

    @property
    def tests(self) -> Path:
        return self.tree / "tests" / "native" / "helm_cuda_gpu_tests"

    @property
    def site(self) -> Path:
        return self.build / "site"

    @property
    def logs(self) -> Path:
        return self.build / "logs"


def build(step: Step, at: Place) -> None:
    native(step, at, "helm_cuda_gpu_tests", "helm_cuda_gpu_engine_tests", "helm-bench-cuda")


def native(step: Step, at: Place, *targets: str) -> None:
    step.run(
        "cmake", "-S", ROOT, "-B", at.tree, "-G", "Ninja", "-DHELM_TESTS=ON", "-DHELM_BENCH=ON",
        f"-DPython_EXECUTABLE={sys.executable}", *(f"-D{option}" for option in at.target.options()),
    )  # fmt: skip
    step.run("cmake", "--build", at.tree, "--target", *targets)


def conformance(step: Step, at: Place) -> None:
    engines = at.tests.with_name("helm_cuda_gpu_engine_tests")
    for overlap in ("0", "1"):
        step.run(at.tests, *at.target.devices, HELM_CUDA_PDL=overlap)
        step.run(engines, *at.target.engines, HELM_CUDA_PDL=overlap)


def sanitized(tool: str, *tests: str) -> Callable[[Step, Place], None]:
    def check(step: Step, at: Place) -> None:
        at.target.check_sanitizer()
        try:
            step.run("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", at.tests, *tests)
        except Failed:
            if "Device not supported" in step.text():
                raise Skipped("compute-sanitizer says: Device not supported") from None
            raise

    return check


def bench(step: Step, at: Place) -> None:
    helm_bench = at.tree / "bench" / "native" / "cuda" / "helm-bench-cuda"
    step.run(helm_bench, "--json", at.out / "bench.json", *at.target.bench)


def package(step: Step, at: Place) -> None:
    options = (f"-Ccmake.define.{option}" for option in at.target.options())
    step.run(
        sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
        "--no-index", "--no-build-isolation", "--upgrade", "--target", at.site,
        f"-Cbuild-dir={at.build / 'wheel'}", *options, ROOT,
    )  # fmt: skip
    if at.target.plugin is not None:
        native(step, at, at.target.plugin)
        at.target.add_plugin(at.tree, at.site / "helm")
    python(
        step, at, "-c", "from helm.machine import devices; print(devices.open_accelerator('cuda'))"
    )


def python(step: Step, at: Place, *arguments: str | Path, **environment: str) -> None:
    """With the package that the step of this name installed."""
    path = os.pathsep.join(filter(None, (str(at.site), os.environ.get("PYTHONPATH"))))
    step.run(sys.executable, *arguments, PYTHONPATH=path, **environment)


def require(*modules: str) -> None:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise Skipped(f"{name} is not installed")


def models(step: Step, at: Place) -> None:
    require("pytest", "torch", "transformers")
    parallel = importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) > 4
    python(
        step, at, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(["-n", "4"] * parallel),
        *at.target.models, "tests/engine/test_partition.py", HELM_TEST_DEVICE="cuda",
    )  # fmt: skip


def partitioned(step: Step, at: Place) -> None:
    require("numpy", "rich")
    bench_partitioned(step, at, "8b", *at.target.partitioned(at.build), "--no-peer")


def peer(step: Step, at: Place) -> None:
    require("torch", "transformers", "accelerate")
    given = at.target.partitioned(at.build)
    bench_partitioned(step, at, "8b", *given, "--only-peer", "--peer-seconds", "110")


def larger(step: Step, at: Place) -> None:
    require("numpy", "rich")
    bench_partitioned(step, at, "larger", *LARGER)


def bench_partitioned(step: Step, at: Place, name: str, *arguments: str) -> None:
    results = at.out / f"partitioned-{name}.json"
    python(
        step, at, ROOT / "bench" / "partitioned.py", "--device", "cuda", *arguments,
        "--json", results,
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A step: how long it may take, what must have run before, what it does."""

    limit_s: float
    needs: str | None
    act: Callable[[Step, Place], None]


STAGES = "a stage agrees with the scalar oracle*"
KINDS = {
    "build": Kind(150, None, build),
    "conformance": Kind(45, "build", conformance),
    "memcheck": Kind(60, "build", sanitized("memcheck")),
    "racecheck": Kind(60, "build", sanitized("racecheck", f"--test-case={STAGES}")),
    "bench": Kind(90, "build", bench),
    "package": Kind(120, None, package),
    "models": Kind(120, "package", models),
    "partitioned": Kind(150, "package", partitioned),
    "peer": Kind(130, "partitioned", peer),
    "larger": Kind(300, "package", larger),
}


def steps_of(words: list[str]) -> list[str]:
    """The steps of parts and names, and what they need, in order. SystemExit for another word."""
    wanted: set[str] = set()
    for word in words:
        names = PARTS.get(word, (word,))
        for name in names:
            step: str | None = name
            while step is not None:
                if step not in KINDS:
                    known = ", ".join([*PARTS, *KINDS])
                    stop(f'there is no step "{word}"; there are {known}')
                wanted.add(step)
                step = KINDS[step].needs
    return [name for name in KINDS if name in wanted]


def stop(problem: str) -> None:
    print(f"tests/gpu/run.sh: {problem}", file=sys.stderr)
    raise SystemExit(2)


@dataclass(frozen=True)
class Outcome:
    """result: "passed", or "skipped" or "failed" with the reason. tail: of a failed step's log."""

    step: str
    seconds: float
    limit_s: float
    result: str
    tail: str = ""


class Report:
    """What OUT says of the run, at any time."""

    def __init__(self, at: Place, words: list[str]) -> None:
        self.at, self.outcomes = at, list[Outcome]()
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        self.head = {"gpu": at.target.name(), "commit": commit, "asked": words}
        (at.out / "machine.txt").write_text(at.target.facts())
        self.write("running")

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        with tarfile.open(self.at.build / "logs.tar.gz", "w:gz") as archive:
            archive.add(self.at.logs, "logs")
        shutil.move(self.at.build / "logs.tar.gz", self.at.out / "logs.tar.gz")
        self.write("running")
        print(outcome.tail, end="")
        print(f"{outcome.step:<12} {outcome.seconds:6.1f} s  {outcome.result}", flush=True)

    def write(self, status: str) -> None:
        document = {**self.head, "status": status, "steps": [asdict(o) for o in self.outcomes]}
        part = self.at.build / "summary.json"
        part.write_text(json.dumps(document, indent=1) + "\n")
        shutil.move(part, self.at.out / "summary.json")

    def finish(self) -> int:
        failed = any(o.result.startswith("failed") for o in self.outcomes)
        self.write("failed" if failed else "passed")
        return int(failed)


def run_step(name: str, at: Place, before: list[Outcome]) -> Outcome:
    kind = KINDS[name]
    limit_s = kind.limit_s * at.target.patience
    with Step(at.logs / f"{name}.log", limit_s, at.target.environment(at.tree)) as step:
        try:
            for outcome in before:
                if outcome.step == kind.needs and outcome.result != "passed":
                    raise Skipped(f"{outcome.step} {outcome.result.partition(':')[0]}")
            kind.act(step, at)
            result, tail = "passed", ""
        except Skipped as reason:
            result, tail = f"skipped: {reason}", ""
        except Failed as reason:
            result, tail = f"failed: {reason}", step.tail()
        except Exception as reason:  # of this file; the other steps may still say something
            result, tail = f"failed: {reason!r}", traceback.format_exc()
    return Outcome(name, round(step.seconds, 1), limit_s, result, tail)


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["PATH"] += f":{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    steps = steps_of(arguments[1:])
    target: Target = Emulated() if os.environ.get("HELM_GPU_EMULATED") == "1" else Gpu()
    problem = target.problem()
    if problem:
        stop(problem)
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(os.environ.get("HELM_GPU_BUILD", ROOT / "build" / "gpu"))
    at = Place(target, folder.absolute(), out.absolute())
    shutil.rmtree(at.logs, ignore_errors=True)
    at.logs.mkdir(parents=True)
    report = Report(at, arguments[1:])
    for name in steps:
        report.add(run_step(name, at, report.outcomes))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
