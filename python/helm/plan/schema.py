"""The plan: everything the runtime needs, as JSON. Knows the format, not how plans are made.

`helm.compiler.solve` makes plans; the runtime and `Plan.from_json` read them, as hostile input.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from helm.base.jsonio import Reader, decode, encode, parse
from helm.base.sizes import size_text
from helm.base.summaries import Summarized
from helm.errors import PlanError
from helm.model.graph import Attention, Value
from helm.model.rope import RopeTable
from helm.plan.disk import check_disk
from helm.plan.kv import KvSpec, check_attentions, check_kv
from helm.plan.predictor import Predictor, check_predictor
from helm.plan.records import (
    NO_PREDICTION,
    WATERMARK,
    Loading,
    LoadingChoice,
    Prediction,
    decode_prediction,
)
from helm.plan.schedule import check_cut, check_lacking, check_limits, check_schedule
from helm.plan.units import (
    CPU,
    DeviceSpec,
    PlacedUnit,
    check_devices,
    check_op,
    decode_unit,
    unique_names,
)
from helm.plan.weights import Slice, TensorSpec, check_weights, slice_bytes

FORMAT = "helm-plan"
VERSION = 14


@dataclass(frozen=True)
class ModelIdentity:
    """fingerprint: SHA-256 in hex of the configuration and the tensor table."""

    architecture: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    max_context: int  # positions the model itself allows


@dataclass(frozen=True)
class Limits:
    """What one step and one engine may hold. step_outputs: rows of logits in one step."""

    context: int
    step_tokens: int
    step_outputs: int
    sequences: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device's memory by purpose."""

    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    workspace_bytes: int
    staging_bytes: int = 0  # buffers of copies between devices
    reserve_bytes: int = 0  # left untouched

    @property
    def total_bytes(self) -> int:
        """What the plan takes; the reserve comes on top."""
        held = self.weights_bytes + self.kv_bytes + self.activations_bytes + self.workspace_bytes
        return held + self.staging_bytes


@dataclass(frozen=True)
class Schedule:
    """How stages run together. prefill "compute": layers compute where they lie; "visit": in a
    prefill step of at least visit_tokens tokens the weights of CPU layers visit the accelerator,
    where the K and V of one layer at a time have visit_pages page slots. visit_buffers: through so
    many weights visit it, then or in every step. prefill_overlap: the
    CPU's stage of one step runs beside the accelerator's of the step before. decode_groups:
    decoding sequences take turns in so many groups, so that both devices work at once. overflow:
    in decode, pages in host memory of layers on the accelerator visit it, or the CPU attends to
    them. watermark: once more than this share of the accelerator's slots is in use, the oldest
    KV blocks leave for host memory. pages: page slots by device. disk_ring_bytes: `helm.plan.disk`.
    """

    prefill: Literal["compute", "visit"] = "compute"
    visit_tokens: int = 0
    visit_pages: int = 0
    visit_buffers: int = field(default=2, metadata={"optional": True})
    prefill_overlap: bool = False
    decode_groups: int = 1
    overflow: Literal["stream", "cpu"] = "stream"
    watermark: float = WATERMARK
    pages: dict[str, int] = field(default_factory=dict)
    disk_ring_bytes: int = field(default=0, metadata={"optional": True})


@dataclass(frozen=True, repr=False)
class Plan(Summarized):
    """A placement of one model on one machine. devices: the CPU and the accelerators that the plan
    uses, at most one so far; `memory` and the schedule's pages go by their names. slices: one for
    each tensor and device that has an op reading it; but of a tensor that visits the accelerator in
    every step the CPU's alone. notices: what the planner wants the user to
    know."""

    model: ModelIdentity
    limits: Limits
    threads: int
    devices: tuple[DeviceSpec, ...]
    kv: KvSpec
    rope: tuple[RopeTable, ...]
    tensors: tuple[TensorSpec, ...]
    slices: tuple[Slice, ...]
    values: tuple[Value, ...]
    units: tuple[PlacedUnit, ...]
    logits: str
    memory: dict[str, MemoryUse]
    notices: tuple[str, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    loading_choice: LoadingChoice | None = None
    predictor: Predictor | None = None
    prediction: Prediction | None = None

    @property
    def loading(self) -> Loading:
        """How weights come into the host's memory, for people: what the slices say."""
        if any(held.format == "bf16c" for held in self.slices):
            return "compressed"
        return "mapped" if any(held.access == "mapped" for held in self.slices) else "copied"

    @property
    def accelerator(self) -> str | None:
        """The name of the accelerator, None in a plan for the CPU alone."""
        return self.devices[1].name if len(self.devices) > 1 else None

    @property
    def overflows(self) -> bool:
        """Whether an accelerator has no room for all KV of its layers."""
        ops = (op for u in self.units if u.device != CPU for op in u.ops)
        entries = [self.kv.layers[op.layer] for op in ops if isinstance(op, Attention)]
        pages = sum(n for device, n in self.schedule.pages.items() if device != CPU)
        return pages < sum(map(self.kv.entry_pages, entries))

    @functools.cached_property
    def lacking(self) -> tuple[bool, ...]:
        """By unit: whether the accelerator that it lies on lacks some of its weights, which visit
        it in every step."""
        held = {(own.tensor, own.device) for own in self.slices}
        return tuple(
            unit.device != CPU
            and any((n, unit.device) not in held for op in unit.ops for n in op.weight_names())
            for unit in self.units
        )

    def held(self, device: str) -> list[tuple[TensorSpec, Slice]]:
        """The slices of a device, each with its tensor."""
        tensors = {tensor.name: tensor for tensor in self.tensors}
        return [(tensors[held.tensor], held) for held in self.slices if held.device == device]

    @functools.cached_property
    def node_bytes(self) -> dict[int, int]:
        """Weights that lie on memory nodes which slices name."""
        sizes, found = slice_bytes(self.tensors, self.slices, CPU), dict[int, int]()
        for held in self.slices:
            if held.node is not None:
                found[held.node] = found.get(held.node, 0) + sizes[held.tensor]
        return dict(sorted(found.items()))

    @functools.cached_property
    def cut(self) -> bool:
        """Whether units of one layer and kind, or of the head, lie on two devices."""
        return any(len(on) > 1 for on in self._devices(lambda unit: (unit.layer, unit.kind)))

    @functools.cached_property
    def places(self) -> tuple[frozenset[str], ...]:
        """The devices of the embedding, of every layer and of the head."""
        return self._devices(lambda unit: (unit.layer, unit.layer is None and unit.kind))

    def _devices(self, key: Callable[[PlacedUnit], object]) -> tuple[frozenset[str], ...]:
        groups = itertools.groupby(self.units, key=key)
        return tuple(frozenset(unit.device for unit in units) for _, units in groups)

    @property
    def units_cpu(self) -> int:
        """How many of the embedding, the layers and the head the CPU holds. A layer on two devices
        counts for neither."""
        return sum(devices == {CPU} for devices in self.places)

    @property
    def units_accelerator(self) -> int:
        return sum(len(devices) == 1 and CPU not in devices for devices in self.places)

    @property
    def units_cut(self) -> int:
        """How many layers have an attention or an mlp on two devices, and the head if it has."""
        kinds = itertools.groupby(self.units, key=lambda unit: (unit.layer, unit.kind))
        cut = {of[0] for of, units in kinds if len({unit.device for unit in units}) > 1}
        return len(cut)

    def _summary(self) -> tuple[str, dict[str, str]]:
        uses = self.memory.values()
        weights, kv = (sum(getattr(u, f"{of}_bytes") for u in uses) for of in ("weights", "kv"))
        beside = f", {self.units_accelerator} on the accelerator" * (self.units_accelerator > 0)
        return self.model.architecture, {
            "placement": f"{self.units_cpu} units on the CPU{beside}",
            "weights": f"{size_text(weights)} of weights",
            "KV cache": f"{self.kv.dtype} KV cache of up to {size_text(kv)}",
            "context": f"context {self.limits.context:,}",
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values; the prediction's fields stand at the top level."""
        fields = encode(self)
        if self.predictor is None:
            del fields["predictor"]
        prediction = fields.pop("prediction") or {**NO_PREDICTION, "alternatives": []}
        fields |= {"loading": self.loading, "loading_choice": fields.pop("loading_choice")}
        counts = {key: getattr(self, key) for key in _COUNTS}
        return {"format": FORMAT, "version": VERSION, **fields, **counts, **prediction}

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` is its inverse."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads and checks a plan. Raises PlanError naming the field, as in units[3].ops[1].out."""
        root = parse(text, "plan", PlanError)
        if root["format"].string() != FORMAT:
            root["format"].reject(f"expected {FORMAT!r}, found {root['format'].value!r}")
        version = root["version"].integer(0, 2**31)
        if version != VERSION:
            root["version"].reject(f"expected {VERSION}, found {version}; make the plan anew")
        names = ("model", "limits", "threads", "devices", "kv", "rope", "tensors", "slices")
        more = (
            "values", "units", "logits", "memory", "notices", "schedule", "loading",
            "loading_choice", "predictor",
        )  # fmt: skip
        root.only(["format", "version", *names, *more, *_COUNTS, *NO_PREDICTION])
        choice, predictor = root["loading_choice"], root.get("predictor")
        plan = cls(
            model=decode(ModelIdentity, root["model"]),
            limits=decode(Limits, root["limits"]),
            threads=root["threads"].integer(1, 4096),
            devices=tuple(decode(DeviceSpec, node) for node in root["devices"].items()),
            kv=decode(KvSpec, root["kv"]),
            rope=tuple(decode(RopeTable, node) for node in root["rope"].items()),
            tensors=tuple(decode(TensorSpec, node) for node in root["tensors"].items()),
            slices=tuple(decode(Slice, node) for node in root["slices"].items()),
            values=tuple(decode(Value, node) for node in root["values"].items()),
            units=tuple(decode_unit(node) for node in root["units"].items()),
            logits=root["logits"].string(),
            memory={k: decode(MemoryUse, root["memory"][k]) for k in root["memory"].names()},
            notices=tuple(node.string() for node in root.get("notices", []).items()),
            schedule=decode(Schedule, root["schedule"]),
            loading_choice=None if choice.null else decode(LoadingChoice, choice),
            predictor=None if predictor.null else decode(Predictor, predictor),
            prediction=decode_prediction(root),
        )
        _check(plan, root)
        return plan


_COUNTS = ("units_cpu", "units_accelerator", "units_cut")


def _check(plan: Plan, root: Reader) -> None:
    """References resolve, names are unique and limits are consistent."""
    check_limits(plan, root)
    check_kv(plan.kv, plan.limits.step_tokens, plan.limits.sequences, root["kv"])
    check_devices(plan.devices, root["devices"])
    check_schedule(plan, root)
    tensors = unique_names([tensor.name for tensor in plan.tensors], root["tensors"])
    unique_names([value.name for value in plan.values], root["values"])
    values = {value.name: value for value in plan.values}
    for key in _COUNTS:
        count = root[key].integer(0, 2**31)
        if count != getattr(plan, key):
            root[key].reject(f"is {count}, the units say {getattr(plan, key)}")
    if plan.logits not in values:
        root["logits"].reject(f"unknown value {plan.logits!r}")
    for unit in root["units"].items():
        for node in unit["ops"].items():
            check_op(node, tensors, values, len(plan.rope))
    check_attentions(plan.units, plan.kv.layers, root)
    alone = all(unit.device == CPU for unit in plan.units)
    check_predictor(plan.predictor, alone, root.get("predictor"))
    if plan.cut:
        check_cut(plan, root["schedule"])
    if plan.kv.window_blocks and plan.overflows:
        root["schedule"]["pages"][plan.accelerator or CPU].reject(
            "expected all pages of its KV entries, as kv.window_blocks is not 0"
        )
    visits = plan.schedule.prefill == "visit"
    placed = [
        (unit.device, visits and unit.device == CPU and unit.layer is not None, unit.ops)
        for unit in plan.units
    ]
    check_weights(plan.tensors, plan.slices, placed, root)
    if any(plan.lacking):
        check_lacking(plan, root)
    check_disk(plan, root)
    if root["loading"].choice(get_args(Loading)) != plan.loading:
        root["loading"].reject(f"is {root['loading'].value}, the slices say {plan.loading}")
