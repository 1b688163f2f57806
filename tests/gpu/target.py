"""What the steps of run.py run on: a GPU, or the emulation of the CUDA runtime."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu.step import ROOT, Skipped

FOLDER = ROOT / "build" / "gpu-headers"  # headers.sh fills it
# Of the environment and of CMake -> what lies in the folder that it names.
HEADERS = {
    "HELM_JSON_INCLUDE": "nlohmann/json.hpp",
    "HELM_DOCTEST_INCLUDE": "doctest/doctest.h",
}

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


class Target:
    """patience: factor of every time limit. plugin: the target of the native build, if the package
    has no plugin of its own. devices, engines: arguments of the native tests, of all if none are
    given. bench, models: arguments of these steps."""

    patience = 1.0
    plugin: str | None = None
    devices: Sequence[str] = ()
    engines: Sequence[str] = ()
    bench: Sequence[str] = ()
    models: Sequence[str] = ()

    def problem(self) -> str:
        """What is missing here, if anything is."""
        raise NotImplementedError

    def options(self) -> list[str]:
        """CMake's, without -D."""
        return [f"{name}={folder}" for name in HEADERS if (folder := brought(name)) is not None]

    def environment(self, tree: Path) -> dict[str, str]:
        """What all commands need. tree: the native build."""
        raise NotImplementedError

    def name(self) -> str:
        raise NotImplementedError

    def facts(self) -> str:
        """About this machine."""
        raise NotImplementedError

    def check_sanitizer(self) -> None:
        """Raises Skipped where compute-sanitizer is of no use."""
        raise NotImplementedError

    def add_plugin(self, tree: Path, package: Path) -> None:
        """Puts `plugin` into the installed package."""
        raise NotImplementedError

    def partitioned(self, build: Path) -> list[str]:
        """Arguments of bench/partitioned.py."""
        raise NotImplementedError


class Gpu(Target):
    bench = ("--rounds", "5")

    def problem(self) -> str:
        for tool in ("nvidia-smi", "nvcc", "cmake", "ninja"):
            if shutil.which(tool) is None:
                return f"{tool} is not on PATH"
        packaged = importlib.util.find_spec("nlohmann_json") is not None
        for variable, header in HEADERS.items():
            found = brought(variable) or Path("/usr/include", header).is_file()
            if not (found or (packaged and variable == "HELM_JSON_INCLUDE")):
                return (
                    f"{header} was not found; run tests/gpu/headers.sh where there is network and "
                    f"bring {FOLDER.relative_to(ROOT)} along, or set {variable}"
                )
        return ""

    def options(self) -> list[str]:
        return [*super().options(), "HELM_CUDA=ON", "HELM_CUDA_ARCHITECTURES=native"]

    def environment(self, tree: Path) -> dict[str, str]:
        named = os.environ.get("HELM_CUBLAS_DIR")
        folders = [Path(place) / "nvidia" / "cu13" / "lib" for place in sys.path]
        found = [str(folder) for folder in folders if (folder / "libcublas.so.13").exists()]
        return {"HELM_CUBLAS_DIR": ":".join(filter(None, (named, *found)))}

    def name(self) -> str:
        return output(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        ).strip()

    def facts(self) -> str:
        return output("nvidia-smi") + output("nvcc", "--version") + output("lscpu")

    def check_sanitizer(self) -> None:
        if shutil.which("compute-sanitizer") is None:
            raise Skipped("compute-sanitizer is not installed")

    def partitioned(self, build: Path) -> list[str]:
        return ["--shapes", "qwen3-8b", "--vram", "8GiB"]


class Emulated(Target):
    """Small enough for a few seconds each; with the limits of a slower machine."""

    patience = 10.0
    plugin = "helm_cuda_emulated"
    devices = ("--test-case=memory*,bytes*,a stage agrees with the scalar oracle: f32",)
    engines = ("--test-case=a window looks past what has left",)
    bench = (
        "--rounds", "1", "--bytes", str(1 << 20), "--match", "0.6b k 1024x1024 tokens 1",
        "--match", "bf16 heads 32/8 context 1024 splits 1", "--match", "rows 1",
        "--match", "prompt bf16 heads 32/8 tokens 16 behind 64",
        "--match", "packed q4 tiny", "--match", "layer f16 tiny",
    )  # fmt: skip
    models = ("-k", "weights_of_each_device or progress")

    def problem(self) -> str:
        missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
        return f"{missing[0]} is not on PATH" if missing else ""

    def options(self) -> list[str]:
        return [
            *super().options(),
            "HELM_CUDA=OFF",
            "HELM_WERROR=ON",
            "HELM_UNITY=ON",
            "HELM_TIERS=avx2",
        ]

    def environment(self, tree: Path) -> dict[str, str]:
        """The stand-ins for the driver and for cuBLAS."""
        libraries = str(self.libraries(tree))
        return {"LD_LIBRARY_PATH": libraries, "HELM_CUBLAS_DIR": libraries}

    def libraries(self, tree: Path) -> Path:
        return tree / "tests" / "native" / "emulated"

    def name(self) -> str:
        return "emulated"

    def facts(self) -> str:
        return output("lscpu")

    def check_sanitizer(self) -> None:
        raise Skipped("compute-sanitizer needs a GPU")

    def add_plugin(self, tree: Path, package: Path) -> None:
        [library] = package.glob("lib*/libhelm.so.?*")
        shutil.copy(self.libraries(tree) / "libhelm_cuda.so", library.parent)

    def partitioned(self, build: Path) -> list[str]:
        config = build / "tiny" / "config.json"
        config.parent.mkdir(exist_ok=True)
        config.write_text(json.dumps(TINY))
        return [
            "--shapes", str(config), "--layers", "1", "--vram", "768MiB", "--cpu-blocks", "0",
            "--profile", "rtx-4090-24gb-ddr5", "--rounds", "1", "--prefill", "100",
            "--context", "8", "--tokens", "2",
        ]  # fmt: skip


def brought(variable: str) -> Path | None:
    """The folder with the header of HEADERS that came along, or that is named."""
    named = os.environ.get(variable)
    places = [FOLDER, *([Path(named)] if named else [])]
    return next((place for place in places if (place / HEADERS[variable]).is_file()), None)


def output(*command: str) -> str:
    """What a command prints, or why it does not."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as reason:
        return f"{command[0]}: {reason}\n"
    return run.stdout + run.stderr
