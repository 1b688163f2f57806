"""The helm-llm command: finds the subcommand, turns errors into exit statuses; no model logic."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence

from helm.base.familiar import option
from helm.base.import_name import clash
from helm.commands.ending import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, drop_unwritable
from helm.commands.lines import say_error
from helm.commands.options import settle
from helm.commands.parser import Parser
from helm.commands.shell_completion import add_print_completion
from helm.errors import HelmError, OutOfMemoryError

# Each is a module of helm.commands with HELP, EPILOG, add_arguments(parser) and run(args) -> int.
COMMANDS = (
    "run",
    "chat",
    "serve",
    "plan",
    "profile",
    "bench",
    "doctor",
    "list",
    "show",
    "rm",
    "quantize",
)

_LONG = re.compile(r"-{1,2}[a-z][a-z_-]+")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

EPILOG = """examples:
  helm-llm run                                  the bundled model, offline
  helm-llm run Qwen/Qwen3-0.6B "Why is it?"     a model of the Hugging Face hub
  cat f | helm-llm run ./my-model "Summarise."  with what is piped in
  helm-llm chat ./my-model                      a local folder, many turns
  helm-llm plan Qwen/Qwen3-8B                   where it would run, how fast
  helm-llm help run                             the options of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; its exit status: 0, 1 a failure, 2 bad input, 130 Ctrl-C."""
    _mend_streams()
    try:
        try:
            args = parse(argv)
            return int(importlib.import_module(f"helm.commands.{args.command}").run(args))
        finally:
            sys.stdout.flush()
    except HelmError as error:
        say_error(error)
        return EXIT_FAILURE if isinstance(error, OutOfMemoryError) else EXIT_BAD_INPUT
    except (ImportError, AttributeError):
        problem = clash()
        if problem is None:
            raise
        say_error(problem)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        drop_unwritable()
        return 0
    except OSError as error:
        say_error(_os_error(error))
        return EXIT_FAILURE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line; ends the process with one line where they are wrong."""
    parser = build_parser()
    args, rest = parser.parse_known_args(_own_names(sys.argv[1:] if argv is None else argv))
    if args.command == "help":
        parser.parse_args([*([] if args.topic is None else [args.topic]), "--help"])
    if rest and getattr(args, "prompt", "") is None:
        # argparse looks for MODEL and PROMPT in the same place only, between two options.
        late = Parser()
        late.add_argument("prompt", nargs="?")
        args, rest = late.parse_known_args(rest, args)
    if rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}{args.parser.closest(rest[0])}")
    settle(args)
    return args


def _own_names(argv: Sequence[str]) -> list[str]:
    """The arguments with HELM's options in place of other engines'."""
    ours = list(argv)
    for index, argument in enumerate(ours[: ours.index("--") if "--" in ours else None]):
        name, equals, value = argument.partition("=")
        if _LONG.fullmatch(name):
            ours[index] = f"{option(name) or name}{equals}{value}"
    return ours


def build_parser() -> Parser:
    """The parser of all subcommands; that of the one that was chosen is `parser` of the result."""
    parser = Parser(
        prog="helm-llm",
        description="Runs large language models at the speed of the machine's memory.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action=_VersionAction)
    add_print_completion(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"helm.commands.{name}")
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP, epilog=module.EPILOG
        )
        command.set_defaults(parser=command)
        module.add_arguments(command)
        command.add_help_all()
    about = commands.add_parser("help", help="show the options of a command")
    about.set_defaults(parser=about)
    about.add_argument("topic", nargs="?", metavar="COMMAND", choices=COMMANDS)
    return parser


def _mend_streams() -> None:
    """Streams that were closed take and give nothing; no byte or character of others is a
    failure by itself."""
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "replace"),  # for a terminal that lacks a character
        ("stderr", "w", "replace"),
    ):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for good
            setattr(sys, name, stream)
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors=errors)


def _os_error(error: OSError) -> str:
    """What the system refused, and whether it was our output."""
    refused = drop_unwritable()
    if error.filename is None and error.errno in _NO_ROOM:
        refused = error  # of a stream without a buffer, which holds nothing; files have names
    if refused is not None:
        return (
            f"[output] cannot write to standard output or standard error: {refused.strerror}; make "
            "room, or send it elsewhere"
        )
    what = error.strerror or str(error) or type(error).__name__
    where = "" if error.filename is None else f"{error.filename}: "
    return (
        f"[system] the system refused what HELM needs: {where}{what}; allow that and run it again"
    )


class _VersionAction(argparse.Action):
    """Looks the version up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show HELM's version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import helm

        print(f"helm-llm {helm.__version__}")
        parser.exit()
