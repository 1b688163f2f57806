"""Where commands print tables: standard output, as wide as what reads it."""

from __future__ import annotations

import sys

from rich.console import Console

_LEAST_WIDTH = 80  # columns; a narrower terminal wraps lines, as tables would lose their contents


def console(pipe_width: int) -> Console:
    """On stdout; colours on a terminal only. A pipe has no width of its own: lines of up to
    `pipe_width` stay whole there."""
    out = _Console(markup=False, highlight=False)
    out.width = max(out.width, _LEAST_WIDTH) if sys.stdout.isatty() else pipe_width
    return out


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called while the error is handled: it goes to the caller, as that of other output."""
        raise
