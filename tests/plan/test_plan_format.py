"""Plans as JSON: the round trip, and hostile ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_models
from engine_helpers import partitioned
from helm.errors import PlanError
from helm.plan.schema import Plan
from small_plans import plan_of


@pytest.mark.parametrize("name", small_models.CASES)
def test_json_round_trip(name):
    plan = plan_of(name)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert Plan.from_json(text.encode()) == plan


def test_json_is_as_agreed():
    document = plan_of("opt", threads=2, max_sequences=3, step_tokens=7).to_dict()
    assert list(document) == [
        *("format", "version", "model", "limits", "threads", "devices", "kv", "rope", "tensors"),
        "slices",
        "values",
        *("units", "logits", "memory", "notices", "schedule", "loading", "loading_choice"),
        *("units_cpu", "units_accelerator", "units_cut"),
        *("label", "workload", "profile", "predicted", "bottleneck", "alternatives"),
    ]
    assert (document["units_cpu"], document["units_accelerator"]) == (4, 0)
    assert document["schedule"] == {
        "prefill": "compute",
        "visit_tokens": 0,
        "visit_pages": 0,
        "prefill_overlap": False,
        "decode_groups": 1,
        "overflow": "stream",
        "watermark": 0.8,
        "pages": {"cpu": 12},
    }
    assert document["predicted"] is None
    assert (document["format"], document["version"], document["threads"]) == ("helm-plan", 14, 2)
    assert document["limits"] == {
        "context": 600,
        "step_tokens": 7,
        "step_outputs": 7,
        "sequences": 3,
    }
    assert document["kv"] == {
        "dtype": "f32",
        "page_tokens": 512,
        "layers": [{"layer": layer, "kv_head": 0, "kv_heads": 4} for layer in range(2)],
        "kv_heads": 4,
        "head_dim": 12,
        "blocks": 6,
    }
    table = document["tensors"][0]
    assert table["name"] == "model.decoder.embed_tokens.weight"
    assert table.keys() == {"name", "shape", "source", "part"}
    assert table["part"] is None
    assert table["shape"] == [131, 48]
    assert table["source"].keys() == {"stored", "extents"}
    assert table["source"]["stored"] == "f32"
    (extent,) = table["source"]["extents"]
    assert list(extent) == ["file", "offset", "rows", "row_stride"]
    assert (extent["rows"], extent["row_stride"]) == (131, 0)
    held = {"device": "cpu", "format": "f32", "access": "resident"}
    assert document["slices"][0] == {"tensor": table["name"], **held}
    first, second = document["units"][0]["ops"]
    assert first == {"op": "embedding", "table": table["name"], "out": "x"}
    assert second["op"] == "position_embedding"
    assert second["offset"] == 2
    assert document["units"][1]["ops"][0]["in"] == "x"
    assert [tuple(unit.values())[:4] for unit in document["units"]] == [
        ("embedding", "embedding", None, "cpu"),
        ("layer.0.attention", "attention", 0, "cpu"),
        ("layer.0.mlp", "mlp", 0, "cpu"),
        ("layer.1.attention", "attention", 1, "cpu"),
        ("layer.1.mlp", "mlp", 1, "cpu"),
        ("head", "head", None, "cpu"),
    ]
    assert document["values"][0] == {"name": "x", "width": 48, "rows": "tokens"}
    assert document["values"][-1] == {"name": "logits", "width": 131, "rows": "outputs"}


def test_tied_head_lists_the_embedding_once():
    plan = plan_of("llama_tied_sharded")
    names = [tensor.name for tensor in plan.tensors]
    assert len(names) == len(set(names))
    assert plan.units[-1].ops[-1].parts[0].weight == plan.units[0].ops[0].table


@functools.cache
def document():
    return plan_of("opt_350m").to_dict()


def changed(path, value):
    """The document with the item at `path` replaced, or removed if value is "absent"."""
    result = copy.deepcopy(document())
    node = result
    for key in path[:-1]:
        node = node[key]
    if value == "absent":
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return json.dumps(result)


OP = ("units", 1, "ops", 0)  # a linear
EXTENT = ("tensors", 0, "source", "extents", 0)  # of the embedding
SLICE = {
    "tensor": "model.decoder.embed_tokens.weight",
    "device": "cpu",
    "format": "f32",
    "access": "resident",
}


OWN, OTHER = {"name": "cpu", "kind": "cpu"}, {"name": "gpu", "kind": "accelerator"}
USE = {
    f"{name}_bytes": 0
    for name in ("weights", "kv", "activations", "workspace", "staging", "reserve")
}


def spare(number):
    return {**OTHER, "name": f"gpu{number}"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "gguf", r"format: expected 'helm-plan', found 'gguf'"),
        (("version",), 2, r"version: expected 14, found 2; make the plan anew"),
        (("version",), 7, r"version: expected 14, found 7; make the plan anew"),
        (("version",), True, "version: expected an integer"),
        (("units",), "absent", "key 'units' is missing"),
        (("layers",), {}, "unknown key 'layers'"),
        (("schedule",), {}, "schedule: key 'prefill' is missing"),
        (("schedule", "overflow"), "disk", r"schedule\.overflow: expected one of stream, cpu"),
        (("units_cpu",), 3, "units_cpu: is 3, the units say 4"),
        (("units", 0, "kind"), "block", r"units\[0\]\.kind: expected one of embedding, attention"),
        (("units", 0, "kind"), None, r"units\[0\]\.kind"),
        (("units", 0, "kind"), "absent", r"units\[0\]: key 'kind' is missing"),
        (("units", 0, "kind"), "mlp", r"units\[0\]\.kind: the first unit is the embedding"),
        (("units", 2, "kind"), "embedding", r"units\[2\]\.kind: the first unit is the embedding"),
        (("units", 2, "kind"), "head", r"units\[2\]\.kind: the last unit is the head"),
        (("units", 5, "kind"), "mlp", r"units\[5\]\.kind: the last unit is the head"),
        (("units", 1, "kind"), "mlp", r"units\[1\]\.ops: a unit of kind mlp has no attention op"),
        (("units", 0, "layer"), 0, r"units\[0\]\.layer: expected null, found 0"),
        (("units", 5, "layer"), 1, r"units\[5\]\.layer: expected null, found 1"),
        (("units", 1, "layer"), None, r"units\[1\]\.layer: expected the layer that this attention"),
        (("units", 2, "layer"), None, r"units\[2\]\.layer: expected the layer that this mlp is of"),
        (("units", 2, "layer"), "absent", r"units\[2\]: key 'layer' is missing"),
        (("units", 2, "layer"), -1, r"units\[2\]\.layer: expected an integer"),
        (("units", 2, "layer"), 2**20 + 1, r"units\[2\]\.layer: expected an integer"),
        (("units", 2, "layer"), 2, r"units\[3\]\.layer: layer 1 comes after layer 2"),
        (
            ("units", 3, "layer"),
            0,
            r"units\[3\]\.kind: the attention of layer 0 comes after its mlp",
        ),
        (("label",), "all-cpu", "label: expected null, as predicted is"),
        (("threads",), 0, "threads: expected an integer"),
        (("model", "vocab_size"), "131", r"model\.vocab_size: expected an integer"),
        (("limits", "context"), 0, r"limits\.context"),
        (("limits", "step_outputs"), 513, r"limits\.step_outputs"),
        (("limits", "sequences"), 9, r"limits\.sequences"),
        (("kv", "dtype"), "f8", r"kv\.dtype: expected one of f32, f16, bf16"),
        (("kv", "blocks"), 0, r"kv\.blocks"),
        (("kv", "extra"), 0, r"kv: unknown key 'extra'"),
        (("tensors", 0, "dtype"), "f32", r"tensors\[0\]: unknown key 'dtype'"),
        (("tensors", 0, "source", "offset"), 0, r"tensors\[0\]\.source: unknown key 'offset'"),
        (("tensors", 0, "source", "stored"), "f64", r"source\.stored: expected one of f32, f16"),
        (("tensors", 0, "source", "stored"), "bf16c", r"source\.stored: expected one of f32, f16"),
        (("tensors", 0, "source", "extents"), [], r"source\.extents: have 0 rows, the tensor 131"),
        ((*EXTENT, "offset"), -1, r"tensors\[0\]\.source\.extents\[0\]\.offset"),
        ((*EXTENT, "offset"), 2**46 + 1, r"tensors\[0\]\.source\.extents\[0\]\.offset"),
        ((*EXTENT, "file"), "../x", r"tensors\[0\]\.source\.extents\[0\]\.file.*leaves"),
        ((*EXTENT, "file"), "/x", r"tensors\[0\]\.source\.extents\[0\]\.file.*leaves"),
        ((*EXTENT, "file"), "", r"tensors\[0\]\.source\.extents\[0\]\.file.*leaves"),
        ((*EXTENT, "rows"), 0, r"tensors\[0\]\.source\.extents\[0\]\.rows: expected an integer"),
        ((*EXTENT, "rows"), 130, r"source\.extents: have 130 rows, the tensor 131"),
        ((*EXTENT, "row_stride"), 79, r"extents\[0\]\.row_stride: is 79, a row takes 80"),
        ((*EXTENT, "row_stride"), -1, r"extents\[0\]\.row_stride: expected an integer"),
        ((*EXTENT, "row_stride"), 2**46 + 1, r"extents\[0\]\.row_stride: expected an integer"),
        ((*EXTENT, "row_stride"), "absent", r"extents\[0\]: key 'row_stride' is missing"),
        (("slices",), "absent", "key 'slices' is missing"),
        (("slices",), [], r"slices: there is none of 'lm_head|'model.* on the cpu, where ops read"),
        (("slices", 0, "tensor"), "w", r"slices\[0\]\.tensor: unknown tensor 'w'"),
        (("devices",), "absent", "key 'devices' is missing"),
        (("devices",), [], "devices: expected 1 to 16 devices, the CPU first"),
        (("devices",), [OTHER], r"devices\[0\]\.kind: expected 'cpu', found 'accelerator'"),
        (("devices",), [OWN, OWN], r"devices\[1\]\.name: 'cpu' is listed twice"),
        (("devices",), [OWN, OTHER, OTHER], r"devices\[2\]\.name: 'gpu' is listed twice"),
        (("devices",), [OWN, {**OTHER, "kind": "cpu"}], r"devices\[1\]\.kind: expected 'accel"),
        (("devices",), [OWN, {**OTHER, "name": ""}], r"devices\[1\]\.name: expected a name"),
        (("devices",), [OWN, *map(spare, range(16))], "devices: expected 1 to 16 devices"),
        (("devices", 0, "name"), "host", r"devices\[0\]\.name: expected 'cpu', found 'host'"),
        (("devices", 0, "name"), 0, r"devices\[0\]\.name: expected a string"),
        (("devices", 0, "kind"), "disk", r"devices\[0\]\.kind: expected one of cpu, accelerator"),
        (("devices", 0, "bytes"), 1, r"devices\[0\]: unknown key 'bytes'"),
        (("units", 0, "device"), "disk", r"units\[0\]\.device: unknown device 'disk'"),
        (("slices", 0, "device"), "disk", r"slices\[0\]\.device: unknown device 'disk'"),
        (("slices", 0, "device"), "gpu", r"slices\[0\]\.device: unknown device 'gpu'"),
        (("memory", "disk"), USE, "memory: unknown device 'disk'"),
        (("memory",), {}, "memory: key 'cpu' is missing"),
        (("schedule", "pages", "disk"), 0, r"schedule\.pages: unknown device 'disk'"),
        (("slices", 1), SLICE, r"slices\[1\]\.tensor: 'model.*' on the cpu is listed twice"),
        (("slices", 0, "format"), "f64", r"slices\[0\]\.format: expected one of f32, f16, bf16"),
        (("slices", 0, "access"), "tape", r"slices\[0\]\.access: expected one of resident, mapped"),
        (("slices", 0, "tier"), "ram", r"slices\[0\]: unknown key 'tier'"),
        (("slices", 0), {**SLICE, "format": "f16", "access": "mapped"}, "cannot be mapped"),
        (("loading",), "mapped", "loading: is mapped, the slices say copied"),
        (("tensors", 0, "shape"), [], r"tensors\[0\]\.shape"),
        (("tensors", 0, "shape"), [0, 3], r"tensors\[0\]\.shape"),
        (("tensors", 1, "name"), "model.decoder.embed_tokens.weight", r"tensors\[1\]\.name.*twice"),
        (("values", 0, "rows"), "all", r"values\[0\]\.rows: expected one of tokens, outputs"),
        (("values", 1, "name"), "x", r"values\[1\]\.name.*twice"),
        (("units", 5, "ops", 1, "out"), 5, r"units\[5\]\.ops\[1\]\.out: expected a string"),
        (("units", 5, "ops", 1, "out"), "y", r"units\[5\]\.ops\[1\]\.out: unknown value 'y'"),
        ((*OP, "op"), "conv", r"units\[1\]\.ops\[0\]\.op: unknown op 'conv'; known are activation"),
        ((*OP, "op"), "absent", r"units\[1\]\.ops\[0\]: key 'op' is missing"),
        ((*OP, "accumulate"), 1, r"ops\[0\]\.accumulate: expected true or false"),
        ((*OP, "parts", 0, "weight"), "w", r"ops\[0\]\.parts\[0\]\.weight: unknown tensor 'w'"),
        ((*OP, "parts", 0, "bias"), 0, r"ops\[0\]\.parts\[0\]\.bias: expected a string"),
        (("logits",), "x2", "logits: unknown value 'x2'"),
        (("memory", "cpu", "kv_bytes"), 1.5, r"memory\.cpu\.kv_bytes"),
        (("notices",), "text", "notices: expected an array"),
    ],
)
def test_malformed_plans_name_the_field(path, value, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(changed(path, value))


def test_devices_may_have_any_names_and_be_more_than_a_runtime_drives():
    made = partitioned(plan_of("opt_350m"), ("cpu", "cpu", "accelerator", "cpu")).to_dict()
    made["devices"] = [OWN, OTHER, spare(1)]
    for named in (*made["units"], *made["slices"]):
        named["device"] = {"cpu": "cpu", "accelerator": "gpu"}[named["device"]]
    for by_device in (made["memory"], made["schedule"]["pages"]):
        by_device["gpu"] = by_device.pop("accelerator")
    plan = Plan.from_json(json.dumps(made))
    assert plan.accelerator == "gpu"
    assert [device.name for device in plan.devices] == ["cpu", "gpu", "gpu1"]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_layer_on_two_devices_counts_for_neither_and_visits_as_a_whole():
    plan = plan_of("opt_350m")
    split = partitioned(plan, ("cpu", "cpu", "accelerator", "cpu", "cpu", "accelerator"))
    read = Plan.from_json(split.to_json())
    assert read == split
    assert (read.units_cpu, read.units_accelerator, read.units_cut) == (2, 1, 0)
    assert read.places[1] == {"cpu", "accelerator"}
    visits = dataclasses.replace(split.schedule, prefill="visit", visit_tokens=4, visit_pages=8)
    Plan.from_json(dataclasses.replace(split, schedule=visits).to_json())
    whole = partitioned(plan, ("cpu", "cpu", "accelerator", "accelerator"))
    Plan.from_json(dataclasses.replace(whole, schedule=visits).to_json())


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (0, {"stored": "c8.s32"}, ""),
        (0, {"stored": "c4.km32"}, ""),
        (0, {"row_stride": 2**20}, r"source\.extents: a matrix of c8\.s32 lies in one piece"),
        (0, {"twice": True}, r"source\.extents: a matrix of c8\.s32 lies in one piece"),
        (None, {}, r"source\.stored: vectors are not stored as c8\.s32"),
    ],
)
def test_matrices_in_own_formats_lie_in_one_piece(tensor, changes, message):
    made = copy.deepcopy(document())
    if tensor is None:
        tensor = next(i for i, t in enumerate(made["tensors"]) if len(t["shape"]) == 1)
    source = made["tensors"][tensor]["source"]
    source["stored"] = changes.get("stored", "c8.s32")
    source["extents"][0]["row_stride"] = changes.get("row_stride", 0)
    if "twice" in changes:
        first = source["extents"][0]
        source["extents"] = [{**first, "rows": 1}, {**first, "rows": first["rows"] - 1}]
    text = json.dumps(made)
    if not message:
        assert Plan.from_json(text).tensors[tensor].source.stored == source["stored"]
        return
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


PIECE = {"name": "qweight", "dtype": "i32", "shape": [3, 131], "file": "a", "offset": 3}
AUX = ("tensors", 0, "source", "aux")


def of_pieces():
    made = copy.deepcopy(document())
    pieces = [{**PIECE}, {**PIECE, "name": "one", "dtype": "f32", "shape": []}]
    made["tensors"][0]["source"] = {"stored": "gptq4", "extents": [], "aux": pieces}
    return made


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*AUX,), [], r"source\.aux: expected 1 to 8 pieces"),
        ((*AUX,), [PIECE] * 9, r"source\.aux: expected 1 to 8 pieces"),
        ((*AUX,), "absent", r"source\.aux: expected 1 to 8 pieces"),
        ((*AUX,), 3, r"source\.aux: expected an array"),
        ((*AUX[:3], "stored"), "bf16", r"source\.aux: bf16 has no pieces"),
        ((*AUX, 1, "name"), "qweight", r"aux\[0\]\.name: qweight is listed twice"),
        ((*AUX, 0, "dtype"), "i64", r"aux\[0\]\.dtype: expected one of f32, i32"),
        ((*AUX, 0, "shape"), [1, 2, 3], r"aux\[0\]\.shape: expected at most two dimensions"),
        ((*AUX, 0, "shape"), [0, 2], r"aux\[0\]\.shape\[0\]: expected an integer from 1"),
        ((*AUX, 0, "offset"), -1, r"aux\[0\]\.offset"),
        ((*AUX, 0, "offset"), 2**46 + 1, r"aux\[0\]\.offset"),
        ((*AUX, 0, "file"), "../x", r"aux\[0\]\.file.*leaves"),
        ((*AUX, 0, "file"), "", r"aux\[0\]\.file.*leaves"),
        ((*AUX, 0, "file"), "absent", r"aux\[0\]: key 'file' is missing"),
        ((*AUX, 0, "surprise"), 1, r"aux\[0\]: unknown key 'surprise'"),
    ],
)
def test_malformed_pieces_name_the_field(path, value, message):
    made = of_pieces()
    text = json.dumps(made)
    assert (
        Plan.from_json(text).to_json() == Plan.from_json(Plan.from_json(text).to_json()).to_json()
    )
    node = made
    for key in path[:-1]:
        node = node[key]
    if value == "absent":
        del node[path[-1]]
    else:
        node[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(made))


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"a": NaN}', b"\xff\xfe", "[" * 100_000])
def test_not_a_plan(text):
    with pytest.raises(PlanError):
        Plan.from_json(text)


def places(node, prefix=()):
    if prefix:
        yield prefix
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in children:
        if isinstance(child, dict | list):
            yield from places(child, (*prefix, key))
        else:
            yield (*prefix, key)


JUNK = st.sampled_from(
    ["absent", None, True, -1, 0, 3, 1.5, 1e400, 2**70, "", "x", [], {}, ["x"], {"op": "rope"}]
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_change_reads_or_raises_plan_error(data):
    path = data.draw(st.sampled_from(list(places(document()))))
    try:
        plan = Plan.from_json(changed(path, data.draw(JUNK)))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
