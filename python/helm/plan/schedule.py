"""Checks of what a plan says of steps: its limits and its schedule. Knows no weights.

A plan is a `helm.plan.schema.Plan`, which this cannot name.
"""

from __future__ import annotations

from typing import Any

from helm.base.jsonio import Reader
from helm.plan.units import CPU, check_device, check_units

_MOST_BUFFERS = 64  # the runtime's bound


def check_schedule(plan: Any, root: Reader) -> None:
    """What names a device names one of the plan's, and those that units lie on have their pages
    and their budget."""
    check_units(plan.units, plan.devices, root["units"])
    for held, node in zip(plan.slices, root["slices"].items(), strict=True):
        check_device(held.device, plan.devices, node["device"])
    schedule, pages = root["schedule"], root["schedule"]["pages"]
    schedule["decode_groups"].integer(1, 2)
    schedule["watermark"].number(0.0, 1.0)
    if "visit_buffers" in schedule.names():
        schedule["visit_buffers"].integer(2, _MOST_BUFFERS)
    visits = plan.schedule.prefill == "visit"
    if visits and len({unit.device for unit in plan.units}) < 2:
        schedule["prefill"].reject("nothing can visit, as the units lie on one device")
    for key, most in (("visit_tokens", plan.limits.step_tokens), ("visit_pages", 2**31)):
        schedule[key].integer(*((1, most) if visits else (0, 0)))
    for by_device in (root["memory"], pages):
        for device in by_device.names():
            check_device(device, plan.devices, by_device)
    for device in pages.names():
        pages[device].integer(0, 2**31)
    root["memory"][CPU]  # reports that it is missing
    used = {unit.device for unit in plan.units}
    if used <= {CPU}:
        return
    for device in sorted(used | {CPU}):
        for by_device in (root["memory"], pages):
            by_device[device]
    if sum(plan.schedule.pages.values()) != plan.kv.pages:
        pages.reject(f"the devices' pages do not add up to those of kv, {plan.kv.pages}")


def check_cut(plan: Any, schedule: Reader) -> None:
    """Where a layer or the head is cut, a step uses both devices from end to end."""
    if plan.schedule.decode_groups != 1:
        schedule["decode_groups"].reject("expected 1, as layers or the head are cut")
    if plan.schedule.prefill_overlap:
        schedule["prefill_overlap"].reject("expected false, as layers or the head are cut")
    if plan.overflows:
        schedule["pages"][plan.accelerator or CPU].reject(
            f"layers or the head are cut, so that all {plan.kv.blocks} pages of an entry must lie "
            "on its device"
        )


def check_lacking(plan: Any, root: Reader) -> None:
    """Weights visit units of layers in every step, whose KV pages all lie there."""
    for unit, node, lacks in zip(plan.units, root["units"].items(), plan.lacking, strict=True):
        if lacks and unit.layer is None:
            node.reject(
                "reads a tensor of which its device has no slice; only weights of layers visit it"
            )
    if plan.schedule.prefill == "visit":
        root["schedule"]["prefill"].reject("expected compute, as weights visit in every step")
    if plan.overflows:
        root["schedule"]["pages"][plan.accelerator or CPU].reject(
            "expected all pages of its KV entries, as weights visit in every step"
        )


def check_limits(plan: Any, root: Reader) -> None:
    limits = root["limits"]
    limits["context"].integer(1, 2**31)
    limits["step_tokens"].integer(1, 2**20)
    limits["step_outputs"].integer(1, plan.limits.step_tokens)
    limits["sequences"].integer(1, plan.limits.step_outputs)
