"""What a plan says of the time that steps take, by which a mode is chosen for each; and its checks.
Prices nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from helm.base.jsonio import Reader

_MOST_ROWS, _MOST_WINDOWS = 64, 16  # the runtime's bounds
_MOST_S = 1e30


@dataclass(frozen=True)
class AttentionTimes:
    """Of all layers with this window, 0: all positions are seen. layers: that lie on the
    accelerator. For each position that a decoding row sees, cpu_s: in the CPU's layers, near_s: in
    the accelerator's, there, far_s: in the accelerator's, by the CPU; near_beside_s, far_beside_s:
    the same while both devices attend. cpu_pair_s, pair_s: for a query and a key of a prompt's
    chunk of so many rows, in the layers of either device."""

    window: int
    layers: int
    cpu_s: float
    near_s: float
    far_s: float
    near_beside_s: float
    far_beside_s: float
    cpu_pair_s: tuple[float, ...]
    pair_s: tuple[float, ...]


@dataclass(frozen=True)
class Predictor:
    """Seconds. rows: counts of rows, from 1. cpu_s, accelerator_s: all but attention and the head
    of a step of so many rows, by device, crossings with the CPU. accelerator_beside_s: its own
    while the CPU attends. head_s: of so many rows of logits. step_s: of any step. prompt_row_s: of
    attention, for each row of a prompt. block_to_host_s, block_to_accelerator_s: of a block of KV
    that moves.

    Of a layer in a step for whose far rows the CPU attends, parts_s: as it runs in parts;
    near_part_s: as near attention is one of them; ask_s, ask_row_s: until the CPU can attend, and
    for each far row; answer_s, answer_row_s: until its results are there, likewise.
    """

    rows: tuple[int, ...]
    cpu_s: tuple[float, ...]
    accelerator_s: tuple[float, ...]
    accelerator_beside_s: tuple[float, ...]
    head_s: tuple[float, ...]
    attention: tuple[AttentionTimes, ...]
    step_s: float
    prompt_row_s: float
    parts_s: float
    near_part_s: float
    ask_s: float
    ask_row_s: float
    answer_s: float
    answer_row_s: float
    block_to_host_s: float
    block_to_accelerator_s: float


def check_predictor(predictor: Predictor | None, alone: bool, node: Reader) -> None:
    """Tables have an entry for each count of rows, and no time is negative. alone: all units lie on
    the CPU."""
    if predictor is None:
        return
    if alone:
        node.reject("expected null, as all units lie on the CPU")
    rows, at = predictor.rows, node["rows"]
    if not 1 <= len(rows) <= _MOST_ROWS:
        at.reject(f"expected 1 to {_MOST_ROWS} counts of rows, found {len(rows)}")
    for before, item in zip((0, *rows), at.items(), strict=False):
        count = item.integer(1, 2**20)
        if count <= before or (before == 0 and count != 1):
            item.reject(f"expected counts that rise from 1, found {count}")
    kinds = node["attention"].items()
    if not 1 <= len(kinds) <= _MOST_WINDOWS:
        node["attention"].reject(f"expected 1 to {_MOST_WINDOWS} kinds, found {len(kinds)}")
    windows: set[int] = set()
    for kind in kinds:
        window = kind["window"].integer(0, 2**31)
        kind["layers"].integer(0, 2**20)
        if window in windows:
            kind["window"].reject("is listed twice")
        windows.add(window)
    records: list[tuple[Predictor | AttentionTimes, Reader]] = [(predictor, node)]
    for record, child in [*records, *zip(predictor.attention, kinds, strict=True)]:
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not field.name.endswith("_s"):
                continue
            if isinstance(value, tuple):
                if len(value) != len(rows):
                    child[field.name].reject(
                        f"expected {len(rows)} entries, as rows has, found {len(value)}"
                    )
                for item in child[field.name].items():
                    item.number(0.0, _MOST_S)
            else:
                child[field.name].number(0.0, _MOST_S)
    beside = zip(predictor.accelerator_s, node["accelerator_beside_s"].items(), strict=True)
    pairs = [("accelerator_s", seconds, child) for seconds, child in beside]
    for times, child in zip(predictor.attention, kinds, strict=True):
        pairs.append(("near_s", times.near_s, child["near_beside_s"]))
        pairs.append(("far_s", times.far_s, child["far_beside_s"]))
    for name, seconds, child in pairs:
        if child.number(0.0, _MOST_S) < seconds:
            child.reject(f"expected no less than {name}")
