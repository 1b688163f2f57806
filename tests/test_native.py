"""Builds and runs the native tests: as they are, and under the sanitizers of memory, there kernels
and CUDA's emulation with HELM_TEST_WHOLE=1 alone. Compares the planner's figure for a GPU's scratch
with the native one."""

from __future__ import annotations

import importlib.metadata
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from helm.base.formats import PACKED_POLICIES
from helm.compiler.memory import accelerator_workspace_bytes
from helm.model.config import ModelConfig
from helm.model.families import build_graph, parse_config
from native_build import build, own_cpu, run_tests, sanitizing
from whole import WHOLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PLANS = 60
LONG = ("kernels", "runtime", "cuda_kernels")
SANITIZED = (*LONG, "cuda_plugin") if WHOLE else ("runtime",)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    build(
        folder,
        *sanitizing("address,undefined", "-Og", kernels=WHOLE),  # half of -O1's time to compile
        targets=[f"helm_{name.removesuffix('s')}_tests" for name in SANITIZED],
    )
    return folder


@pytest.mark.parametrize("name", LONG)
def test_native(plain: Path, name: str) -> None:
    run_tests(plain, only=f"^{name}$")


def test_it_installs_as_system_libraries_do(plain: Path, tmp_path: Path) -> None:
    subprocess.run(["cmake", "--install", plain, "--prefix", tmp_path], check=True)
    version = importlib.metadata.version("helm-llm")
    major, minor, _ = version.split(".", 2)
    (library,) = tmp_path.rglob("libhelm.so")
    names = [f"libhelm.so.{major}.{minor}", f"libhelm.so.{version}"]
    assert [os.readlink(library.parent / name) for name in ("libhelm.so", names[0])] == names
    assert {file.name for file in library.parent.glob("libhelm.so*")} == {library.name, *names}
    assert (tmp_path / "include" / "helm" / "version.h").is_file()


def test_all_other_native_tests(plain: Path) -> None:
    run_tests(plain, but=f"^({'|'.join(LONG)})$")


@pytest.mark.parametrize("name", SANITIZED)
def test_native_under_address_and_undefined_sanitizers(sanitized: Path, name: str) -> None:
    run_tests(sanitized, only=f"^{name}$", cpus=own_cpu())


def random_config(rng: random.Random) -> ModelConfig:
    kv_heads, head_dim = rng.choice((1, 2, 3, 8)), 2 * rng.randint(2, 128)
    heads = kv_heads * rng.choice((1, 2, 3, 4, 5, 8))
    common: dict[str, Any] = {
        "vocab_size": rng.randint(50, 5000), "num_hidden_layers": rng.randint(1, 5),
        "max_position_embeddings": rng.choice((64, 1000, 4096, 32768)),
        "hidden_size": heads * head_dim, "num_attention_heads": heads,
        "torch_dtype": rng.choice(("float32", "float16", "bfloat16")),
    }  # fmt: skip
    if rng.random() < 0.2:
        return parse_config(
            {"architectures": ["OPTForCausalLM"], "model_type": "opt",
             "ffn_dim": rng.randint(8, 9000), "word_embed_proj_dim": heads * head_dim, **common}
        )  # fmt: skip
    return parse_config(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
         "intermediate_size": rng.randint(8, 9000), "num_key_value_heads": kv_heads,
         "head_dim": head_dim, **common}
    )  # fmt: skip


def test_the_planner_counts_at_least_what_cuda_lays_out(plain: Path, tmp_path: Path) -> None:
    rng = random.Random(37)
    arguments, counted, places = [], [], []
    for number in range(PLANS):
        config = random_config(rng)
        sequences = rng.choice((1, 3, 8, 64))
        dtype = rng.choice(("auto", "f16", "f32", "q8", "q4"))
        plan = make_plan(
            config, None, context=rng.randint(2, config.max_context), max_sequences=sequences,
            page_tokens=rng.choice((1, 16, 100, 512)), threads=1, memory_bytes=1 << 50,
            step_tokens=rng.choice((sequences, sequences + 30, 512, 2048)),
            dtype=dtype, kv_dtype=rng.choice(("f32", "f16", "bf16")),
        )  # fmt: skip
        path = tmp_path / f"{number}.json"
        path.write_text(plan.to_json())
        graph = build_graph(config)
        last = len(graph.units)
        for first, end in ((0, last), (0, 1), (1, last - 1), (last - 1, last), (1, 2)):
            arguments += [str(path), str(first), str(end)]
            units = graph.units[first:end]
            packed = dtype in PACKED_POLICIES
            counted.append(
                accelerator_workspace_bytes(graph, units, plan.limits, plan.kv, packed=packed)
            )
            places.append(f"plan {number}, units {first} to {end}: {plan.limits} {plan.kv}")
    run = subprocess.run(
        [plain / "tests" / "native" / "helm_cuda_workspace", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    laid_out = [int(line) for line in run.stdout.split()]
    assert len(laid_out) == len(counted)
    for place, count, size in zip(places, counted, laid_out, strict=True):
        assert count >= size, place
    # A bound that is never near would hide what it forgets.
    assert min(c - size for c, size in zip(counted, laid_out, strict=True)) < 4096
