"""What a plan is and why, as rows and plain values; searches, prints and draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from helm.base.sizes import rate_text
from helm.compiler.budget import PURPOSES
from helm.compiler.candidate import BOTH, Candidate, term_name
from helm.compiler.segments import layers_label, segments, unit_runs
from helm.compiler.serving import Serving, serving
from helm.compiler.solve import Study
from helm.compiler.speculation import guess_prices

FORMAT = "helm-explanation"
VERSION = 1
_OVERFLOWS = {
    "cpu": "the CPU computes attention to the pages in RAM",
    "stream": "the pages in RAM are copied to the GPU in each step",
}
LABELS = {
    "all-accelerator": "all on the GPU",
    "fill-accelerator": "fill the GPU",
    "all-cpu": "all on the CPU",
    "layer-partition": "whole layers",
}
_MUCH = 1.05
_FREE = 0.005  # share of right guesses that rounds to 0 %
_LISTED = 3  # layouts shown of those that fit but were not chosen


@dataclass(frozen=True)
class Lane:
    """One device's row of the picture; blank where another device holds the unit."""

    device: str
    cells: tuple[str, ...]


def picture(study: Study, width: int) -> tuple[list[Lane], int]:
    """(a lane for each device, units per letter) in at most `width` letters: E the embedding, C
    and G layers on the CPU and the accelerator, H the head; what is cut is on both."""
    runs, devices = list(unit_runs(study.best.devices())), study.best.devices()
    per = 1
    while sum(-(-(last - first + 1) // per) for _, first, last in runs) > width:
        per += 1
    lanes: dict[str, list[str]] = {device: [] for device in study.plan.memory}
    for label, first, last in runs:
        for device, cells in lanes.items():
            letter = {"embedding": "E", "head": "H"}.get(label, "GC"[device == "cpu"])
            there = devices[first] in (device, BOTH)
            cells += [letter if there else " "] * -(-(last - first + 1) // per)
    return [Lane(device, tuple(cells)) for device, cells in lanes.items()], per


def memory_rows(study: Study) -> list[tuple[str, dict[str, int]]]:
    """(purpose, bytes by device) and at last total, limit and free. Of the weights also what lies
    on memory nodes that the plan names."""
    memory = study.plan.memory
    rows: list[tuple[str, dict[str, int]]] = [
        (purpose, {d: int(getattr(use, f"{purpose}_bytes")) for d, use in memory.items()})
        for purpose in PURPOSES
    ]
    for node, size in study.plan.node_bytes.items():
        rows.insert(1, (f"on node {node}", {d: size if d == "cpu" else 0 for d in memory}))
    total = {d: use.total_bytes + use.reserve_bytes for d, use in memory.items()}
    limit = {d: study.limit_bytes(d) for d in memory}
    free = {d: limit[d] - total[d] for d in memory}
    return [*rows, ("total", total), ("limit", limit), ("free", free)]


def loading_text(study: Study) -> str | None:
    """How the CPU's weights come into memory and why; None if it holds none."""
    plan, choice = study.plan, study.plan.loading_choice
    if choice is None or plan.memory["cpu"].weights_bytes == 0:
        return None
    return f"weights {plan.loading}: {choice.reason}"


def kv_lines(study: Study) -> list[str]:
    """Where the KV of the GPU's layers lies, if it has no room for all of it."""
    best, kv, work = study.best, study.best.kv, study.workload
    if kv is None:
        return []
    each = "" if best.sequences == 1 else " of each request"
    page, blocks = study.plan.kv.page_tokens, best.kv_blocks * best.sequences
    share = (
        f"{kv.far_blocks} of the {blocks} pages of a layer ({kv.far_blocks / blocks * 100:.0f} %)"
    )
    lines = [
        f"in each layer, VRAM has room for {best.accelerator_kv_blocks} of the {best.kv_blocks} "
        f"pages{each}; a page has {page:,} positions",
        f"beyond {kv.near_positions:,} positions{each}, the oldest pages move to RAM",
        f"at the full context of {work.context:,}, RAM holds {share}",
    ]
    for site in sorted(kv.sites, key=lambda s: s.site != best.overflow):
        name = _OVERFLOWS[site.site]
        times = (site.decode_s, site.full_context_decode_s)
        rates = [rate_text(best.sequences / seconds) for seconds in times]
        said = name if site.site == best.overflow else f"if {name} instead"
        lines.append(f"{said}: {rates[0]} tokens/s, {rates[1]} at the full context")
    return lines


def _kv(study: Study) -> dict[str, Any]:
    """The "kv" of `to_dict`."""
    best, kv = study.best, study.best.kv
    return {
        "page_tokens": study.plan.kv.page_tokens,
        "blocks": best.kv_blocks,
        "accelerator_blocks": best.accelerator_kv_blocks,
        "overflow": None
        if kv is None
        else {
            "site": best.overflow,
            "watermark": kv.watermark,
            "near_positions": kv.near_positions,
            "far_blocks": kv.far_blocks,
            "sites": [
                {
                    "site": price.site,
                    "decode_tokens_per_s": best.sequences / price.decode_s,
                    "full_context_decode_tokens_per_s": best.sequences
                    / price.full_context_decode_s,
                }
                for price in kv.sites
            ],
        },
    }


def guesses_text(study: Study, likely: float = 0.8) -> str:
    """From which share of right guesses on they pay, and what they bring at a likely one."""
    found = guess_prices(study)
    least = found.least
    if found.reason:
        return f"no tokens are guessed: {found.reason}"
    if least is None:
        return "guesses of tokens never pay: longer steps take too long"
    assert least.pays_from is not None
    text = "guesses of tokens pay whenever one is right"
    if least.pays_from >= _FREE:
        text = f"guesses of tokens pay from {least.pays_from * 100:.0f} % right on"
    guesses, gain = found.best(likely)
    if guesses:
        text += f"; with {likely * 100:.0f} % right, {guesses} a step bring {gain:.2f}x"
    return text


def serving_of(study: Study) -> Serving | None:
    """What requests reach that come and go, where that is the objective."""
    if study.workload.objective != "serve" or study.best.visit is not None:
        return None
    return serving(study.search, study.best, study.placed)


def serving_lines(serves: Serving) -> list[str]:
    """When the CPU attends for requests, and what the runtime does not do yet."""
    if all(rate.mode == "cpu" for rate in serves.rates):
        return ["all on the CPU: there is one memory, and no mode to choose"]
    if serves.cpu_from is None:
        return ["the CPU is never asked: near requests alone are as fast, others wait"]
    return [f"the CPU attends for far requests from {serves.cpu_from} at once on"]


@dataclass(frozen=True)
class TermRow:
    """One term of a predicted time. share: of the whole."""

    name: str
    seconds: float
    share: float


def term_rows(terms: Mapping[str, float], least: float = 0.005) -> list[TermRow]:
    """The terms of at least `least` of the whole, largest first; what overlap hides is negative."""
    whole = sum(terms.values())
    rows = [TermRow(term_name(key), value, value / whole) for key, value in terms.items()]
    kept = [row for row in rows if abs(row.share) >= least]
    return sorted(kept, key=lambda row: -row.seconds)


@dataclass(frozen=True)
class Rival:
    """A candidate beside the chosen one. fast: as it would run if it fitted."""

    label: str
    candidate: Candidate
    fast: Candidate
    verdict: str


def rivals(study: Study) -> Iterator[Rival]:
    """The chosen plan, the plans that need no search, the best others that fit, and the fastest
    layout that does not."""
    best, result = study.best, study.search.result
    ideal = {candidate.layout: candidate for candidate in study.search.unlimited.by_layout}
    yield Rival("chosen", best, best, _same_as(study))
    seen = {best.layout}
    for label, text in LABELS.items():
        candidate = result.labelled.get(label)
        if candidate is None or _equal(candidate, best):
            continue
        if label == "layer-partition" and candidate.layout in seen:
            continue  # it has been named by another label
        seen.add(candidate.layout)
        fast = candidate if candidate.fits else study.search.unlimited.labelled[label]
        yield Rival(text, candidate, fast, verdict(candidate, best))
    others = [c for c in result.ranked if c.layout not in seen][:_LISTED]
    lacking = [c for c in result.by_layout if not c.fits and c.layout not in seen]
    lacking = [c for c in lacking if ideal[c.layout].objective_s < best.objective_s]
    lacking.sort(key=lambda c: (c.missing.total, ideal[c.layout].objective_s))
    for candidate in [*others, *lacking[:1]]:
        fast = candidate if candidate.fits else ideal[candidate.layout]
        yield Rival(placement_text(candidate), candidate, fast, verdict(candidate, best))


def trade(study: Study) -> Candidate | None:
    """What the objective "total" would choose, if that ends the whole request much sooner: the
    chosen plan then buys its objective with the other phase."""
    other = study.search.towards("total").best
    if (
        study.workload.objective == "serve"
        or other is None
        or study.best.predicted.total_s <= _MUCH * other.predicted.total_s
    ):
        return None
    return other


def verdict(candidate: Candidate, best: Candidate) -> str:
    """Why `best` was chosen instead."""
    return candidate.reason_against(best)


def _same_as(study: Study) -> str:
    if study.best.visit is not None and study.best.visit.policy != "auto":
        return "as asked for"
    for label, text in LABELS.items():
        candidate = study.search.result.labelled.get(label)
        if candidate is not None and _equal(candidate, study.best):
            return f"fastest (= {text})"
    return "fastest that fits"


def _equal(one: Candidate, other: Candidate) -> bool:
    """The same placement with the same speed."""
    return one.layout == other.layout and one.fits and one.objective_s == other.objective_s


def placement_text(candidate: Candidate) -> str:
    """What the GPU holds: "GPU 19-35 + head", by the numbers of its layers."""
    if candidate.cut is not None:
        return _cut_text(candidate)
    if candidate.units_accelerator == 0:
        return "all on the CPU"
    if candidate.units_cpu == 0:
        return "all on the GPU"
    held = ["embedding"] if candidate.embedding == "accelerator" else []
    if candidate.accelerator_blocks:
        held.append(f"{candidate.cpu_blocks}-{candidate.blocks - 1}")
    if candidate.head == "accelerator":
        held.append("head")
    return f"GPU {' + '.join(held)}"


def _cut_text(candidate: Candidate) -> str:
    first, count = candidate.cpu_blocks, candidate.cut_blocks
    said = []
    if count:
        said.append(f"{layers_label(first, first + count - 1)} cut")
    if candidate.head == BOTH:
        said.append("head cut")
    if candidate.accelerator_blocks:
        said.append(f"GPU {first + count}-{candidate.blocks - 1}")
    if candidate.head == "accelerator":
        said.append("GPU head")
    return " + ".join(said)


def _cut(study: Study) -> dict[str, Any] | None:
    """The "cut" of `to_dict`."""
    best, use = study.best, study.best.cut
    if use is None:
        return None
    shares = dict.fromkeys(study.plan.memory, 0)
    for part in segments(study):  # what visits is of the accelerator's share
        if part.label.endswith(("(cut)", "(visit)")):
            visits = part.label.endswith("(visit)")
            shares["accelerator" if visits else part.device] += part.weight_bytes
    total = max(1, sum(shares.values()))
    return {
        "first": best.cpu_blocks,
        **dataclasses.asdict(use),
        "shares": {device: size / total for device, size in shares.items()},
    }


def to_dict(study: Study) -> dict[str, Any]:
    """The explanation as plain JSON values. Names are stable within one version:

    format, version: "helm-explanation", 1. model: name, architecture, weights_bytes, dtypes
    (of its matrices), kv_dtype. profile: name, estimated, digest, accelerator (its name or
    null). workload: prompt, output, batch, context, objective.
    units_cpu, units_accelerator, units_cut: how many of the embedding, the layers and the head each
    holds, and how many are cut. placement: [{label, device, first, last, weight_bytes}] of
    neighbouring units; what is cut has an entry for each device. cut: null, or first (layer),
    layers (how many), heads, elements, rows (on the CPU) and of_heads, of_elements, of_rows (in
    all), home, and shares: device -> of the bytes of what is cut. threads,
    schedule: see `helm.plan.schema.Schedule`. kv: page_tokens, blocks (of each sequence's full
    context), accelerator_blocks (of those, per layer there, that it has room for), overflow: null
    if it has room for all, else site ("stream" or "cpu"), watermark, near_positions (of each
    sequence, up to which none leave), far_blocks (of all sequences, in host memory at the full
    context) and sites, [{site, decode_tokens_per_s, full_context_decode_tokens_per_s}].
    predicted: ttft_s, decode_s (a token for every sequence, at the expected context),
    decode_tokens_per_s, full_context_decode_s, full_context_decode_tokens_per_s, total_s,
    tokens_per_s, decode_terms and prefill_terms (seconds by term, see
    `helm.compiler.times.TERMS`).
    speculation: step_s (guesses of each sequence -> seconds of a decode step, as far as they are
    priced), pays_from (the least share of right guesses from which on some number of them pays,
    null: none does), guesses (that number, 0: none), reason (why nothing is guessed, or "").
    serving: null but for the objective "serve", see `helm.compiler.serving.Serving`.
    drives: [{folder, bytes_per_s}] from which steps read weights.
    memory_nodes: node -> bytes of the CPU's weights, on slower ones. memory: device ->
    weights_bytes, kv_bytes, activations_bytes, workspace_bytes, staging_bytes,
    reserve_bytes. loading: weights ("copied", "mapped" or "compressed") and the fields of
    `helm.compiler.load_cost.LoadingChoice`, if steps read nothing from disk. limits: device ->
    bytes the plan may take. bottleneck, prefill_bottleneck: text. label: of the plain plan it
    equals, or "search".
    alternatives: [{label, units_cpu, units_accelerator, embedding, head, fits, ttft_s,
    decode_tokens_per_s, missing: device -> bytes, reason}].
    gains: [{resource, added, unit, decode_tokens_per_s, ttft_s, objective_s, gain}].
    notices: what the planner wants the user to know. timeline: [{title, seconds, tasks}] of
    `study.steps`, tasks as [{step, lane, verb, task, start_s, end_s, count}].
    """
    plan, prediction = study.plan, study.plan.prediction
    choice = plan.loading_choice  # None where weights are read from disk
    assert prediction is not None
    accelerator = study.profile.accelerator
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "name": study.problem.name,
            "architecture": plan.model.architecture,
            "weights_bytes": weights_bytes(study),
            "dtypes": matrix_dtypes(study),
            "kv_dtype": plan.kv.dtype,
        },
        "profile": {
            **dataclasses.asdict(prediction.profile),
            "accelerator": None if accelerator is None else accelerator.name,
        },
        "workload": dataclasses.asdict(prediction.workload),
        "units_cpu": plan.units_cpu,
        "units_accelerator": plan.units_accelerator,
        "units_cut": plan.units_cut,
        "cut": _cut(study),
        "placement": [dataclasses.asdict(segment) for segment in segments(study)],
        "threads": plan.threads,
        "schedule": dataclasses.asdict(plan.schedule),
        "kv": _kv(study),
        "predicted": dataclasses.asdict(prediction.predicted),
        "speculation": guess_prices(study).to_dict(),
        "serving": None if (serves := serving_of(study)) is None else dataclasses.asdict(serves),
        "drives": []
        if study.best.disk is None
        else [dataclasses.asdict(drive) for drive in study.best.disk.drives],
        "memory_nodes": {str(node): size for node, size in plan.node_bytes.items()},
        "memory": {device: dataclasses.asdict(use) for device, use in plan.memory.items()},
        "loading": {
            "weights": plan.loading,
            **({} if choice is None else dataclasses.asdict(choice)),
        },
        "limits": {device: study.limit_bytes(device) for device in plan.memory},
        "bottleneck": prediction.bottleneck,
        "prefill_bottleneck": study.best.prefill_bottleneck,
        "label": prediction.label,
        "alternatives": [dataclasses.asdict(other) for other in prediction.alternatives],
        "gains": [dataclasses.asdict(gain) for gain in study.gains],
        "notices": list(plan.notices),
        "timeline": [each.to_dict() for each in study.steps],
    }


def matrix_dtypes(study: Study) -> list[str]:
    """The formats of matrices, as they are on every device, in the order in which they first
    appear."""
    formats = study.search.model.formats
    return list(dict.fromkeys(formats[t.whole] for t in study.plan.tensors if len(t.shape) == 2))


def weights_bytes(study: Study) -> int:
    """All weights, each once, before any is compressed."""
    names = dict.fromkeys(tensor.whole for tensor in study.plan.tensors)
    return sum(study.search.model.tensor_bytes(name) for name in names)
