"""Three kinds of layers are as good as any share for each: against a dynamic program. And what cut
layers bring on machines that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import search_cases
from helm.compiler.cut.price import CutPrices
from helm.compiler.cut.ways import cut_model
from helm.compiler.problem import ResourceLimits, Space
from helm.compiler.search import Search
from helm.compiler.setting import make_setting
from helm.machine.profile import load_profile
from helm.model.families import build_graph, parse_config
from helm.plan.records import Workload

DATA = Path(__file__).parents[1] / "data" / "configs"
LEVELS = 21
WORK = Workload(512, 128, 1, 4096, "decode")


def _model(name):
    return search_cases.costed(build_graph(parse_config(json.loads((DATA / name).read_text()))))


def _layer_s(profile):
    """Seconds of a layer of Qwen3-8B by what the CPU has of its mlp's elements, with all of its
    attention or none; of one that is whole on the CPU and on the accelerator."""
    model = _model("qwen3-8b.json")
    limits = ResourceLimits()
    setting = make_setting(model, profile, WORK, limits, profile.cpu.threads, 1)
    prices = CutPrices(setting, cut_model(model, setting.classes, 32))
    times = prices.decode(WORK.expected_context).layers
    attention, mlp = times.attention_s[0], times.mlp_s[0]
    own, there = attention[0, -1] + mlp[0, -1], attention[1, 0] + mlp[1, 0]
    return float(own), float(there), attention[0, -1] + mlp[0]


@pytest.mark.parametrize("name", ["thesis-4060", "thesis-3090", "thesis-l40s"])
def test_three_kinds_of_layers_equal_any_share_for_each(name):
    cpu, own, mixed = _layer_s(load_profile(name))
    layers, most = 36, LEVELS - 1
    ways = len(mixed) - 1
    # Level n has n / 20 of the elements on the accelerator, and of the attention none but at 20.
    of_level = [mixed[ways - round(n / most * ways)] for n in range(LEVELS)]
    cost = np.array([cpu, *of_level[1:most], own])
    best = np.full((layers + 1, layers * most + 1), np.inf)  # exactly so many levels in all
    best[0, 0] = 0.0
    for layer in range(layers):
        for level in range(LEVELS):
            moved = best[layer, : layers * most + 1 - level] + cost[level]
            best[layer + 1, level:] = np.minimum(best[layer + 1, level:], moved)
    program = np.minimum.accumulate(best[layers])
    for budget in range(0, layers * most + 1, 24):
        kinds = np.inf
        for cut in range(layers + 1):
            for resident in range(layers - cut + 1):
                left = budget - resident * most
                if left < 0:
                    continue
                share = min(1.0, left / (most * cut)) if cut else 0.0
                at = np.ceil(ways - share * ways).astype(int)
                inner = mixed[max(at, 1) : ways].min(initial=np.inf) if cut else 0.0
                rest = (layers - cut - resident) * cpu + resident * own
                kinds = min(kinds, rest + (cut * inner if cut else 0.0))
        assert kinds <= program[budget] * 1.002, budget


def _both(model, profile, work, **limits):
    found = []
    for policy in ("auto", "layer-partition"):
        space = Space(policy=policy)
        search = Search(model, profile, work, ResourceLimits(**limits), space)
        found.append(search.result)
    return found


def test_qwen3_8b_on_a_laptop_decodes_faster_by_an_eighth():
    model, profile = _model("qwen3-8b.json"), load_profile("thesis-4060")
    cut, whole = _both(model, profile, WORK)
    assert cut.best.cut is not None
    assert cut.best.fits
    assert whole.best.predicted.decode_s / cut.best.predicted.decode_s >= 1.12
    assert cut.labelled["layer-partition"] == whole.best
    assert whole.asked is None


@pytest.mark.parametrize("name", ["thesis-4060", "thesis-3090", "rtx-4060-8gb-ddr5"])
@pytest.mark.parametrize("objective", ["decode", "ttft", "total", "throughput"])
def test_never_slower_than_whole_layers(name, objective):
    work = dataclasses.replace(WORK, objective=objective, batch=4)
    cut, whole = _both(_model("qwen3-8b.json"), load_profile(name), work)
    if whole.best is not None:
        assert cut.best.objective_s <= whole.best.objective_s


def test_where_nothing_can_be_cut_it_is_said():
    model, profile = _model("qwen3-8b.json"), load_profile("thesis-4060")
    space = Space(policy="cut", uncut="its columns have an order of their own")
    result = Search(model, profile, WORK, ResourceLimits(), space).result
    assert (result.best, result.uncut) == (None, "its columns have an order of their own")
    alone = dataclasses.replace(profile, accelerator=None, link=None)
    result = Search(model, alone, WORK, ResourceLimits(), Space(policy="cut")).result
    assert (result.best, result.uncut) == (None, "the machine has no GPU")


def test_bound_memory_of_weights_is_kept_to():
    model, profile = _model("qwen3-8b.json"), load_profile("thesis-4060")
    cut, _ = _both(model, profile, WORK, accelerator_weights_bytes=3 << 30)
    assert cut.best.memory["accelerator"]["weights"] <= 3 << 30
