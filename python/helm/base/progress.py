"""Progress bars where somebody watches: on a terminal or in a notebook, once it takes a while."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from helm.base.arguments import shown
from helm.errors import InvalidError

Progress = Callable[[int, int], None]  # (done, total)

_PATIENCE_S = 0.3
_BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


@contextlib.contextmanager
def progress_bar(
    progress: Progress | bool | None, what: str, unit: str = "B", place: str = "load"
) -> Iterator[Progress | None]:
    """What is to be called with (done, total) within the block; None: nothing.

    progress: something to call instead of a bar; True or False: whether there is one; None: where
    somebody watches. unit: "B" for bytes. InvalidError, which begins with `place`, for others.
    """
    if progress is None:
        progress = watched()
    if not isinstance(progress, bool):
        if not callable(progress):
            raise InvalidError(
                f"[{place}] progress must be True, False or callable as progress(done, total), got "
                f"{shown(progress)}"
            )
        yield progress
    elif not progress:
        yield None
    else:
        bar = _Bar(what, _BYTES if unit == "B" else {"unit": unit})
        try:
            yield bar.update
        finally:
            bar.close()


def watched() -> bool:
    """Whether standard error is a terminal, or a notebook shows it."""
    if "ipykernel" in sys.modules:
        return True
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


class _Bar:
    """Of tqdm, which suits terminals and notebooks; one that cannot be shown stops nothing."""

    def __init__(self, what: str, unit: dict[str, Any]) -> None:
        self._options = {"desc": what, "leave": False, **unit}
        self._start = time.monotonic()
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        if self._bar is None and time.monotonic() - self._start < _PATIENCE_S:
            return
        with contextlib.suppress(OSError):
            if self._bar is None:
                from tqdm.auto import tqdm

                self._bar = tqdm(total=total, **self._options)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
