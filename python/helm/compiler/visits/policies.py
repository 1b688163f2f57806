"""Policies of other systems by the names under which they were published. Says what they are, and
prices nothing."""

from __future__ import annotations

from dataclasses import dataclass

from helm.compiler.problem import Policy

_GUPTA = "Gupta and Dwarkadas, Out-of-Core LLM Inference Using Heterogeneous Host Memory"


@dataclass(frozen=True)
class Published:
    """whose: authors and title. what: it does."""

    whose: str
    what: str


PUBLISHED: dict[Policy, Published] = {
    "zigzag": Published(
        "Sheng and others, FlexGen: High-Throughput Generative Inference with a Single GPU",
        "the GPU computes; of each matrix as many rows stay there as it has room for, the others "
        "visit it in each step, once for all requests",
    ),
    "helm-placement": Published(
        _GUPTA + " (HeLM)",
        "the GPU computes; half of each MLP stays there, the other half and attention visit it in "
        "each step, so that both halves of a layer take alike",
    ),
    "all-cpu": Published(
        _GUPTA + " (All-CPU)",
        "the GPU computes and has no layer's matrices; all visit it in each step, and the memory "
        "is left to requests",
    ),
    "workload-distribution": Published(
        "Park and Egger, CPU-GPU Workload Distribution during Throughput-Oriented LLM Inference",
        "both devices share each layer by the corrected balance; what the GPU has of the weights "
        "visits it in each step",
    ),
}
