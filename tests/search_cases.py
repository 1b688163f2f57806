"""Random machines and workloads for the tests of the cost model and the search."""

from __future__ import annotations

import random
from typing import Any

import naive_search

_DTYPES = ("f32", "f16", "bf16")


def _device(rng: random.Random, speed: float) -> dict[str, Any]:
    def rates(low: float, high: float) -> dict[str, float]:
        return {dtype: speed * 10 ** rng.uniform(low, high) for dtype in _DTYPES}

    def by_tokens() -> dict[str, float]:
        return {str(n): speed * 10 ** rng.uniform(6, 8) for n in (1, 4, 16, 64)}

    def by_rows() -> dict[str, float]:
        return {str(n): speed * 10 ** rng.uniform(5, 8) for n in (1, 2, 16)}

    def with_i8(table: dict[str, Any]) -> dict[str, Any]:
        """Rates of its own that no random number is drawn for, so that the others stay."""
        other = table["f16"]
        own = {n: 0.6 * rate for n, rate in other.items()} if isinstance(other, dict) else other / 2
        return {**table, "i8": own}

    return {
        "memory_bytes": 1 << 30,
        "matvec_bytes_per_s": rates(6, 7),
        "matmul_flops": {dtype: by_tokens() for dtype in _DTYPES},
        "attention_bytes_per_s": with_i8(rates(5, 7)),
        "attention_flops": with_i8({dtype: by_rows() for dtype in _DTYPES}),
        "op_s": 10 ** rng.uniform(-6, -4),
        "step_s": 10 ** rng.uniform(-5, -3),
        "activation_bytes_per_s": speed * 10 ** rng.uniform(6, 8),
    }


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
        },
        "accelerator": {**_device(rng, 10 ** rng.uniform(-0.5, 1.5)), "name": "random"},
        "link": {
            "to_accelerator_bytes_per_s": 10 ** rng.uniform(5, 8),
            "to_host_bytes_per_s": 10 ** rng.uniform(5, 8),
            "pageable_to_accelerator_bytes_per_s": 1e5,
            "pageable_to_host_bytes_per_s": 1e5,
            "latency_s": 10 ** rng.uniform(-6, -3),
            "cpu_rate_while_copying": rng.uniform(0.3, 1.0),
        },
    }


def random_task(model: Any, seed: int) -> naive_search.Task:
    rng = random.Random(seed + 1000)
    prompt, output = rng.randint(1, 40), rng.randint(1, 12)
    return naive_search.Task(
        model=model,
        profile=random_profile(seed),
        prompt=prompt,
        output=output,
        batch=rng.choice((1, 1, 2, 3)),
        context=prompt + output + rng.randint(0, 20),
        step_tokens=rng.choice((4, 7, 16, 64)),
        page_tokens=rng.choice((4, 8, 16, 128)),
        stream_steps=(16, 128),
    )
