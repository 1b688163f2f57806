"""The price of a plan that was made without a profile."""

from __future__ import annotations

import dataclasses

from helm.base.formats import uncompressed
from helm.compiler.access import loaded_profile, mapped_share
from helm.compiler.counts import CostedGraph
from helm.compiler.problem import Space
from helm.compiler.search import Search
from helm.machine.profile import Profile
from helm.model.config import ModelConfig
from helm.model.families import build_graph
from helm.model.graph import Graph
from helm.plan.records import Workload
from helm.plan.schema import Plan


def cpu_decode_rate(config: ModelConfig, plan: Plan, profile: Profile) -> float:
    """Decode tokens/s of one sequence of a plan that lies on the CPU, on the machine of
    `profile`. Raises ProfileError if the profile lacks a rate or the plan's thread count."""
    model = costed_graph(plan, build_graph(config))
    share = mapped_share(plan.tensors, model.formats, None)
    host = dataclasses.replace(profile, accelerator=None, link=None)
    host = loaded_profile(host, plan.loading, share)
    work, space = Workload.within(plan.limits.context), Space(threads=(plan.threads,))
    best = Search(model, host, work, space=space).unlimited.best
    assert best is not None  # memory was no object
    return best.predicted.decode_tokens_per_s


def costed_graph(plan: Plan, graph: Graph) -> CostedGraph:
    """The graph with the formats of `plan`, which was made for it."""
    formats = {held.tensor: uncompressed(held.format) for held in plan.slices}
    cpu = {held.tensor: held.format for _, held in plan.held("cpu")}
    return CostedGraph(graph, formats, plan.kv.dtype, cpu)
