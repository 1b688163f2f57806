"""What of a plan lies side by side on one device, in order. Searches, prints and draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from helm.compiler.candidate import BOTH, VisitUse
from helm.compiler.memory import DEVICE_ALIGNMENT
from helm.compiler.solve import Study
from helm.model.graph import Layer, Unit
from helm.plan.units import CPU, PlacedUnit
from helm.plan.weights import slice_bytes


@dataclass(frozen=True)
class Segment:
    """What lies side by side on one device: the embedding, layers or the head. first, last: of the
    list of these.
    weight_bytes: what the device holds for them; a tensor shared with an earlier segment of the
    same device counts there."""

    label: str
    device: str
    first: int
    last: int
    weight_bytes: int

    @property
    def units(self) -> int:
        return self.last - self.first + 1


def segments(study: Study) -> list[Segment]:
    """What the plan places, in order: embedding, layers by device, head."""
    if study.best.cut is not None:
        return list(_cut_segments(study))
    if study.best.visit is not None:
        return list(_visiting_segments(study, study.best.visit))
    graph, devices = study.search.model.graph, study.best.devices()
    places: list[Layer | Unit] = [graph.units[0], *graph.layers, graph.units[-1]]
    found: list[Segment] = []
    for label, first, last in unit_runs(devices):
        earlier = [part for j, part in enumerate(places[:first]) if devices[j] == devices[first]]
        these = [*earlier, *places[first : last + 1]]
        if devices[first] == "cpu":
            added = study.search.model.host_bytes(these) - study.search.model.host_bytes(earlier)
        else:
            held = study.search.model.weight_bytes(these, DEVICE_ALIGNMENT)
            added = held - study.search.model.weight_bytes(earlier, DEVICE_ALIGNMENT)
        found.append(Segment(label, devices[first], first, last, added))
    return found


def _cut_segments(study: Study) -> Iterator[Segment]:
    """What is cut has two, one for each device, and one more for what visits."""
    plan, devices = study.placed, study.best.devices()
    sizes = {name: slice_bytes(plan.tensors, plan.slices, name) for name in plan.memory}
    order = {layer: i + 1 for i, layer in enumerate(dict.fromkeys(
        unit.layer for unit in plan.units if unit.layer is not None))}  # fmt: skip
    counted = {name: set[str]() for name in sizes}
    for label, first, last in unit_runs(devices):
        places = range(first, last + 1)
        for device in sizes if devices[first] == BOTH else (devices[first],):
            units = [u for u in plan.units if u.device == device and _place(u, order) in places]
            names = {name for unit in units for op in unit.ops for name in op.weight_names()}
            cut = " (cut)" if devices[first] == BOTH else ""
            visiting = names - sizes[device].keys()
            for place, own, said in ((device, names - visiting, cut), (CPU, visiting, " (visit)")):
                held = sum(sizes[place][name] for name in own - counted[place])
                counted[place] |= own
                if own or said == cut:
                    yield Segment(label + said, place, first, last, held)


def _visiting_segments(study: Study, use: VisitUse) -> Iterator[Segment]:
    """Layers have one for what stays on the accelerator, if anything does, and one for what visits
    it."""
    model, best = study.search.model, study.best
    first, *_, last = model.graph.units
    label, count = layers_label(0, best.blocks - 1), best.blocks
    yield Segment("embedding", best.embedding, 0, 0, model.host_bytes([first]))
    head = model.weight_bytes([last], DEVICE_ALIGNMENT)
    stays = best.memory["accelerator"]["weights"] - head
    if stays > 0:
        yield Segment(label, "accelerator", 1, count, stays)
    yield Segment(f"{label} (visit)", "cpu", 1, count, use.host_bytes)
    yield Segment("head", best.head, count + 1, count + 1, head)


def _place(unit: PlacedUnit, order: Mapping[int, int]) -> int:
    """Of its layer, or of the embedding or the head, among them all."""
    if unit.layer is not None:
        return order[unit.layer]
    return 0 if unit.kind == "embedding" else len(order) + 1


def unit_runs(devices: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(label, first, last) of neighbours on one device. devices: of embedding, layers and head."""
    kinds = ["embedding", *(["layer"] * (len(devices) - 2)), "head"]
    first = 0
    for i in range(1, len(devices) + 1):
        if i < len(devices) and (kinds[i], devices[i]) == (kinds[first], devices[first]):
            continue
        yield _segment_label(kinds[first], first - 1, i - 2), first, i - 1
        first = i


def _segment_label(kind: str, first: int, last: int) -> str:
    return layers_label(first, last) if kind == "layer" else kind


def layers_label(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"
