"""Lines for people: wrapped at words on a terminal, whole elsewhere."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TextIO

from helm.base.familiar import as_options
from helm.commands.ending import drop_unwritable

_LEAST_WIDTH = 20


def say(text: str) -> None:
    """To the person at the terminal, kept apart from the generated text."""
    print(wrapped(text, sys.stderr), file=sys.stderr, flush=True)


def say_error(error: object) -> None:
    """What went wrong, in the command line's names; nothing where there is nowhere to say it."""
    try:
        say(f"error: {as_options(str(error))}")
    except OSError:
        drop_unwritable()


def wrapped(text: str, stream: TextIO) -> str:
    """`text` as `stream` shall show it: a terminal would break it within words."""
    width = _columns(stream)
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False, drop_whitespace=True,
        )
        for line in text.split("\n")
    )  # fmt: skip


def _columns(stream: TextIO) -> int | None:
    """Of a terminal; None for anything else."""
    try:
        if not stream.isatty():
            return None
        own = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # closed, or without a file
        return None
    given = os.environ.get("COLUMNS", "")
    own = int(given) if given.isdecimal() and int(given) else own
    return max(own, _LEAST_WIDTH) if own else None
