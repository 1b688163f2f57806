"""Policies of other systems by the names under which they were published. Says what they are, and
prices nothing."""

from __future__ import annotations

from dataclasses import dataclass

from helm.compiler.problem import Policy
from helm.errors import InvalidError

_GUPTA = "Gupta and Dwarkadas, Out-of-Core LLM Inference Using Heterogeneous Host Memory"


@dataclass(frozen=True)
class Published:
    """whose: authors and title. what: it does. lacks: what the runtime would need for it, "" where
    it executes it. computes: whether the CPU does."""

    whose: str
    what: str
    lacks: str = ""
    computes: bool = False


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
        "in each layer the GPU computes some ops in a row, whose weights and KV visit it, and the "
        "CPU the ops before and behind",
        lacks="ops of one unit on different devices in decode",
        computes=True,
    ),
}


def check_runs(policy: str) -> None:
    """InvalidError for a policy that is planned and shown, but not executed."""
    published = {str(name): each for name, each in PUBLISHED.items()}.get(policy)
    if published is not None and published.lacks:
        raise InvalidError(
            f"[load] policy={policy!r} is planned and shown, but not executed: that takes "
            f"{published.lacks}; choose another to run, such as 'auto', or see what it "
            f"would reach with `helm-llm plan --policy {policy}`"
        )
