"""Prompts of layouts with cut layers whose CPU weights visit the accelerator. Ranks nothing."""

from __future__ import annotations

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.cut_memory import CutMemory
from helm.compiler.cut_space import CutModel, Layouts
from helm.compiler.cut_tables import CutTable
from helm.compiler.layers import visiting_body
from helm.compiler.overflow import Bools
from helm.compiler.prefill import Prefill
from helm.compiler.setting import Setting
from helm.compiler.times import F64, attentions, position_bytes, unit_s


def extra_s(setting: Setting, table: CutTable, step: Step) -> float:
    """What a unit that is cut takes longer than a whole one where both shares run on the
    accelerator: ops twice, and the sum."""
    device = setting.accelerator
    assert device is not None
    if table.shares is None:
        return 0.0
    lanes = [table.lane_s(0, device, step, True, 0.0), table.lane_s(1, device, step, False, 0.0)]
    middle = len(table.marks) // 2
    both = sum(float(lane[:, middle].sum()) for lane in lanes)
    both += float((table.begin_s(device, step) + table.end_s(device, step)).sum())
    return both - float(unit_s(setting.model, table.unit, step, device).sum())


def visiting_seconds(
    prefill: Prefill, cuts: CutModel, memory: CutMemory, of: Layouts, some: Bools, kind: int
) -> dict[str, F64]:
    """[layouts, steps] of tasks of a cut layer of a class that visits, as
    `helm.compiler.layers.visiting_seconds` has those of a whole one."""
    setting = prefill.setting
    link = setting.link
    assert link is not None
    layer = setting.classes.units[kind]
    past = np.bincount(prefill.queries.step, prefill.queries.past)[some]
    tokens = prefill.tokens[some]
    share = cuts.heads[of.heads] / cuts.heads[-1]
    kv = sum(position_bytes(setting.model, op) for op in attentions(layer)) * share[:, None]
    weights = memory.visiting_bytes(of, kind)
    run = prefill.accelerator[kind][some].sum(axis=1)
    sizes = list(zip(tokens.tolist(), prefill.outputs[some].tolist(), strict=True))
    more = {n: [extra_s(setting, table, Step(n[0], n[0], outputs=n[1]))
                for table in cuts.layers[kind]] for n in set(sizes)}  # fmt: skip
    extra = np.array([more[n] for n in sizes])  # [steps, kinds]
    inside = [
        (w > 0) & (w < len(marks) - 1)
        for w, marks in ((of.heads, cuts.heads), (of.elements, cuts.elements))
    ]
    runs = run[None] + inside[0][:, None] * extra[:, 0] + inside[1][:, None] * extra[:, 1]
    shape = (len(of), len(tokens))
    return {
        "visit": np.broadcast_to(
            (link.latency_s + weights / setting.visit_bytes_per_s)[:, None], shape
        ),
        "cached": kv * past / link.to_accelerator_bytes_per_s,
        "run": np.broadcast_to(runs, shape),
        "written": kv * tokens / link.to_host_bytes_per_s,
    }


def visiting_end_s(
    prefill: Prefill, cuts: CutModel, memory: CutMemory, of: Layouts, some: Bools
) -> F64:
    """[layouts, steps] when the accelerator is done with the layers of which the CPU has some."""
    member = prefill.setting.classes.member
    kinds = range(len(prefill.setting.classes.units))
    shape = (len(of), int(some.sum()))
    whole, cut = list[F64](), list[F64]()
    for kind in kinds:
        alone = {
            name: np.broadcast_to(np.broadcast_to(each, len(some))[some], shape)
            for name, each in prefill.visiting_seconds(kind).items()
        }
        whole.append(visiting_body(alone))
        cut.append(visiting_body(visiting_seconds(prefill, cuts, memory, of, some, kind)))
    state = np.zeros((4, *shape))
    for layer in range(int((of.cpu + of.cut).max(initial=0))):
        kind = int(member[layer])
        there = (layer < of.cpu)[None, None, :, None]
        body = np.where(there, whole[kind], cut[kind])
        after = (body + state[None]).max(axis=1)
        state = np.where((layer < of.cpu + of.cut)[None, :, None], after, state)
    return np.asarray(state[0])


def quick_end_s(
    prefill: Prefill, cuts: CutModel, memory: CutMemory, of: Layouts, some: Bools
) -> F64:
    """[layouts, steps] at least that: what the link, or the accelerator, does in all."""
    setting = prefill.setting
    counts = memory.counts(of)
    link, run = np.zeros((len(of), 1)), np.zeros((len(of), int(some.sum())))
    for kind in range(len(setting.classes.units)):
        per = (memory.visiting_bytes(of, kind) / setting.visit_bytes_per_s)[:, None]
        alone = (
            setting.model.weight_bytes([setting.classes.units[kind]]) / setting.visit_bytes_per_s
        )
        link = link + counts[1][:, kind, None] * per + counts[0][:, kind, None] * alone
        seconds = prefill.accelerator[kind][some].sum(axis=1)
        run = run + (counts[0][:, kind] + counts[1][:, kind])[:, None] * seconds
    return np.maximum(link, run)
