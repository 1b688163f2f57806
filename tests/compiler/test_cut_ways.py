"""All ways to cut a unit at once, against each of them alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

import search_cases
from helm.compiler.counts import Step
from helm.compiler.cut.units import Cutter
from helm.compiler.cut.ways import HOMES, cut_model, lane_of
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.times import classify, unit_s
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


def _machine(seed):
    profile = Profile.from_json(json.dumps(search_cases.random_profile(seed)))
    return profile.cpu.complete, profile.accelerator.complete


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_way_at_once_is_as_each_alone(name, home):
    """Seconds on both devices, bytes of weights and of values, piece by piece."""
    graph = build_graph(parse_config(CONFIGS[name]))
    model = search_cases.mixed(graph, 3)
    cuts = cut_model(model, classify(model), 8)
    if name == "opt, norms behind":
        assert cuts == "no norm stands before its first product"
        return
    compared = 0
    for kind, ways in enumerate((*cuts.layers[0], *cuts.layers[-1], cuts.head)):
        assert set(ways.pieces[home]) >= {"begin", "home", "guest", "end"} or (kind == 4 and home)
        for at in range(0, len(ways.marks) - 2, 3) if ways.pieces[home] else ():
            mark = int(ways.marks[1 + at])
            cutter = Cutter(graph)
            alone = cutter.pieces(ways.unit, mark, HOMES[home])
            costed = cutter.costed(model)
            assert len(alone) == len(ways.pieces[home])
            for one in alone:
                every = ways.pieces[home][one.name.rpartition(".")[2]]
                assert one.device == HOMES[lane_of(one.name.rpartition(".")[2], home)]
                for mine, other in zip(
                    _counts(cuts.model, every), _counts(costed, one), strict=True
                ):
                    mine = np.broadcast_to(mine.T, (len(ways.marks) - 2, *other.T.shape))[at]
                    assert mine == pytest.approx(other.T, rel=1e-12)
                    compared += 1
    assert compared > 100


def _counts(model, unit):
    plain = Unit(unit.name, unit.kind, unit.layer, unit.ops)
    for step in (Step(3, 20, 3), Step(48, 48, 48, outputs=2), Step(40, 40, 40, 0)):
        for device in _machine(5):
            yield unit_s(model, plain, step, device)
    yield np.asarray(model.host_bytes([plain]))
    yield np.asarray(model.weight_bytes([plain], DEVICE_ALIGNMENT))
    used = {name for op in unit.ops for name in op.uses()}
    yield np.asarray(sum(value.width for value in model.graph.values if value.name in used))
