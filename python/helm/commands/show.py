"""`helm-llm show`: what a model is and whether it fits; reads headers alone."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.familiar import as_options
from helm.commands import options
from helm.commands.common import binary_bytes, count_text
from helm.commands.parser import Parser
from helm.errors import CheckpointError, OutOfMemoryError

if TYPE_CHECKING:
    from helm.commands.model_facts import Described

HELP = "show what a model is, and whether it fits in memory"
EPILOG = """examples:
  helm-llm show ./my-model
  helm-llm show Qwen/Qwen3-0.6B          fetches config.json alone
  helm-llm show Qwen/Qwen3-0.6B --json
"""


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser)
    options.add_revision(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    name, folder, described = _find(args.model, args.revision)
    fits = _fits(described)
    if args.json:
        facts = dataclasses.asdict(described.facts)
        where = None if folder is None else str(folder)
        shown = {"name": name, "folder": where, **facts, "fits": fits}
        print(json.dumps(shown, indent=1, ensure_ascii=False))
    else:
        _show(name, folder, described, fits)
    return 0


def _find(model: str | None, revision: str | None) -> tuple[str, Path | None, Described]:
    """(name, folder, what it is); no folder for a model of the hub that is not downloaded."""
    from helm.commands.downloaded import downloaded_place
    from helm.commands.model_facts import describe, describe_remote, describe_remote_gguf
    from helm.model.download import ask_hub, hub_errors
    from helm.model.families import read_config
    from helm.model.hub import BUNDLED, is_gguf, resolve_config, resolve_model

    if model is None or model == BUNDLED or os.path.exists(os.path.expanduser(model)):
        folder = resolve_model(model, revision)
        return model or BUNDLED, folder, describe(folder)
    with contextlib.suppress(CheckpointError):  # parts of it are missing, or several are meant
        cached = downloaded_place(model, revision)
        if cached is not None:
            return model, cached, describe(cached)
    place = resolve_config(model, revision)
    if not isinstance(place, Path):
        return model, None, describe_remote_gguf(place)
    if is_gguf(place):  # in the cache, while the hub is out of reach
        return model, place, describe(place)
    config = read_config(place)
    with hub_errors(model, revision):
        info = ask_hub(model, revision)
    return model, None, describe_remote(model, info, config)


def _fits(described: Described) -> dict[str, Any]:
    """Into the memory that the CPU has free now: the largest context, and what it takes."""
    from helm.compiler.planning_problem import Problem
    from helm.compiler.solve import solve
    from helm.machine.resources import cpu_affinity, memory_available

    free = memory_available()
    fits: dict[str, Any] = {"free_bytes": free, "context": None, "needs_bytes": None}
    try:
        problem = Problem(
            described.config,
            described.tensors,
            max_sequences=1,
            threads=len(cpu_affinity()),
            memory_bytes=free,
        )
        plan = solve(problem).plan
    except OutOfMemoryError as error:
        return {**fits, "loading": None, "reason": as_options(str(error))}
    needs = plan.memory["cpu"].total_bytes
    context = plan.limits.context
    return {
        **fits,
        "context": context,
        "needs_bytes": needs,
        "loading": plan.loading,
        "reason": None,
    }


def _show(name: str, folder: Path | None, described: Described, fits: dict[str, Any]) -> None:
    from rich.table import Table

    from helm.commands.console import console

    facts = described.facts
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    template = {True: "yes", False: "no", None: "not known"}[facts.chat_template]
    for row in (
        ("model", name),
        ("family", facts.architecture),
        ("parameters", f"{count_text(facts.parameters)} in {facts.layers} layers"),
        ("weights", f"{facts.dtype}, {binary_bytes(facts.weights_bytes)}"),
        ("context", f"{facts.context:,} tokens at most"),
        ("vocabulary", f"{facts.vocab_size:,} tokens"),
        ("chat template", template),
        ("licence", facts.license or "not stated"),
        ("on disk", _on_disk(folder, described)),
        ("fits", _fits_text(fits)),
    ):
        table.add_row(*row)
    console(pipe_width=240).print(table)


def _on_disk(folder: Path | None, described: Described) -> str:
    facts = described.facts
    if folder is None:
        return f"not downloaded; {binary_bytes(facts.download_bytes or 0)} to download"
    return f"{binary_bytes(facts.disk_bytes or 0)} in {folder}"


def _fits_text(fits: dict[str, Any]) -> str:
    free = binary_bytes(fits["free_bytes"])
    if fits["context"] is None:
        return f"not in the {free} of memory free now; helm-llm plan says what lacks"
    return (
        f"with a context of {fits['context']:,} in {binary_bytes(fits['needs_bytes'])} of the "
        f"{free} free now; helm-llm plan says how fast"
    )
