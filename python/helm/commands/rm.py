"""`helm-llm rm`: removes a downloaded model from the Hugging Face cache, and nothing else."""

from __future__ import annotations

import argparse
import sys

from helm.commands.common import binary_bytes
from helm.commands.lines import say
from helm.commands.parser import Parser
from helm.errors import InvalidError

HELP = "remove a downloaded model"
EPILOG = """examples:
  helm-llm rm Qwen/Qwen3-0.6B
  helm-llm rm Qwen/Qwen3-0.6B --yes
"""


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face id, as helm-llm list shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="remove it without asking")


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where the answer is no."""
    from helm.commands.downloaded import removal

    found = removal(args.model)
    size = binary_bytes(found.freed_bytes)
    copies = "" if found.revisions == 1 else f", {found.revisions} revisions"
    if not args.yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise InvalidError(
                f"[rm] {found.name} would free {size}; nobody is there to be asked, so --yes must "
                "say it"
            )
        say(f"{found.name}: frees {size} in {found.folder}{copies}")
        if not _agrees():
            say("[kept]")
            return 1
    found.execute()
    say(f"[removed {found.name}{copies}: {size} freed]")
    return 0


def _agrees() -> bool:
    print("Remove it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")
