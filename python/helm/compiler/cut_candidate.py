"""A layout with cut layers as a candidate beside those of whole layers, and as the cut of a graph.
Searches nothing."""

from __future__ import annotations

import numpy as np

from helm.compiler.budget import PURPOSES, memory_bytes
from helm.compiler.candidate import BOTH, Candidate, CutUse, Missing
from helm.compiler.cut import Cut, LayerCut
from helm.compiler.cut_price import HOMES
from helm.compiler.cut_search import Found
from helm.compiler.problem import ResourceLimits
from helm.compiler.times import F64, TERMS
from helm.machine.profile import Profile
from helm.plan.records import Predicted, Workload
from helm.plan.units import CPU


def cut_of(candidate: Candidate) -> Cut:
    """Of the graph's layers and head. The candidate has something that is cut."""
    use = candidate.cut
    assert use is not None
    layers = (
        *[LayerCut(use.of_heads, use.of_elements)] * candidate.cpu_blocks,
        *[LayerCut(use.heads, use.elements, use.home)] * use.layers,
        *[LayerCut(0, 0)] * candidate.accelerator_blocks,
    )
    return Cut(CPU, layers, use.rows)


def candidate_of(
    found: Found, profile: Profile, limits: ResourceLimits, workload: Workload
) -> Candidate:
    """limits, workload: those that it was found for."""
    setting, cuts, of = found.setting, found.steps.cuts, found.of
    use = CutUse(
        layers=int(of.cut[0]),
        heads=int(cuts.heads[of.heads[0]]),
        of_heads=int(cuts.heads[-1]),
        elements=int(cuts.elements[of.elements[0]]),
        of_elements=int(cuts.elements[-1]),
        rows=int(cuts.rows[of.rows[0]]),
        of_rows=int(cuts.rows[-1]),
        home=HOMES[int(of.home[0])],
    )
    cpu, own = found.items
    memory = {
        device: {str(purpose): int(items.get(purpose, np.zeros(1))[0]) for purpose in PURPOSES}
        for device, items in (("cpu", cpu), ("accelerator", own))
    }
    available = memory_bytes(profile, limits)
    lacks = [
        max(0, sum(memory[device].values()) - most)
        for device, most in zip(memory, available, strict=True)
    ]
    for purpose, bound in (
        ("weights", limits.accelerator_weights_bytes), ("kv", limits.accelerator_kv_bytes),
    ):  # fmt: skip
        if bound is not None:
            lacks[1] = max(lacks[1], memory["accelerator"][purpose] - bound)
    least, prefill = found.way.visit_least, found.way.prefill
    row = 1 + use.layers + int(of.cpu[0])  # of the layouts of whole layers, from where it visits
    kv_blocks = setting.pages_of(workload.context)
    predicted = _predicted(found, workload)
    objectives = {"decode": predicted.decode_s, "ttft": predicted.ttft_s}
    head = "cpu" if use.rows == use.of_rows else BOTH if use.rows else "accelerator"
    return Candidate(
        blocks=len(setting.classes.member),
        cpu_blocks=int(of.cpu[0]),
        embedding=CPU,
        head=head,
        kv_blocks=kv_blocks,
        accelerator_kv_blocks=kv_blocks,
        overflow="stream",
        kv=None,
        decode_groups=1,
        prefill_mode="compute" if least is None else "stream",
        prefill_overlap=False,
        step_tokens=setting.limits.step_tokens,
        stream_tokens=0 if least is None else prefill.visit_tokens(row, least),
        stream_pages=0 if least is None else setting.visit_pages,
        threads=setting.cpu.threads,
        sequences=setting.batch,
        predicted=predicted,
        memory=memory,
        missing=Missing(lacks[0], lacks[1]),
        objective_s=objectives.get(workload.objective, predicted.total_s),
        cut=use,
    )


def _predicted(found: Found, workload: Workload) -> Predicted:
    batch, steps, of = found.setting.batch, found.steps, found.of
    expected, full = (steps.decode(n) for n in (workload.expected_context, workload.context))
    full_s = float(steps.seconds(full, found.memory, of)[0])
    waves = -(-workload.batch // batch)
    total = waves * (found.ttft_s + (workload.output - 1) * found.decode_s)
    return Predicted(
        ttft_s=found.ttft_s,
        decode_s=found.decode_s,
        decode_tokens_per_s=batch / found.decode_s,
        full_context_decode_s=full_s,
        full_context_decode_tokens_per_s=batch / full_s,
        total_s=total,
        tokens_per_s=workload.batch * workload.output / total,
        decode_terms=_named(steps.terms(expected, found.memory, of)),
        prefill_terms=_named(found.prefill_terms()),
    )


def _named(terms: F64) -> dict[str, float]:
    return dict(zip(TERMS, map(float, terms), strict=True))
