"""How long a unit takes that two devices share, for every way to cut it and either home. The
timeline plays its tasks. Knows no memory and no placement of layers.

The times of a unit begin and end at its home: the other device has nothing to do before and after,
so units in a row take the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from helm.compiler.counts import Step
from helm.compiler.cut_shares import ACCELERATOR
from helm.compiler.cut_tables import CutTable
from helm.compiler.program import Program, lowered
from helm.compiler.setting import F32, Device, Setting
from helm.compiler.timeline import Clock
from helm.compiler.times import (
    ATTENTION,
    DEVICE_TERMS,
    F64,
    FIXED,
    LINK,
    OVERLAP,
    TERMS,
    Seconds,
    unit_s,
)
from helm.model.graph import Add, Embedding, Select
from helm.plan.units import CPU, PlacedUnit

HOMES = (CPU, ACCELERATOR)
ROLES = ("begin", "home", "guest", "end")
_HANDED = 3  # tasks that the CPU hands over before its own share: copy, run, copy


@dataclass(frozen=True)
class UnitPrice:
    """Arrays [steps, ways] by home, see `HOMES`. total: seconds; terms: by `TERMS`, with what
    overlaps. parts: of the tasks by role. away: of what crosses, up and down."""

    total: tuple[F64, F64]
    terms: tuple[F64, F64]  # [TERMS, steps, ways]
    parts: tuple[Mapping[str, F64], Mapping[str, F64]]


@functools.cache
def unit_pattern(home: str) -> Program:
    """A unit that is cut, with the ends at its home."""
    guest = ACCELERATOR if home == CPU else CPU

    def part(name: str, device: str, *ops: Select | Add) -> PlacedUnit:
        return PlacedUnit(f"layer.0.mlp.{name}", "mlp", 0, device, ops)

    begin = part("begin", home, Select("x", "n"))
    own = part("home", home, Select("n", "x"))
    other = part("guest", guest, Select("n", "partial"))
    units = (
        PlacedUnit("embedding", "embedding", None, home, (Embedding("", "x"),)),
        begin,
        *((other, own) if home == CPU else (own, other)),
        part("end", home, Add("partial", "x")),
        PlacedUnit("head", "head", None, home, (Select("x", "x"),)),
    )
    return lowered(units, {"x": 1, "n": 1, "partial": 1}, "x", False, "none")


def price_unit(
    setting: Setting, table: CutTable, step: Step, attention_s: Mapping[str, F64]
) -> UnitPrice:
    """Of a unit within layers whose residual is at home, in a step as `step`. attention_s: of all
    of its attention [steps] on the CPU and on the accelerator, which alone differs among them.
    Where the unit is whole on the other device, the residual goes there and comes back."""
    link, device = setting.link, setting.accelerator
    assert link is not None
    assert device is not None
    devices: tuple[Device, Device] = setting.cpu, device
    steps = len(attention_s["cpu"])
    shape = (steps, len(table.marks))
    totals, terms, parts = [], [], []
    for home, name in enumerate(HOMES):
        total, own_terms = np.full(shape, np.inf), np.zeros((len(TERMS), *shape))
        roles: dict[str, F64] = {}
        if table.shares is not None and name in table.shares.homes:
            total, own_terms, roles = _shared(setting, table, step, attention_s, home, devices)
        for lane, way in ((1, 0), (0, -1)):
            whole = _whole_s(setting, table, step, attention_s, lane, devices)
            at = lane * DEVICE_TERMS
            own_terms[:, :, way] = 0.0
            own_terms[at : at + DEVICE_TERMS, :, way] = whole
            total[:, way] = whole.sum(axis=0)
            if lane != home:
                crossing = _there_and_back_s(setting, table, step, up=lane == 1)
                own_terms[LINK, :, way] = crossing
                total[:, way] += crossing
        totals.append(total)
        terms.append(own_terms)
        parts.append(roles)
    return UnitPrice((totals[0], totals[1]), (terms[0], terms[1]), (parts[0], parts[1]))


def _whole_s(
    setting: Setting, table: CutTable, step: Step, attention_s: Mapping[str, F64], lane: int,
    devices: tuple[Device, Device],
) -> F64:  # fmt: skip
    """[DEVICE_TERMS, steps] of the whole unit."""
    device = devices[lane]
    times = unit_s(setting.model, table.unit, step, device)
    whole = np.repeat(times[:, None], len(attention_s["cpu"]), axis=1)
    whole[ATTENTION] += attention_s[device.site]
    return whole


def _there_and_back_s(setting: Setting, table: CutTable, step: Step, *, up: bool) -> float:
    """The residual to the device that has the whole unit, and what it becomes back to the home."""
    into = table.unit.ops[-1].uses()[-1]
    if table.shares is not None and table.shares.last is not None:
        into = table.shares.last.out
    entered = table.unit.ops[0].uses()[0]
    return crossing_s(setting, entered, step, up) + crossing_s(setting, into, step, not up)


def crossing_s(
    setting: Setting, value: str, step: Step, up: bool, width: Seconds | None = None
) -> float:
    """Seconds of a value on the link; nothing where it has no rows."""
    link, rows = setting.link, setting.model.rows(value, step)
    assert link is not None
    if not rows:
        return 0.0
    rate = link.to_accelerator_bytes_per_s if up else link.to_host_bytes_per_s
    size = F32 * rows * (setting.width(value) if width is None else width)
    return link.latency_s + size / rate  # type: ignore[return-value]


def _shared(
    setting: Setting, table: CutTable, step: Step, attention_s: Mapping[str, F64], home: int,
    devices: tuple[Device, Device],
) -> tuple[F64, F64, dict[str, F64]]:  # fmt: skip
    """Total, terms and parts of one home, wherever each device has a share."""
    link, cpu = setting.link, home == 0
    assert link is not None
    assert table.shares is not None
    steps, ways = len(attention_s["cpu"]), len(table.marks)
    lanes = []
    for lane, device in enumerate(devices):
        own = table.lane_s(lane, device, step, lane == home, 0.0)
        times = np.repeat(own[:, None], steps, axis=1)
        times[ATTENTION] += attention_s[device.site][:, None] * table.share(lane)
        lanes.append(times)
    stage_s = getattr(devices[1], "stage_s", None) or 0.0
    lanes[1][FIXED] += stage_s
    lanes[0][FIXED] += link.latency_s * (_HANDED if cpu else 1)
    begin, end = table.begin_s(devices[home], step), table.end_s(devices[home], step)
    if not cpu:
        end[FIXED] += stage_s
    value = table.shares.first.input
    back = table.shares.last or table.shares.first
    width: Seconds | None = None
    if table.shares.last is None:  # the guest's rows
        width = table.share(1) * table.size
    sent = crossing_s(setting, value, step, up=cpu)
    returned = np.broadcast_to(crossing_s(setting, back.out, step, not cpu, width), (steps, ways))
    shares = [lane.sum(axis=0) for lane in lanes]
    slower = _slower(setting, shares, sent, returned, cpu)
    for each, more in zip(lanes, slower, strict=True):
        each[ATTENTION if table.attention else 0] += more
    home_s, guest_s = (lanes[home].sum(axis=0), lanes[1 - home].sum(axis=0))
    parts = {
        "begin": np.broadcast_to(begin.sum(), (steps, ways)),
        "home": home_s,
        "guest": guest_s,
        "end": np.broadcast_to(end.sum(), (steps, ways)),
    }
    total = np.asarray(_played(HOMES[home], parts, sent, returned), np.float64)
    terms = np.zeros((len(TERMS), steps, ways))
    for lane in (0, 1):
        terms[lane * DEVICE_TERMS : (lane + 1) * DEVICE_TERMS] += lanes[lane]
    at = home * DEVICE_TERMS
    terms[at : at + DEVICE_TERMS] += (begin + end)[:, None, None]
    terms[LINK] += sent + returned
    terms[OVERLAP] = total - terms.sum(axis=0)
    return np.broadcast_to(total, (steps, ways)).copy(), terms, parts


def _slower(
    setting: Setting, shares: list[F64], sent: float, returned: F64, cpu_home: bool
) -> tuple[F64, F64]:
    """What each device's share takes longer because the other computes too, or because copies run
    beside the CPU's."""
    link = setting.link
    assert link is not None
    own, other = shares
    copying = np.zeros_like(own)
    if cpu_home:
        copying = link.beside_copies(own, sent + returned) - own
        both = np.clip(own + copying - sent, 0.0, other)
    else:
        both = np.minimum(own, other)
    slower = both * (1.0 / link.rate_while_both_compute - 1.0)
    return copying + slower, slower


def _played(home: str, parts: Mapping[str, F64], sent: Seconds, returned: Seconds) -> Seconds:
    """When the last task at home has ended."""
    clock, ends = Clock(), dict[int, Seconds]()
    copies = [sent, returned]
    for number, task in enumerate(unit_pattern(home).tasks):
        if task.verb == "copy":
            if not copies:
                break  # of what follows
            seconds: Seconds = copies.pop(0)
        else:
            seconds = sum(parts[role] for role in roles_of(home, number))
        ends[number] = clock.play(task, seconds, ends)[1]
        last = ends[number]
    return last


@functools.cache
def roles_of(home: str, number: int) -> tuple[str, ...]:
    """The parts that a run of the pattern has."""
    program = unit_pattern(home)
    units = program.tasks[number].units
    assert units is not None
    names = [name.rsplit(".", 1)[-1] for name in program.names[units[0] : units[1] + 1]]
    return tuple(name for name in names if name in ROLES)
