"""A model without work to do, by which the engine's own share of a step is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

QUICK = 0.05  # quantile


@dataclass
class _StepTiming:
    run_s: list[float]
    undisturbed_s: list[float]
    flops: float = 0.0
    bytes: float = 0.0


class TinyModel:
    """A model whose ops have next to no work: what remains of its steps is the engine's own. On
    one thread, which other programs disturb least; waking the others is measured apart."""

    def __init__(self) -> None:
        from helm import _helm
        from helm.compiler.planning_problem import Problem
        from helm.compiler.solve import solve
        from helm.model.checkpoint import TensorInfo
        from helm.model.families import build_graph, parse_config

        config = parse_config(_TINY, "tiny model")
        graph = build_graph(config)
        self.ops = sum(1 for _ in graph.ops())
        tensors = {name: np.ones(shape, np.float32) for name, shape in graph.tensors.items()}
        infos = {n: TensorInfo.in_memory(n, "f32", t.shape) for n, t in tensors.items()}
        problem = Problem(
            config, infos, max_sequences=1, step_tokens=8, threads=1,
            memory_bytes=1 << 30, reserve_bytes=0,
        )  # fmt: skip
        plan = solve(problem).plan
        self._engine = _helm.Engine(plan.to_json(), "", tensors)

    def steps(self, seconds: float) -> list[_StepTiming]:
        """Times of decode steps: forward, sampling and bookkeeping."""
        from helm import _helm

        request = _helm.Request(prompt=[1], max_tokens=_TINY_CONTEXT - 1)
        run_s: list[float] = []
        end = time.perf_counter() + seconds
        while not run_s or time.perf_counter() < end:
            generation = _helm.Generation(self._engine, [request])
            while not generation.done:
                generation.advance(0.0)
            timings = generation.timings(0)
            run_s.append(timings["decode_s"] / timings["decode_tokens"])
        quickest = np.quantile(run_s, QUICK)  # nothing tells which of these were disturbed
        return [_StepTiming(run_s, [s for s in run_s if s <= 1.2 * quickest])]


_TINY_CONTEXT = 32
_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": _TINY_CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
