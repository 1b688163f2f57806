"""Profiles that make the search use a simulated accelerator, whatever this machine is like."""

from __future__ import annotations

import dataclasses

import helm
from helm.machine.profile import Profile, load_profile


def fast_accelerator() -> Profile:
    """A machine whose accelerator is faster than its CPU at everything, even at tiny models."""
    profile = load_profile("rtx-4090-24gb-ddr5")
    assert profile.accelerator is not None
    assert profile.link is not None
    return dataclasses.replace(
        profile,
        accelerator=dataclasses.replace(profile.accelerator, op_s=0.0, step_s=0.0),
        link=dataclasses.replace(profile.link, latency_s=0.0),
    )


def half_of_it(llm: helm.LLM) -> int:
    """Accelerator memory that holds half the weights of a model that lies there as a whole."""
    use = llm.plan.memory["accelerator"]
    return use.total_bytes + use.reserve_bytes - use.weights_bytes // 2
