"""How options are declared and shown: help that fits a screen, all of it, errors of one line."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from helm.commands.ending import EXIT_BAD_INPUT
from helm.commands.lines import say_error

_OPTION_COLUMN = 24


class More(str):
    """The help of an option that --help-all shows and --help does not."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """One metavar per option; `everything`: with the options of --help-all."""

    def __init__(self, prog: str, everything: bool = False) -> None:
        super().__init__(prog, max_help_position=_OPTION_COLUMN)
        self._everything = everything

    def add_argument(self, action: argparse.Action) -> None:
        if self._everything or not isinstance(action.help, More):
            super().add_argument(action)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], *rest: Any, **named: Any
    ) -> None:
        actions = list(actions)
        if usage is None and sum(bool(action.option_strings) for action in actions) > 4:
            words = [f"[{a.metavar}]" for a in actions if not a.option_strings]
            usage = " ".join([self._prog, *words, "[options]"])
        super().add_usage(usage, actions, *rest, **named)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if not names or action.nargs == 0:
            return names or super()._format_action_invocation(action)
        value = action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
        return f"{names} {value}"


class Parser(argparse.ArgumentParser):
    """With the options of help, and `refuse` for those that another name has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": Formatter, "add_help": False})
        self.add_argument("-h", "--help", action="help", help="show this and exit")

    def format_help_all(self) -> str:
        """The help with every option."""
        self.formatter_class = lambda prog: Formatter(prog, everything=True)
        return self.format_help()

    def add_help_all(self) -> None:
        """--help-all."""
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every option and exit")

    def refuse(self, *options: str, remedy: str) -> None:
        """Options that are an error, which ends with the remedy."""
        self.add_argument(
            *options, action=_Refused, metavar="N", const=remedy, help=argparse.SUPPRESS
        )

    def closest(self, word: str) -> str:
        """What to add to the message about an unknown option."""
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(word.partition("=")[0], known, 1)
        return f", did you mean {close[0]}?" if word.startswith("--") and close else ""

    def error(self, message: str) -> NoReturn:
        """One line, as every other error."""
        say_error(f"{message}; see {self.prog} --help")
        sys.exit(EXIT_BAD_INPUT)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


class _Refused(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: object, value: str | Sequence[Any] | None,
        option: str | None = None,
    ) -> None:  # fmt: skip
        parser.error(f"{option} {value}: {self.const.format(value=value)}")
