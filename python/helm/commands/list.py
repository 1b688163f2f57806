"""`helm-llm list`: the models on this machine; loads none."""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from helm.commands.common import binary_bytes, count_text
from helm.commands.lines import say
from helm.commands.parser import Parser

if TYPE_CHECKING:
    from helm.commands.downloaded import Stored

HELP = "list the models on this machine"
EPILOG = """examples:
  helm-llm list
  helm-llm list --json
"""
_NAMED = 5  # models that HELM cannot run, of this size at least
_NAMED_BYTES = 1 << 20
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from helm.commands.downloaded import stored_models

    models = stored_models()
    usable = [model for model in models if model.described is not None]
    others = [model for model in models if model.described is None]
    if args.json:
        listed = {"models": [_entry(m) for m in usable], "others": [_entry(m) for m in others]}
        print(json.dumps(listed, indent=1, ensure_ascii=False))
        return 0
    _show(usable)
    others = [model for model in others if model.disk_bytes >= _NAMED_BYTES]
    if others:
        names = [f"{model.name} ({binary_bytes(model.disk_bytes)})" for model in others[:_NAMED]]
        names += ["..."] if len(others) > _NAMED else []
        say(f"note: downloaded, but not whole or not for HELM: {', '.join(names)}")
    return 0


def _entry(model: Stored) -> dict[str, Any]:
    used = model.last_used
    when = None if used is None else datetime.fromtimestamp(used, UTC)
    entry = {
        "name": model.name,
        "folder": str(model.folder),
        "disk_bytes": model.disk_bytes,
        "last_used": None if when is None else when.isoformat(timespec="seconds"),
    }
    if model.described is None:
        return {**entry, "reason": model.reason}
    facts = model.described.facts
    return {
        **entry,
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "dtype": facts.dtype,
    }


def _show(models: list[Stored]) -> None:
    from rich.table import Table

    from helm.commands.console import console

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("parameters", "dtype", "size", "last used"):
        table.add_column(name, justify="left" if name == "dtype" else "right", no_wrap=True)
    for model in models:
        assert model.described is not None
        facts = model.described.facts
        size, used = binary_bytes(model.disk_bytes), _ago(model.last_used, time.time())
        table.add_row(model.name, count_text(facts.parameters), facts.dtype, size, used)
    console(pipe_width=240).print(table)


def _ago(then: float | None, now: float) -> str:
    """ "3 hours ago"; "-" where it is not known."""
    if then is None:
        return "-"
    for seconds, unit in _UNITS:
        count = int((now - then) // seconds)
        if count >= 1:
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
