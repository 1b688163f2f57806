"""Where a chat's messages come from: a pipe, or a terminal that edits no lines."""

from __future__ import annotations

import sys
from typing import Protocol

from helm.commands.ending import Ending

PROMPT = "> "
QUOTES = '"""'


class Source(Protocol):
    """Gives messages and commands, one at a time. terminal: whether a person types them."""

    terminal: bool

    def read(self) -> str:
        """The next one, "" where a line was given up; EOFError at the end, KeyboardInterrupt for
        Ctrl-C while nothing is typed."""
        ...


def is_open(text: str) -> bool:
    """Whether a message that begins with three quotes goes on in the next line."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


class Lines:
    """Standard input, line by line."""

    def __init__(self, ending: Ending) -> None:
        self.terminal = sys.stdin.isatty()
        self._ending = ending

    def read(self) -> str:
        text = self._line()
        if not text:
            raise EOFError
        while is_open(text) and (more := self._line()):
            text += more
        return text.strip()

    def _line(self) -> str:
        if self.terminal:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        with self._ending.interruptible():
            return sys.stdin.readline()
