"""Models, random machines and workloads for the tests of the cost model and the search."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import naive_rates
from helm.base.formats import DTYPES
from helm.compiler.counts import CostedGraph
from helm.model.config import ModelConfig
from helm.model.families import build_graph, parse_config

GIB = 1 << 30
THESIS = json.loads((Path(__file__).parents[1] / "data" / "thesis.json").read_text())


@functools.cache
def config_of(name: str) -> ModelConfig:
    """One of the thesis's models."""
    return parse_config(THESIS["models"][name])


@functools.cache
def model_of(name: str) -> CostedGraph:
    return costed(build_graph(config_of(name)))


def costed(graph: Any, dtype: str = "bf16") -> CostedGraph:
    formats = {key: "f32" if len(shape) == 1 else dtype for key, shape in graph.tensors.items()}
    return CostedGraph(graph, formats, dtype)


def mixed(graph: Any, seed: int) -> CostedGraph:
    """Matrices in any format, some of bf16 compressed on the CPU."""
    rng = random.Random(seed)
    formats, cpu_formats = {}, {}
    for key, shape in graph.tensors.items():
        formats[key] = "f32"
        if len(shape) == 2:
            formats[key] = rng.choice(("f32", "bf16", "bf16", "c8.s32", "c4.km32"))
        if formats[key] == "bf16" and rng.random() < 0.7:
            cpu_formats[key] = "bf16c"
    return CostedGraph(graph, formats, "bf16", cpu_formats)


def _device(rng: random.Random, speed: float) -> dict[str, Any]:
    def rates(low: float, high: float) -> dict[str, float]:
        return {dtype: speed * 10 ** rng.uniform(low, high) for dtype in DTYPES}

    def by_tokens() -> dict[str, float]:
        return {str(n): speed * 10 ** rng.uniform(6, 8) for n in (1, 4, 16, 64)}

    def by_rows() -> dict[str, float]:
        return {str(n): speed * 10 ** rng.uniform(5, 8) for n in (1, 2, 16)}

    def with_i8(table: dict[str, Any]) -> dict[str, Any]:
        """Rates of its own that no random number is drawn for, so that the others stay."""
        other = table["f16"]
        own = {n: 0.6 * rate for n, rate in other.items()} if isinstance(other, dict) else other / 2
        return {**table, "i8": own}

    def with_packed(table: dict[str, Any]) -> dict[str, Any]:
        """Likewise, of packed weights."""
        other = table["bf16"]
        if isinstance(other, dict):
            return {
                **table,
                "q8": {n: 1.3 * rate for n, rate in other.items()},
                "q4": {n: 1.7 * rate for n, rate in other.items()},
            }
        return {**table, "q8": 0.9 * other, "q4": 0.8 * other}

    device = {
        "memory_bytes": 1 << 30,
        "matvec_bytes_per_s": with_packed(rates(6, 7)),
        "matmul_flops": with_packed({dtype: by_tokens() for dtype in DTYPES}),
        "attention_bytes_per_s": with_i8(rates(5, 7)),
        "attention_flops": with_i8({dtype: by_rows() for dtype in DTYPES}),
        "op_s": 10 ** rng.uniform(-6, -4),
        "step_s": 10 ** rng.uniform(-5, -3),
        "activation_bytes_per_s": speed * 10 ** rng.uniform(6, 8),
    }
    device["attention_query_s"] = device["op_s"] / 30
    return device


def random_profile(seed: int, threads: int = 2) -> dict[str, Any]:
    """A machine so slow that small models take milliseconds, as JSON values."""
    rng = random.Random(seed)
    return {
        "format": "helm-profile",
        "version": 2,
        "name": f"random {seed}",
        "estimated": True,
        "identity": {"source": "random"},
        "cpu": {
            **_device(rng, 1.0),
            "threads": threads,
            "thread_sweep": {str(threads): 1e7},
            "compressed_ratio": {"1": 1.3, "4": 0.9, "16": 1.05},
        },
        "accelerator": {
            **_device(rng, 10 ** rng.uniform(-0.5, 1.5)),
            "name": "random",
            "stage_s": 1e-5,
        },
        "link": {
            "to_accelerator_bytes_per_s": 10 ** rng.uniform(5, 8),
            "to_host_bytes_per_s": 10 ** rng.uniform(5, 8),
            "pageable_to_accelerator_bytes_per_s": 1e5,
            "pageable_to_host_bytes_per_s": 1e5,
            "latency_s": (latency := 10 ** rng.uniform(-6, -3)),
            "queued_copy_s": latency * (seed % 3) / 2,
            "cpu_rate_while_copying": rng.uniform(0.3, 1.0),
            "rate_while_both_compute": rng.uniform(0.5, 1.0),
        },
    }


def random_task(model: Any, seed: int) -> naive_rates.Task:
    rng = random.Random(seed + 1000)
    prompt, output = rng.randint(1, 40), rng.randint(1, 12)
    return naive_rates.Task(
        model=model,
        profile=random_profile(seed),
        prompt=prompt,
        output=output,
        batch=rng.choice((1, 1, 2, 3)),
        context=prompt + output + rng.randint(0, 20),
        step_tokens=rng.choice((4, 7, 16, 64)),
        page_tokens=rng.choice((4, 8, 16, 128)),
        visit_steps=(16, 128),
        watermark=rng.choice((0.8, 0.8, 1.0, 0.35, 0.0)),
    )
