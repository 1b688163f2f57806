"""Progress while this machine is measured."""

from __future__ import annotations

import sys
from typing import Any

from helm.commands.lines import say


class MeasureProgress:
    """A bar on a terminal's stderr while the machine is measured, elsewhere a line."""

    def __init__(self) -> None:
        self.measured = False
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> MeasureProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, what: str, share: float) -> None:
        """Called before each visit of a quantity."""
        first, self.measured = not self.measured, True
        if not sys.stderr.isatty():
            if first:
                say("measuring this machine, once, ~10 s")
            return
        if share >= 1.0:
            self._stop()  # there may be another bar after it
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = ("measuring", BarColumn(20), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        self._bar.update(self._task, completed=share, description=what)
