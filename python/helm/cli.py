"""The helm-llm command: finds the subcommand, turns errors into exit statuses; no model logic."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from helm.errors import HelmError, OutOfMemoryError

# Each is a module of helm.commands with HELP, EPILOG, add_arguments(parser) and run(args) -> int.
COMMANDS = ("run", "chat", "plan", "profile", "bench", "doctor")

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

EPILOG = """examples:
  helm-llm run                                    the bundled model, offline
  helm-llm run Qwen/Qwen3-0.6B "Water boils at"   a model from the Hugging Face hub
  helm-llm chat ./my-model                        a local folder, many turns
  helm-llm profile                                measure this machine once
  helm-llm plan Qwen/Qwen3-8B --profile thesis-4060   how fast it would be on that machine
  helm-llm doctor                                 what this machine offers
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; its exit status: 0, 1 a failure, 2 bad input, 130 Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no failure
    try:
        args = build_parser().parse_args(argv)
        status = int(importlib.import_module(f"helm.commands.{args.command}").run(args))
        sys.stdout.flush()
        return status
    except HelmError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE if isinstance(error, OutOfMemoryError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python flushes stdout once more at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="helm-llm",
        description="Runs large language models at the speed of the machine's memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_VersionAction)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"helm.commands.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser


class _VersionAction(argparse.Action):
    """Looks the version up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show HELM's version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import helm

        print(f"helm-llm {helm.__version__}")
        parser.exit()
