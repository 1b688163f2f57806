"""Plans with parts of tensors, KV heads on two devices and cut units, as JSON: both readers refuse
the same faults and name the same field."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from typing import Any

import pytest
from cut_plans import OWN, cut_in_all_ways

from helm import _helm
from helm.errors import InvalidError, PlanError
from helm.model.graph import KvLayer
from helm.plan.schema import Plan
from helm.plan.units import CPU
from helm.plan.weights import slice_bytes

NAME = "llama_tied_sharded"  # its embedding is the head's matrix, too
EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
OUTPUT, GATE = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj.weight"
cut = functools.partial(cut_in_all_ways, NAME)  # with any home, by heads, elements and rows


def test_a_cut_plan_reads_as_it_was_written() -> None:
    plan = cut()
    document = plan.to_dict()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.cut
    assert (plan.units_cpu, plan.units_accelerator, plan.units_cut) == (1, 0, 3)
    assert document["units_cut"] == 3
    assert document["kv"]["layers"] == [
        {"layer": 0, "kv_head": 0, "kv_heads": 1},
        {"layer": 0, "kv_head": 1, "kv_heads": 1},
        {"layer": 1, "kv_head": 0, "kv_heads": 1},
        {"layer": 1, "kv_head": 1, "kv_heads": 1},
    ]
    parts = {t["name"]: t["part"] for t in document["tensors"] if t["part"] is not None}
    assert parts[f"{OUTPUT}[0:48, 32:64]"] == {
        "tensor": OUTPUT, "shape": [48, 64], "row": 0, "col": 32,
    }  # fmt: skip
    assert parts[f"{EMBEDDING}[48:131, 0:48]"]["row"] == 48
    assert EMBEDDING in {t["name"] for t in document["tensors"]}


def test_the_same_pieces_on_the_cpu_are_no_cut_plan() -> None:
    alone = cut(alone=True)
    assert not alone.cut
    assert (alone.units_cpu, alone.units_cut) == (4, 0)
    assert Plan.from_json(alone.to_json()) == alone


def test_parts_of_a_matrix_that_is_there_take_no_bytes() -> None:
    plan = cut()
    sizes = {device: slice_bytes(plan.tensors, plan.slices, device) for device in (CPU, OWN)}
    assert sizes[CPU][EMBEDDING] == 131 * 48 * 4
    assert sizes[CPU][f"{EMBEDDING}[0:48, 0:48]"] == 0
    assert sizes[OWN][f"{EMBEDDING}[48:131, 0:48]"] == 83 * 48 * 4
    assert sizes[CPU][f"{OUTPUT}[0:48, 0:32]"] == 48 * 32 * 4
    narrow = dataclasses.replace(
        next(held for held in plan.slices if held.tensor == f"{EMBEDDING}[0:48, 0:48]"),
        format="f16",
    )
    others = [held for held in plan.slices if held.tensor != narrow.tensor]
    assert slice_bytes(plan.tensors, [*others, narrow], CPU)[narrow.tensor] == 48 * 48 * 2


def test_pages_go_by_entries() -> None:
    kv = cut().kv
    assert kv.layers == (KvLayer(0, 0, 1), KvLayer(0, 1, 1), KvLayer(1, 0, 1), KvLayer(1, 1, 1))
    assert kv.pages == 4 * kv.blocks
    assert kv.block_bytes == 4 * kv.unit_bytes == 2 * kv.page_bytes
    assert kv.unit_bytes == 2 * 16 * 16 * 4


class Edit:
    """A change of a plan's document, by names in place of numbers."""

    def __init__(self, visits: int = 0) -> None:
        self.document: dict[str, Any] = copy.deepcopy(cut(visits=visits).to_dict())

    def tensor(self, name: str) -> dict[str, Any]:
        return next(t for t in self.document["tensors"] if t["name"] == name)

    def unit(self, name: str) -> dict[str, Any]:
        return next(u for u in self.document["units"] if u["name"] == name)

    def op(self, unit: str, kind: str) -> dict[str, Any]:
        return next(op for op in self.unit(unit)["ops"] if op["op"] == kind)

    def rename(self, old: str, new: str) -> None:
        """A tensor, wherever it is named."""
        text = json.dumps(self.document)
        self.document = json.loads(text.replace(json.dumps(old), json.dumps(new)))


def at(list_: str, name: str) -> str:
    """The place of what has that name, as in messages."""
    document = cut().to_dict()
    names = [item["name"] for item in document[list_]]
    return f"{list_}[{names.index(name)}]"


def _query(edit: Edit, **part: Any) -> None:
    edit.tensor(f"{QUERY}[0:32, 0:48]")["part"].update(part)


def _resized(edit: Edit, name: str, shape: list[int], new: str, **part: Any) -> None:
    tensor = edit.tensor(name)
    tensor["shape"] = shape
    tensor["part"].update(part)
    edit.rename(name, new)


def _other_source(edit: Edit) -> None:
    edit.tensor(f"{QUERY}[32:64, 0:48]")["source"]["extents"][0]["offset"] += 64


def _whole_of_another_shape(edit: Edit) -> None:
    for tensor in edit.document["tensors"]:
        if tensor["part"] is not None and tensor["part"]["tensor"] == EMBEDDING:
            tensor["part"]["shape"] = [132, 48]
            tensor["source"]["extents"][0]["rows"] = 132
    _resized(edit, f"{EMBEDDING}[48:131, 0:48]", [84, 48], f"{EMBEDDING}[48:132, 0:48]")


Q0, Q1 = f"{QUERY}[0:32, 0:48]", f"{QUERY}[32:64, 0:48]"
O0, O1 = f"{OUTPUT}[0:48, 0:32]", f"{OUTPUT}[0:48, 32:64]"
GUEST = "layer.0.attention.guest"
# name -> (change, field that both readers name, words of Python's message)
FAULTS: dict[str, tuple[Any, str, str]] = {
    "no part": (lambda e: e.tensor(Q0).pop("part"), "{Q0}", "'part' is missing"),
    "a part that is a number": (lambda e: e.tensor(Q0).update(part=3), "{Q0}.part", "expected"),
    "a field too many": (lambda e: _query(e, rows=3), "{Q0}.part", "unknown key 'rows'"),
    "no row": (lambda e: e.tensor(Q0)["part"].pop("row"), "{Q0}.part", "'row' is missing"),
    "a negative row": (lambda e: _query(e, row=-1), "{Q0}.part.row", "expected an integer"),
    "a name that is none": (lambda e: _query(e, tensor=3), "{Q0}.part.tensor", "a string"),
    "of a vector": (lambda e: _query(e, shape=[64]), "{Q0}.part.shape", "2 dimensions"),
    "beyond the rows": (lambda e: _query(e, row=40), "{Q0}.part.row", "ends at 72"),
    "beyond the columns": (lambda e: _query(e, col=32), "{Q0}.part.col", "ends at 80"),
    "another name": (lambda e: e.rename(Q0, "q"), "{Q0}.name", "expected"),
    "another whole's name": (lambda e: _query(e, tensor="q"), "{Q0}.name", "expected 'q"),
    "a border within a block": (
        lambda e: _resized(e, O1, [48, 40], f"{OUTPUT}[0:48, 24:64]", col=24),
        "{O1}.part.col", "multiples of 32, not at 24",
    ),
    "an end within a block": (
        lambda e: _resized(e, O0, [48, 40], f"{OUTPUT}[0:48, 0:40]"),
        "{O0}.shape", "multiples of 32, not at 40",
    ),
    "rows in no part": (
        lambda e: _resized(e, Q0, [30, 48], f"{QUERY}[0:30, 0:48]"),
        "{Q0}.part", "rows 30 to 32, columns 0 to 48 of '.*' lie in no part",
    ),
    "rows in two parts": (
        lambda e: _resized(e, Q0, [33, 48], f"{QUERY}[0:33, 0:48]"),
        "{Q0}.part", "rows 32 to 33, columns 0 to 48 of '.*' lie in two parts",
    ),
    "columns in no part": (
        lambda e: _resized(e, O0, [47, 32], f"{OUTPUT}[0:47, 0:32]"),
        "{O0}.part", "rows 47 to 48, columns 0 to 32 of '.*' lie in no part",
    ),
    "columns in two parts": (
        lambda e: _resized(e, O1, [48, 64], f"{OUTPUT}[0:48, 0:64]", col=0),
        "{O0}.part", "columns 0 to 32 of '.*' lie in two parts",
    ),
    "another source": (_other_source, "{Q1}.part", "another shape or source"),
    "another shape than the whole": (
        _whole_of_another_shape, "{E0}.part", "another shape or source",
    ),
    "a source of the part alone": (
        lambda e: e.tensor(Q0)["source"]["extents"][0].update(rows=32),
        "{Q0}.source.extents", "32 rows, the tensor 64",
    ),
    "layers that are counted": (
        lambda e: e.document["kv"].update(layers=3), "kv.layers", "expected an array",
    ),
    "no entries": (lambda e: e.document["kv"].update(layers=[]), "kv.layers", "entries"),
    "an entry's field": (
        lambda e: e.document["kv"]["layers"][0].pop("kv_head"), "kv.layers[0]", "is missing",
    ),
    "an entry of a negative layer": (
        lambda e: e.document["kv"]["layers"][0].update(layer=-1), "kv.layers[0].layer", "integer",
    ),
    "layers that descend": (
        lambda e: e.document["kv"]["layers"].extend(e.document["kv"]["layers"][:2]),
        "kv.layers[4].layer", "layers ascend",
    ),
    "an entry of no heads": (
        lambda e: e.document["kv"]["layers"][0].update(kv_heads=0),
        "kv.layers[0].kv_heads", "an integer from 1",
    ),
    "a gap of heads": (
        lambda e: e.document["kv"]["layers"][0].update(kv_head=1),
        "kv.layers[0].kv_head", "expected 0, found 1",
    ),
    "heads twice": (
        lambda e: e.document["kv"]["layers"][1].update(kv_head=0),
        "kv.layers[1].kv_head", "expected 1, found 0",
    ),
    "too many heads": (
        lambda e: e.document["kv"]["layers"][1].update(kv_heads=2),
        "kv.layers[1].kv_heads", "have 3 heads, the model 2",
    ),
    "too few heads": (
        lambda e: e.document["kv"]["layers"].pop(), "kv.layers[2].kv_heads",
        "have 1 heads, the model 2",
    ),
    "pages that are kept for no window": (
        lambda e: e.document["kv"].update(window_blocks=1),
        "kv.window_blocks", "no entry of kv.layers has a window",
    ),
    "an op of no entry": (
        lambda e: e.op(GUEST, "attention").update(layer=4), "{GUEST}.ops[*].layer", "integer",
    ),
    "two ops of an entry": (
        lambda e: e.op("layer.0.attention.home", "attention").update(layer=1),
        "{HOME}.ops[*].layer", "another attention op",
    ),
    "an op of another layer's entry": (
        lambda e: e.op(GUEST, "attention").update(layer=2), "{GUEST}.ops[*].layer", "of layer 1",
    ),
    "an op with the model's heads": (
        lambda e: e.op(GUEST, "attention").update(kv_heads=2),
        "{GUEST}.ops[*].kv_heads", "is 2, entry 1 of kv.layers has 1",
    ),
    "an entry without an op": (
        lambda e: e.unit(GUEST)["ops"].remove(e.op(GUEST, "attention")),
        "kv.layers[1]", "no attention op",
    ),
    "two attentions in a unit": (
        lambda e: e.unit(GUEST)["ops"].append(e.op(GUEST, "attention")),
        "{GUEST}.ops", "at most one attention op, found 2",
    ),
    "attention in an mlp": (
        lambda e: e.unit("layer.0.mlp.guest")["ops"].append(e.op(GUEST, "attention")),
        "{MLP}.ops", "has no attention op",
    ),
    "an mlp before its attention": (
        lambda e: e.unit(GUEST).update(kind="mlp", ops=e.unit("layer.0.mlp.guest")["ops"]),
        "{HOME}.kind", "attention of layer 0 comes after its mlp",
    ),
    "two units of a name": (
        lambda e: e.unit("layer.0.mlp.guest").update(name=GUEST), "{MLP}.name", "listed twice",
    ),
    "a head that is not last": (
        lambda e: e.unit("layer.0.mlp.end").update(kind="head", layer=None),
        "{LAST}.kind", "the last unit is the head",
    ),
    "no head at the end": (
        lambda e: e.unit("head.end").update(kind="mlp", layer=1),
        "{LOGITS}.kind", "the last unit is the head",
    ),
    "an unknown op": (
        lambda e: e.op("layer.0.attention.end", "add").update(op="sum"),
        "{END}.ops[0].op", "unknown op 'sum'",
    ),
    "a sum of no value": (
        lambda e: e.op("layer.0.attention.end", "add").update({"in": "y"}),
        "{END}.ops[0].in", "unknown value 'y'",
    ),
    "a value added to itself": (
        lambda e: e.op("layer.0.attention.end", "add").update({"in": "x"}),
        "{END}.ops[0].out", "is read and written",
    ),
    "a sum of unlike widths": (
        lambda e: e.op("layer.0.attention.end", "add").update({"in": "qkv[0:1]"}),
        "{END}.ops[0].out", "48 wide, what goes into it 64",
    ),
    "a sum of unlike rows": (
        lambda e: e.op("layer.0.attention.end", "add").update({"in": "partial_out"}),
        "{END}.ops[0].out", "has rows 'tokens'",
    ),
    "a sum with a field too many": (
        lambda e: e.op("layer.0.attention.end", "add").update(scale=1.0), "{END}.ops[0]", "scale",
    ),
    "values side by side of none": (
        lambda e: e.op("head.end", "concat").update({"in": []}), "{LOGITS}.ops[0].in", "values",
    ),
    "values side by side that are unknown": (
        lambda e: e.op("head.end", "concat")["in"].append("y"),
        "{LOGITS}.ops[0].in[2]", "unknown value 'y'",
    ),
    "values side by side that are too wide": (
        lambda e: e.op("head.end", "concat")["in"].pop(), "{LOGITS}.ops[0].out", "131 wide",
    ),
    "values side by side into one of them": (
        lambda e: e.op("head.end", "concat")["in"].append("logits"),
        "{LOGITS}.ops[0].in", "is read and written",
    ),
    "two groups": (
        lambda e: e.document["schedule"].update(decode_groups=2),
        "schedule.decode_groups", "expected 1, as layers",
    ),
    "steps that overlap": (
        lambda e: e.document["schedule"].update(prefill_overlap=True),
        "schedule.prefill_overlap", "expected false, as layers",
    ),
    "pages that overflow": (
        lambda e: e.document["schedule"]["pages"].update(
            cpu=4 * e.document["kv"]["blocks"] - 7, accelerator=7
        ),
        "schedule.pages.accelerator", "must lie on its device",
    ),
    "counts that are wrong": (lambda e: e.document.update(units_cut=2), "", "the units say 3"),
    "no count": (lambda e: e.document.pop("units_cut"), "", "'units_cut' is missing"),
}  # fmt: skip
PLACES = {
    "Q0": ("tensors", Q0), "Q1": ("tensors", Q1), "O0": ("tensors", O0), "O1": ("tensors", O1),
    "E0": ("tensors", f"{EMBEDDING}[0:48, 0:48]"), "GUEST": ("units", GUEST),
    "HOME": ("units", "layer.0.attention.home"), "END": ("units", "layer.0.attention.end"),
    "MLP": ("units", "layer.0.mlp.guest"), "LAST": ("units", "layer.0.mlp.end"),
    "LOGITS": ("units", "head.end"),
}  # fmt: skip


def field_of(pattern: str) -> str:
    """As a regular expression; an asterisk is any place."""
    named = pattern.format(**{key: at(*place) for key, place in PLACES.items()})
    return re.escape(named).replace(r"\*", r"\d+")


@pytest.mark.parametrize("fault", FAULTS)
def test_both_readers_refuse_and_name_the_field(fault: str) -> None:
    change, field, message = FAULTS[fault]
    edit = Edit()
    change(edit)
    text = json.dumps(edit.document)
    with pytest.raises(PlanError, match=rf"{field_of(field)}:? .*{message}"):
        Plan.from_json(text)
    if field:  # else it is for people
        with pytest.raises(InvalidError, match=rf"{field_of(field)}: "):
            _helm.program(text)


def test_counts_for_people_are_not_executed() -> None:
    edit = Edit()
    edit.document["units_cut"] = 2
    assert _helm.program(json.dumps(edit.document)) == _helm.program(cut().to_json())


def test_plans_of_the_version_before_are_made_anew() -> None:
    document = cut().to_dict()
    document["version"] = 7
    for reader, error in ((Plan.from_json, PlanError), (_helm.program, InvalidError)):
        with pytest.raises(error, match=r"version: .*make the plan anew"):
            reader(json.dumps(document))


def test_columns_of_packed_weights_are_cut_between_spans() -> None:
    edit = Edit()
    for name in (O0, O1):
        edit.tensor(name)["source"]["stored"] = "q8_0"
    with pytest.raises(PlanError, match=r"multiples of 256, not at 32"):
        Plan.from_json(json.dumps(edit.document))
    with pytest.raises(InvalidError, match=re.escape(at("tensors", O0))):
        _helm.program(json.dumps(edit.document))


def test_weights_of_a_cut_layer_that_visit_are_not_compressed() -> None:
    edit = Edit(visits=4)
    assert Plan.from_json(json.dumps(edit.document)) == cut(visits=4)
    held = next(
        h for h in edit.document["slices"]
        if h["device"] == CPU and h["tensor"].startswith(f"{GATE}[")
    )  # fmt: skip
    held["format"] = "bf16c"
    with pytest.raises(PlanError, match=r"visit .* cannot be bf16c"):
        Plan.from_json(json.dumps(edit.document))
    with pytest.raises(InvalidError, match="bf16c"):
        _helm.program(json.dumps(edit.document))


def test_more_parts_than_any_plan_has_are_refused() -> None:
    edit = Edit()
    tensors = edit.document["tensors"]
    part = edit.tensor(Q0)
    for row in range(64):
        name = f"{QUERY}[{row}:{row + 1}, 0:48]"
        tensors.append(
            {**part, "name": name, "shape": [1, 48], "part": {**part["part"], "row": row}}
        )
    with pytest.raises(PlanError, match="has more than 64 parts"):
        Plan.from_json(json.dumps(edit.document))
    with pytest.raises(InvalidError, match=r"tensors\[\d+\]"):
        _helm.program(json.dumps(edit.document))
