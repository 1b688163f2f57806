"""--print-completion: what shells need to complete the command's words, made by shtab."""

from __future__ import annotations

import argparse

from helm.commands.parser import Parser
from helm.errors import InvalidError

SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("FILE", "FILE|PRESET")


def add_print_completion(parser: Parser) -> None:
    """The option."""
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=SHELLS, metavar="SHELL",
        help=f"print completion for {', '.join(SHELLS)} and exit",
    )  # fmt: skip


class _PrintCompletion(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object
    ) -> None:
        try:
            import shtab
        except ImportError:
            raise InvalidError(
                "[completion] shtab is not installed; run pip install 'helm-llm[completion]'"
            ) from None
        _complete_paths(parser, shtab)
        print(shtab.complete(parser, str(shell)))
        parser.exit()


def _complete_paths(parser: argparse.ArgumentParser, shtab: object) -> None:
    """Options that take a file complete to files, MODEL to folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, shtab)
        elif action.metavar in _FILES or action.metavar == "MODEL":
            kind = "DIRECTORY" if action.metavar == "MODEL" else "FILE"
            setattr(action, "complete", getattr(shtab, kind))  # noqa: B010 - shtab's own
