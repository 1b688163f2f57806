"""What a command is asked: PROMPT, a file, standard input, or text and input joined."""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
from pathlib import Path

from helm.commands.lines import say
from helm.errors import InvalidError

PATIENCE_S = 10.0  # for the first byte of input that nobody insists on: an idle pipe has none
_TOLD_S = 2.0


def read_prompt(args: argparse.Namespace, place: str) -> str | None:
    """PROMPT or --file, what is piped in after a blank line; None where there is neither."""
    asked = _asked(args, place)
    data = sys.stdin.buffer.read() if args.insists_on_input else piped_input()
    if not args.insists_on_input and not data.strip():
        return asked
    given = _text(_line(data), "standard input", place)
    return given if asked is None else f"{given}\n\n{asked}"


def _asked(args: argparse.Namespace, place: str) -> str | None:
    file = getattr(args, "file", None)
    if file is None:
        return None if args.prompt is None else text_of(args.prompt, place)
    if args.prompt is not None or args.insists_on_input:
        raise InvalidError(
            f"[{place}] give the prompt either as an argument or with --file, not both"
        )
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise InvalidError(
            f"[{place}] cannot read {file}: {error.strerror}; --file needs a readable text file"
        ) from None
    return _text(_line(data), file, place)


def text_of(prompt: str, place: str) -> str:
    """PROMPT, which must be text and not empty."""
    return _text(os.fsencode(prompt), "PROMPT", place)


def piped_input(patience_s: float = PATIENCE_S) -> bytes:
    """All of a pipe, socket or file on standard input; empty for other streams, and for a pipe
    that stays silent: as a parent's that is open for no purpose."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # no stream of the system
        return b""
    if stat.S_ISREG(mode):
        return sys.stdin.buffer.read()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    told_s = min(_TOLD_S, patience_s)
    if not _ready(descriptor, told_s):
        say(
            f"note: waiting {patience_s:g} s for standard input to begin; end with < /dev/null "
            "where there is none, or give - as PROMPT to wait longer"
        )
        if not _ready(descriptor, patience_s - told_s):
            say("note: standard input gave nothing and is left aside")
            return b""
    return sys.stdin.buffer.read()


def _ready(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _line(data: bytes) -> bytes:
    """Without the newline that editors and echo put at the end."""
    return data.removesuffix(b"\n").removesuffix(b"\r")


def _text(data: bytes, source: str, place: str) -> str:
    """Refuses what no model can continue before one is loaded."""
    if not data:
        raise InvalidError(
            f"[{place}] the prompt is empty ({source}); give at least one character, or leave "
            "PROMPT out"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidError(
            f"[{place}] {source} is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
