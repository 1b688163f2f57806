"""`helm-llm doctor`: what this machine offers HELM and which choices follow; loads no model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from helm.commands.common import binary_bytes
from helm.commands.parser import Parser
from helm.errors import HelmError

HELP = "show CPU, instruction set, memory, huge pages, devices and versions"
EPILOG = """examples:
  helm-llm doctor
  helm-llm doctor --json > machine.json
  HELM_CPU_ISA=avx2 helm-llm doctor       with an older instruction set
  HELM_CPU_INT=avx2 helm-llm doctor       the same for weights in 8 and 4 bits
"""
PACKAGES = ("numpy", "huggingface-hub", "tokenizers", "jinja2", "rich", "prompt-toolkit")
HUGE_PAGES_TRIAL_BYTES = 64 << 20


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    report = gather()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def gather() -> dict[str, Any]:
    """Everything doctor knows, as plain JSON values. Sizes are bytes."""
    from helm import _helm
    from helm.machine.devices import device_report
    from helm.machine.memory_nodes import memory_nodes
    from helm.machine.resources import cpu_affinity, cpu_model, read_machine
    from helm.measure.threads import choose_here
    from helm.model.hub import bundled_model

    isa = _isa(_helm.isa_choice, _helm.isa_tiers)
    integer_isa = _isa(_helm.integer_isa_choice, _helm.integer_isa_tiers)
    try:
        threads = dataclasses.asdict(choose_here())
    except HelmError:  # such as HELM_CPU_ISA naming no tier
        threads = {"threads": None, "cpus": [], "reason": "no kernels to measure with"}
    return {
        "versions": {"helm-llm": _version("helm-llm"), **_versions()},
        "cpu": cpu_model(),
        "isa": isa,
        "integer_isa": integer_isa,
        "machine": dataclasses.asdict(read_machine()),
        "memory_nodes": [
            {**dataclasses.asdict(one), "refusal": _helm.memory_node_refusal(one.node)}
            for one in memory_nodes(cpu_affinity())
        ],
        "threads": threads,
        "huge_pages_trial": {
            "asked_bytes": HUGE_PAGES_TRIAL_BYTES,
            "granted_bytes": _helm.granted_huge_page_bytes(HUGE_PAGES_TRIAL_BYTES),
        },
        "devices": device_report(),
        "bundled_model": str(bundled_model()),
    }


def _isa(choice: Callable[[], Any], tiers: Callable[[], Any]) -> dict[str, Any]:
    """chosen: None where the environment names none that can run, and the reason says so."""
    try:
        chosen, reason = choice()
    except HelmError as error:
        chosen, reason = None, str(error)
    return {"chosen": chosen, "reason": reason, "tiers": list(tiers())}


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from helm.commands.console import console

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(report):
        table.add_row(name, text)
    console(pipe_width=240).print(table)


def _memory_limit(machine: dict[str, Any]) -> str:
    limit = machine["memory_limit_bytes"]
    return "no cgroup limit" if limit is None else f"cgroup limit {binary_bytes(limit)} included"


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine, nvidia = report["machine"], report["machine"]["nvidia"]
    quota = machine["cpu_quota"]
    cores = f"{machine['physical_cores']} physical, {machine['logical_cpus']} logical CPUs usable"
    limit = "no cgroup limit" if quota is None else f"cgroup limit of {quota:g} CPUs"
    rows = [
        ("HELM", f"{report['versions']['helm-llm']}"),
        ("CPU", report["cpu"]),
        ("cores", f"{cores}, {limit}"),
        ("threads", _threads(report["threads"])),
        *_kernels("kernels", report["isa"]),
        *_kernels("8 and 4 bits", report["integer_isa"]),
    ]
    gpu = f"NVIDIA driver {nvidia['version']}" if nvidia["found"] else f"none: {nvidia['reason']}"
    rows += [
        ("memory", f"{binary_bytes(machine['memory_bytes'])} free, {_memory_limit(machine)}"),
        *_memory_nodes(report["memory_nodes"]),
        ("huge pages", _huge_pages(machine["huge_pages"], report["huge_pages_trial"])),
        ("GPU", gpu),
        ("devices", "for --device, by default cuda if it is available, else cpu"),
        *((f"  {device['name']}", _device(device)) for device in report["devices"]),
        ("model", f"bundled: {report['bundled_model']}"),
    ]
    rows += [(name, text) for name, text in report["versions"].items() if name != "helm-llm"]
    return rows


def _memory_nodes(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where there are several."""
    rows = []
    for one in nodes if len(nodes) > 1 else ():
        sizes = [binary_bytes(one[name]) for name in ("free_bytes", "total_bytes")]
        text = "near" if one["near"] else "slower: only for weights that near memory does not hold"
        if one["refusal"] and not one["near"]:
            text = f"left out, the system says: {one['refusal']}"
        rows.append((f"  node {one['node']}", f"{sizes[0]} of {sizes[1]} free; {text}"))
    return rows


def _device(device: dict[str, Any]) -> str:
    text = f"{'yes' if device['available'] else 'no'}: {device['text']}"
    if "free_bytes" not in device:
        return text
    free, whole = binary_bytes(device["free_bytes"]), binary_bytes(device["memory_bytes"])
    return f"{text}, {free} of {whole} free"


def _threads(chosen: dict[str, Any]) -> str:
    if chosen["threads"] is None:
        return f"unknown ({chosen['reason']})"
    cpus = ", ".join(map(str, chosen["cpus"]))
    where = f"on CPUs {cpus}, one each" if cpus else "on whichever CPUs the system puts them"
    return f"{chosen['threads']}, {where} ({chosen['reason']})"


def _kernels(name: str, isa: dict[str, Any]) -> list[tuple[str, str]]:
    chosen = isa["reason"] if isa["chosen"] else f"none: {isa['reason']}"
    return [(name, chosen), *((f"  {tier['name']}", _tier(tier)) for tier in isa["tiers"])]


def _tier(tier: dict[str, Any]) -> str:
    return f"{'yes' if tier['available'] else 'no'}: {tier['reason']}"


def _huge_pages(mode: str, trial: dict[str, Any]) -> str:
    why = {
        "always": "the system uses them wherever it can",
        "madvise": "HELM asks for them for its weights",
        "never": "switched off; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        "absent": "the kernel does not offer transparent huge pages",
    }
    text = f"{mode}: {why[mode]}" if mode in why else mode
    asked, granted = trial["asked_bytes"], trial["granted_bytes"]
    given = "the system does not say how much of" if granted is None else binary_bytes(granted)
    return f"{text}; tried now, {given} of {binary_bytes(asked)} granted"
