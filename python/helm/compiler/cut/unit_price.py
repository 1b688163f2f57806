"""How long a unit takes that two devices share, in a step. Knows no memory and no placement of
layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from helm.compiler.beside import decode_attention_beside, slowdown, slower_s
from helm.compiler.counts import CostedGraph, Step
from helm.compiler.cut.ways import HOMES, Ways, lane_of
from helm.compiler.setting import F32, Device, Setting
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    LINK,
    MEMORY,
    OVERLAP,
    TERMS,
    Seconds,
    unit_s,
)
from helm.model.graph import Attention, Unit

_HANDED = 3  # tasks that the CPU hands over before its own share: copy, run, copy


def lanes(setting: Setting) -> tuple[Device, Device]:
    """The CPU and the accelerator."""
    assert setting.accelerator is not None
    return setting.cpu, setting.accelerator


def crossing_s(setting: Setting, rows: int, width: Any, up: bool) -> Any:
    """Seconds of rows of a value on the link; nothing where it has none."""
    link = setting.link
    assert link is not None
    rate = link.to_accelerator_bytes_per_s if up else link.to_host_bytes_per_s
    return link.latency_s + F32 * rows * width / rate if rows else 0.0


@dataclass(frozen=True)
class SharedUnit:
    """times: [DEVICE_TERMS, ...] by role, with what handing over and computing both at once add.
    sent_s, returned_s: of what crosses to the guest, and back."""

    home: int
    times: Mapping[str, F64]
    sent_s: Any
    returned_s: Any

    @property
    def total(self) -> F64:
        """As its tasks are played."""
        own, guest = self.times["home"].sum(axis=0), self.times["guest"].sum(axis=0)
        ends = (self.times["begin"] + self.times["end"]).sum(axis=0)
        # Behind an accelerator's own share in its queue is what comes back.
        behind, before = (0.0, self.returned_s) if self.home == 0 else (self.returned_s, 0.0)
        ahead = 0.0 if self.home == 0 else self.sent_s
        both = np.maximum(ahead + own, self.sent_s + guest + before)
        return np.asarray(ends + both + behind)

    @property
    def terms(self) -> F64:
        """[TERMS, ...]"""
        total = self.total
        found = np.zeros((len(TERMS), *total.shape))
        for role, times in self.times.items():
            at = lane_of(role, self.home) * DEVICE_TERMS
            found[at : at + DEVICE_TERMS] += times
        found[LINK] += self.sent_s + self.returned_s
        found[OVERLAP] = total - found.sum(axis=0)
        return found


def share_unit(
    setting: Setting, model: CostedGraph, pieces: Mapping[str, Unit], home: int, step: Step,
    attention_s: tuple[F64, F64],
) -> SharedUnit:  # fmt: skip
    """pieces: by role. attention_s: of all heads on the CPU and on the accelerator, whose axes come
    before those of sizes in pieces."""
    link = setting.link
    assert link is not None
    times: dict[str, F64] = {}
    disturbed_s: list[Seconds] = [0.0, 0.0]  # by lane: what both at once may add
    for role, piece in pieces.items():
        lane = lane_of(role, home)
        times[role] = _piece_s(setting, model, piece, step, lane, attention_s[lane])
        if role in ("home", "guest") and setting.beside is not setting:
            attended_s = attention_s[lane] * _attention_beside(setting, piece, step, lane)
            beside = _piece_s(setting.beside, model, piece, step, lane, attended_s)
            disturbed_s[lane] = (beside - times[role]).sum(axis=0)
    guest = pieces["guest"].ops
    crossings = []
    for value, up in ((guest[0].uses()[0], home == 0), (guest[-1].uses()[-1], home == 1)):
        crossings.append(crossing_s(setting, model.rows(value, step), model.width(value), up))
    sent_s, returned_s = crossings
    shapes = (np.shape(returned_s), *(own.shape[1:] for own in times.values()))
    shape = np.broadcast_shapes(*shapes)
    times = {role: _wide(own, shape) for role, own in times.items()}
    cpu, other = (times["home"], times["guest"]) if home == 0 else (times["guest"], times["home"])
    stage_s = getattr(setting.accelerator, "stage_s", None) or 0.0
    other[FIXED] += stage_s
    cpu[FIXED] += link.latency_s * (_HANDED if home == 0 else 1)
    if home == 1:
        times["end"][FIXED] += stage_s
    # The CPU is slower beside copies, and each where it reads while the other computes.
    own_s, other_s, copying = cpu.sum(axis=0), other.sum(axis=0), np.zeros(shape)
    left_s = own_s  # of the CPU, beside the other
    if home == 0:
        copying = link.beside_copies(own_s, sent_s + returned_s) - own_s
        left_s = np.maximum(0.0, own_s + copying - sent_s)
    left_beside_s = left_s * slowdown(own_s, own_s + disturbed_s[0])
    slower, other_slower = slower_s(left_s, left_beside_s, other_s, other_s + disturbed_s[1])
    term = ATTENTION if pieces["guest"].kind == "attention" else MEMORY
    cpu[term] += copying + slower
    other[term] += other_slower
    return SharedUnit(home, times, sent_s, returned_s)


def _piece_s(
    setting: Setting, model: CostedGraph, piece: Unit, step: Step, lane: int, attention_s: F64
) -> F64:
    """[DEVICE_TERMS, ...]. attention_s: of all heads there."""
    own, heads = unit_s(model, piece, step, lanes(setting)[lane]), model.graph.kv.kv_heads
    for op in piece.ops:
        if isinstance(op, Attention):
            attended = np.multiply.outer(attention_s, op.kv_heads / heads)
            own = _wide(own, np.shape(attended))
            own[ATTENTION] += attended
    return own


def _attention_beside(setting: Setting, piece: Unit, step: Step, lane: int) -> float:
    """How many times as long attention of a piece takes beside the other; that of prompts is bound
    by arithmetic."""
    if step.tokens != step.sequences:
        return 1.0
    ops = [op for op in piece.ops if isinstance(op, Attention)]
    return max((decode_attention_beside(setting, op, lane) for op in ops), default=1.0)


def _wide(times: F64, shape: tuple[int, ...]) -> F64:
    """[DEVICE_TERMS, *shape], a copy."""
    own = times.reshape(DEVICE_TERMS, *(1,) * (len(shape) + 1 - times.ndim), *times.shape[1:])
    return np.array(np.broadcast_to(own, (DEVICE_TERMS, *shape)))


def unit_terms(
    setting: Setting, model: CostedGraph, ways: Ways, step: Step, attention_s: tuple[F64, F64]
) -> F64:
    """[homes, TERMS, steps, ways] of steps that are alike but for attention [steps]. Infinite where
    a unit has no such home."""
    whole, found = [], []
    for lane, device in enumerate(lanes(setting)):
        own = np.zeros((len(TERMS), len(attention_s[lane])))
        own[:DEVICE_TERMS] = unit_s(model, ways.unit, step, device)[:, None]
        own[ATTENTION] += attention_s[lane]
        whole.append(np.roll(own, lane * DEVICE_TERMS, axis=0))
    for home in range(len(HOMES)):
        inner = np.zeros((len(TERMS), 1, 1))
        inner[OVERLAP] = np.inf
        if ways.pieces[home]:
            shared = share_unit(setting, model, ways.pieces[home], home, step, attention_s).terms
            inner = shared if shared.ndim > 2 else shared[:, None]
        found.append(ways.padded(whole[1], inner, whole[0]))
    return np.stack(found)
