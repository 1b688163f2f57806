"""The profile of this machine for commands, with progress while it is measured."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from helm.commands.lines import say

if TYPE_CHECKING:
    from helm.machine.profile import Profile


def measured_profile(device: str | None, notices: list[str]) -> Profile:
    """This machine's, with `device` as `find_accelerator` understands it. notices: takes what it
    says of the device, and of a profile that was measured now."""
    from helm.machine.devices import find_accelerator
    from helm.measure.profile_cache import machine_profile

    accelerator = find_accelerator(device, notices)
    with MeasureProgress() as progress:
        profile = machine_profile(accelerator, progress=progress.update)
    if progress.measured:  # said once, not whenever the profile comes from the cache
        notices += profile.notices
    return profile


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
