"""Plans as JSON: the round trip, and hostile ones."""

from __future__ import annotations

import copy
import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_models
from helm.checkpoint import read_checkpoint
from helm.config import load_config
from helm.errors import PlanError
from helm.plan import Plan, make_plan

GIB = 1 << 30


def plan_of(name="qwen3", dtype_stored="f32", **options):
    folder = small_models.model_dir(name, dtype_stored)
    arguments = {"threads": 1, "memory_bytes": 4 * GIB, **options}
    return make_plan(load_config(folder), read_checkpoint(folder), **arguments)


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
        *("format", "version", "model", "limits", "threads", "kv", "rope", "tensors", "values"),
        *("units", "logits", "memory", "notices", "schedule", "loading", "loading_choice"),
        *("units_cpu", "units_accelerator"),
        *("label", "workload", "profile", "predicted", "bottleneck", "alternatives"),
    ]
    assert (document["units_cpu"], document["units_accelerator"]) == (4, 0)
    assert document["schedule"] == {
        "prefill": "compute",
        "stream_tokens": 0,
        "stream_pages": 0,
        "prefill_overlap": False,
        "decode_groups": 1,
        "overflow": "stream",
        "watermark": 0.8,
        "pages": {"cpu": 12},
    }
    assert document["predicted"] is None
    assert (document["format"], document["version"], document["threads"]) == ("helm-plan", 5, 2)
    assert document["limits"] == {
        "context": 600,
        "step_tokens": 7,
        "step_outputs": 3,
        "sequences": 3,
    }
    assert document["kv"] == {
        "dtype": "f32",
        "page_tokens": 512,
        "layers": 2,
        "kv_heads": 4,
        "head_dim": 12,
        "pages": 12,
    }
    table = document["tensors"][0]
    assert table["name"] == "model.decoder.embed_tokens.weight"
    assert (table["shape"], table["dtype"]) == ([131, 48], "f32")
    assert table["source"].keys() == {"file", "offset", "dtype"}
    first, second = document["units"][0]["ops"]
    assert first == {"op": "embedding", "table": table["name"], "out": "x"}
    assert second["op"] == "position_embedding"
    assert second["offset"] == 2
    assert document["units"][1]["ops"][0]["in"] == "x"
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


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "gguf", r"format: expected 'helm-plan', found 'gguf'"),
        (("version",), 2, r"version: expected 5, found 2; make the plan anew"),
        (("version",), True, "version: expected an integer"),
        (("units",), "absent", "key 'units' is missing"),
        (("layers",), {}, "unknown key 'layers'"),
        (("schedule",), {}, "schedule: key 'prefill' is missing"),
        (("schedule", "overflow"), "disk", r"schedule\.overflow: expected one of stream, cpu"),
        (("units_cpu",), 3, "units_cpu: is 3, the units say 4"),
        (("label",), "all-cpu", "label: expected null, as predicted is"),
        (("threads",), 0, "threads: expected an integer"),
        (("model", "vocab_size"), "131", r"model\.vocab_size: expected an integer"),
        (("limits", "context"), 0, r"limits\.context"),
        (("limits", "step_outputs"), 513, r"limits\.step_outputs"),
        (("limits", "sequences"), 9, r"limits\.sequences"),
        (("kv", "dtype"), "f8", r"kv\.dtype: expected one of f32, f16, bf16"),
        (("kv", "pages"), 0, r"kv\.pages"),
        (("kv", "extra"), 0, r"kv: unknown key 'extra'"),
        (("tensors", 0, "source", "offset"), -1, r"tensors\[0\]\.source\.offset"),
        (("tensors", 0, "source", "file"), "../x", r"tensors\[0\]\.source\.file.*leaves"),
        (("tensors", 0, "shape"), [], r"tensors\[0\]\.shape"),
        (("tensors", 0, "shape"), [0, 3], r"tensors\[0\]\.shape"),
        (("tensors", 1, "name"), "model.decoder.embed_tokens.weight", r"tensors\[1\]\.name.*twice"),
        (("values", 0, "rows"), "all", r"values\[0\]\.rows: expected one of tokens, outputs"),
        (("values", 1, "name"), "x", r"values\[1\]\.name.*twice"),
        (("units", 3, "ops", 1, "out"), 5, r"units\[3\]\.ops\[1\]\.out: expected a string"),
        (("units", 3, "ops", 1, "out"), "y", r"units\[3\]\.ops\[1\]\.out: unknown value 'y'"),
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
