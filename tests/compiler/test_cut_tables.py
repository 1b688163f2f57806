"""Seconds and bytes of shares, in every way at once, against those of a cut's units."""

from __future__ import annotations

import numpy as np
import pytest

import search_cases
from helm.compiler.counts import CostedGraph, Step
from helm.compiler.cut.units import Cut, LayerCut, cut_units
from helm.compiler.cut_tables import make_table
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.times import ATTENTION, unit_s
from helm.machine.profile import Profile
from helm.model.families import build_graph, parse_config
from helm.model.graph import Unit

_BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "ffn_dim": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
}
CONFIGS = {
    "llama": {**_BASE, "architectures": ["LlamaForCausalLM"]},
    "llama with biases": {
        **_BASE, "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True,
    },
    "qwen3": {**_BASE, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen2": {**_BASE, "architectures": ["Qwen2ForCausalLM"]},
    "opt": _OPT,
    "opt, norms behind": {**_OPT, "do_layer_norm_before": False},
}  # fmt: skip
MARKS = {"attention": None, "mlp": np.arange(0, 193, 32), "head": np.array([0, 13, 40, 96, 97])}


def _machine(seed):
    import json

    profile = Profile.from_json(json.dumps(search_cases.random_profile(seed)))
    return profile.cpu.complete, profile.accelerator.complete


def _costed(graph, cut, model):
    """The cut graph, with the formats of the whole tensors."""
    whole = {n: cut.parts[n].tensor if n in cut.parts else n for n in cut.tensors}
    formats = {name: model.formats[of] for name, of in whole.items()}
    own = {name: model.cpu_formats[of] for name, of in whole.items() if of in model.cpu_formats}
    return CostedGraph(cut.graph(graph), formats, model.kv_dtype, own)


@pytest.mark.parametrize("home", ["cpu", "accelerator"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("step", [Step(3, 20, 3), Step(48, 48, 48, outputs=2), Step(40, 40, 40, 0)])
def test_a_share_takes_what_its_units_take(name, home, step):
    graph = build_graph(parse_config(CONFIGS[name]))
    model = search_cases.mixed(graph, 3)
    cpu, accelerator = _machine(5)
    for layer in (0, 2):
        for kind in ("attention", "mlp", "head"):
            unit = _unit(graph, layer, kind)
            marks = MARKS[kind]
            if marks is None:
                marks = np.arange(0, graph.kv.kv_heads + 1)
            table = make_table(model, unit, marks)
            if home not in table.shares.homes or (kind == "head" and home != "cpu"):
                continue
            _check_unit(graph, model, table, layer, kind, home, step, (cpu, accelerator))


def _unit(graph, layer, kind):
    if kind == "head":
        return graph.units[-1]
    return next(u for u in graph.units if u.layer == layer and u.kind == kind)


def _check_unit(graph, model, table, layer, kind, home, step, devices):
    homes = [home == "cpu", home != "cpu"]
    lanes = [table.lane_s(i, devices[i], step, homes[i], 0.5) for i in (0, 1)]
    sizes = [table.lane_bytes(i, homes[i]) for i in (0, 1)]
    at = 0 if home == "cpu" else 1
    for way, mark in enumerate(table.marks[:-1].tolist()):
        if mark == 0:
            continue
        own = [LayerCut(graph.kv.kv_heads, 192, home)] * 3
        rows = 97
        if kind == "attention":
            own[layer] = LayerCut(mark, 192, home)
        elif kind == "mlp":
            own[layer] = LayerCut(graph.kv.kv_heads, mark, home)
        else:
            rows = mark
        cut = cut_units(graph, Cut("cpu", tuple(own), rows))
        costed = _costed(graph, cut, model)
        units = {u.name: u for u in cut.units}
        parts = ("begin", "home", "guest", "end")
        made = {p: units.get(f"{table.unit.name}.{p}") for p in parts}
        for lane in (0, 1):
            unit = made["home" if homes[lane] else "guest"]
            want = unit_s(costed, Unit(unit.name, unit.kind, 0, unit.ops), step, devices[lane])
            if kind == "attention":
                want[ATTENTION] += 0.5 * table.share(lane)[way]
            assert lanes[lane][:, way] == pytest.approx(want, rel=1e-12)
            names = {n for op in unit.ops for n in op.weight_names()}
            if homes[lane]:
                beside = {n for p in ("begin", "end") if made[p] for op in made[p].ops
                          for n in op.weight_names()}  # fmt: skip
                assert table.home_bytes(lane) == _bytes(costed, beside, lane)
            assert sizes[lane][way] == _bytes(costed, names, lane)
        for part, got in (("begin", table.begin_s), ("end", table.end_s)):
            unit = made[part]
            ops = () if unit is None else unit.ops
            want = unit_s(costed, Unit(part, kind, 0, ops), step, devices[at])
            assert got(devices[at], step) == pytest.approx(want, rel=1e-12)


def _bytes(costed, names, lane):
    if lane == 0:
        return sum(costed.tensor_bytes(n, "cpu") for n in names)
    unit = DEVICE_ALIGNMENT
    return sum(-(-costed.tensor_bytes(n) // unit) * unit for n in names)
