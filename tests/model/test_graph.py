"""The emitted graphs, against transformers: the oracle runs each plan and must give its logits."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import safetensors.torch
from plans import make_plan

import reference
import small_models
from helm.errors import CheckpointError, InvalidError, UnsupportedModelError
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import FAMILIES, architectures, build_graph, load_config
from helm.model.graph import Attention, Linear, Norm
from helm.model.stacked import with_stacks
from helm.model.weight_names import lies_by_column, read_weights

GIB = 1 << 30


def plan_of(folder, **options):
    arguments = {"threads": 1, "memory_bytes": 4 * GIB, **options}
    weights = read_weights(folder, load_config(folder))
    return make_plan(weights.config, weights.tensors, **arguments)


def oracle_logits(folder, plan=None):
    document = json.loads((plan or plan_of(folder)).to_json())
    weights = reference.load_weights(document, folder)
    return reference.run(document, weights, small_models.PROMPT)


def differs(got, want, tolerance=2e-5):
    """Whether any element is off by more than f32 arithmetic explains; NaN counts as off."""
    want = np.asarray(want, np.float64)
    return bool(np.any(~(np.abs(got - want) <= tolerance * np.abs(want).max())))


@pytest.mark.parametrize("name", small_models.CASES)
def test_oracle_on_the_plan_gives_transformers_logits(name):
    want = small_models.expected_logits(name).numpy()
    assert want.std() > 0.2, "the model is too flat to tell a wrong graph from a right one"
    got = oracle_logits(small_models.model_dir(name))
    scale = np.abs(want).max()
    error = np.abs(got - want)
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert not differs(got, want), f"{name} at {worst}: off by {error[worst]:.3g} of {scale:.3g}"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["llama_tied_sharded", "qwen3", "opt_350m"])
def test_sixteen_bit_checkpoints(name, dtype):
    got = oracle_logits(small_models.model_dir(name, dtype))
    assert not differs(got, small_models.expected_logits(name, dtype).numpy())


@pytest.mark.parametrize("change", ["nan", "sign", "row", "window", "offset", "accumulate"])
def test_comparison_catches_a_wrong_result(change):
    folder = small_models.model_dir("mistral_window")
    want = small_models.expected_logits("mistral_window").numpy()
    document = json.loads(plan_of(folder).to_json())
    weights = reference.load_weights(document, folder)
    block = document["units"][1]["ops"]
    by_kind = {op["op"]: op for op in block}
    if change == "window":
        by_kind["attention"]["window"] += 1
    elif change == "offset":
        by_kind["attention"]["k_offset"], by_kind["attention"]["v_offset"] = (
            by_kind["attention"]["v_offset"],
            by_kind["attention"]["k_offset"],
        )
    elif change == "accumulate":
        by_kind["linear"]["accumulate"] = False
    got = reference.run(document, weights, small_models.PROMPT)
    if change == "nan":
        got[5, 7] = np.nan
    elif change == "sign":
        got[5, np.argmax(np.abs(got[5]))] *= -1
    elif change == "row":
        got[5] = got[6]
    assert differs(got, want)


def test_the_registry_lists_families_by_their_own_names():
    assert architectures() == sorted(FAMILIES)
    assert all(family.architecture == name for name, family in FAMILIES.items())
    assert len({family.model_type for family in FAMILIES.values()}) == len(FAMILIES)


def test_unknown_architecture_is_named_with_the_known():
    config = load_config(small_models.model_dir("llama"))
    unknown = dataclasses.replace(config, architecture="MambaForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*LlamaForCausalLM, Mini"):
        build_graph(unknown)


@pytest.mark.parametrize("name", ["llama_tied_sharded", "qwen3", "opt"])
def test_base_model_checkpoint_without_prefix(name, tmp_path):
    folder = small_models.model_dir(name)
    small_models.make_model(name).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"][0].endswith("Model")
    assert not any(key.startswith("model.") for key in read_checkpoint(tmp_path))
    assert not differs(oracle_logits(tmp_path), small_models.expected_logits(name).numpy())
    assert not differs(oracle_logits(tmp_path), oracle_logits(folder), 1e-12)


def test_untied_head_must_be_there(tmp_path):
    folder = small_models.model_dir("llama")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight.*whole checkpoint"):
        plan_of(tmp_path)


@pytest.mark.parametrize("name", small_models.CASES)
def test_graph_reads_every_parameter_once(name):
    model = small_models.make_model(name)
    graph = build_graph(load_config(small_models.model_dir(name)))
    parameters = {key: tuple(p.shape) for key, p in model.named_parameters()}
    for key in parameters:
        if lies_by_column(key, load_config(small_models.model_dir(name))):
            parameters[key] = parameters[key][::-1]
    if name in small_models.MIXTURES:  # whose checkpoints have other names than modules
        stored = with_stacks(read_checkpoint(small_models.model_dir(name)), graph)
        parameters = {key: info.shape for key, info in stored.items()}
    assert graph.tensors == parameters
    read = [weight for op in graph.ops() for weight in op.weight_names()]
    tied = [graph.units[0].ops[0].table] if len(read) > len(set(read)) else []
    assert sorted(read) == sorted([*parameters, *tied])
    assert set(read) == set(graph.tensors)


def test_a_row_wider_than_the_runtime_allows_is_refused():
    config = load_config(small_models.model_dir("llama"))
    with pytest.raises(InvalidError, match="'gate_up' would be 16777218 elements wide"):
        build_graph(dataclasses.replace(config, intermediate_size=2**23 + 1))


def test_qkv_and_gate_up_are_one_op_each():
    graph = build_graph(load_config(small_models.model_dir("qwen3")))
    parts = [len(op.parts) for op in graph.layers[0].ops if isinstance(op, Linear)]
    assert parts == [3, 1, 2, 1]


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "opt_350m"])
def test_behind_the_last_attention_are_only_rows_whose_logits_are_asked_for(name):
    graph = build_graph(load_config(small_models.model_dir(name)))
    rows = {value.name: value.rows for value in graph.values}
    asked = [
        rows[getattr(op, "out", None) or getattr(op, "value", "")] == "outputs"
        for op in graph.ops()
    ]
    last = max(i for i, op in enumerate(graph.ops()) if isinstance(op, Attention))
    assert asked == [i > last for i in range(len(asked))]
    assert isinstance(graph.units[-1].ops[0], Norm | Linear), "the head has nothing to select"


def test_graph_to_dict_is_plain_json():
    graph = build_graph(load_config(small_models.model_dir("opt_350m")))
    document = graph.to_dict()
    assert json.loads(json.dumps(document)) == document
    assert [unit["name"] for unit in document["units"]] == [
        "embedding",
        "layer.0.attention",
        "layer.0.mlp",
        "layer.1.attention",
        "layer.1.mlp",
        "head",
    ]


@pytest.mark.parametrize("name", small_models.CASES)
def test_a_layer_is_an_attention_and_an_mlp(name):
    """One value goes from each to the next, so that the two may lie on two devices. Where attention
    and mlp read the same normed value, that goes from one to the other, too."""
    graph = build_graph(load_config(small_models.model_dir(name)))
    assert [(unit.kind, unit.layer) for unit in graph.units] == [
        ("embedding", None),
        *((kind, layer) for layer in range(len(graph.kv.layers)) for kind in ("attention", "mlp")),
        ("head", None),
    ]
    for unit in graph.units:
        assert sum(isinstance(op, Attention) for op in unit.ops) == (unit.kind == "attention")
    assert [op for layer in graph.layers for op in layer.ops] == [
        op for unit in graph.units[1:-1] for op in unit.ops
    ]
    written = set()
    parallel = name.startswith("cohere") or name in ("stablelm_parallel", "gpt_neox")
    for unit in graph.units:
        own, handed = set(), set()
        for op in unit.ops:
            value = getattr(op, "input", None) or getattr(op, "value", None)
            if value is not None and value not in own:
                handed.add(value)
            if isinstance(op, Linear) and op.accumulate and op.out not in own:
                handed.add(op.out)
            own.add(getattr(op, "out", value))
        count = 0 if unit.kind == "embedding" else 1 + (parallel and unit.kind == "mlp")
        assert len(handed) == count, (unit.name, handed)
        assert handed <= written
        written = own
