"""Messages typed at a terminal: lines are edited and remembered, what is pasted is one message.

Knows nothing of what is done with them. Writes to the terminal itself, so standard output may be
redirected.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output

from helm.base import own_folder
from helm.commands.chat_input import PROMPT, is_open
from helm.commands.ending import Ending

_MOST_KEPT = 1000  # messages
_MOST_CHARACTERS = 1 << 20  # of all of them


def screen() -> TextIO | None:
    """The terminal to write to; None where there is none, or one that moves no cursor."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return None
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty():
            return stream
    with contextlib.suppress(OSError):
        return open("/dev/tty", "w")
    return None


class Editor:
    """A prompt with history and bracketed paste; three quotes, and Alt-Enter, begin a new line."""

    terminal = True

    def __init__(self, ending: Ending, terminal: TextIO) -> None:
        self._ending = ending
        output = Vt100_Output.from_pty(terminal, term=os.environ.get("TERM"))
        output.enable_cpr = False  # nothing needs to know where the cursor is
        self._prompt: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            history=KeptHistory(own_folder.cache_folder() / "chat-history.json"),
            key_bindings=_bindings(),
            enable_suspend=True,
            reserve_space_for_menu=0,
            output=output,
        )

    def read(self) -> str:
        with self._ending.leaving(self._leave):
            return self._prompt.prompt(set_exception_handler=False).strip()

    def _leave(self) -> None:
        """Ends the prompt as the end of input does; called by a signal's handler."""
        application = self._prompt.app

        def end() -> None:
            if application.is_running and not application.is_done:
                application.exit(exception=EOFError())

        if application.loop is not None:
            application.loop.call_soon_threadsafe(end)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not in a search of the history

    @bindings.add("enter", filter=typing)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=typing)
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.app.exit(result="", style="class:aborting")
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    return bindings


class KeptHistory(History):
    """What was typed, in a file of this user's own; where that cannot be, of this run alone."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
        return reversed(self._read())

    def store_string(self, string: str) -> None:
        """Beside what other chats have added meanwhile."""
        kept, characters = [], 0
        for text in [string, *reversed(self._read())][:_MOST_KEPT]:
            characters += len(text)
            if characters > _MOST_CHARACTERS:
                break
            kept.append(text)
        with contextlib.suppress(OSError):
            own_folder.write(self._path, json.dumps(kept[::-1]))

    def _read(self) -> list[str]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(own_folder.read(self._path)[0])
            if isinstance(found, list):
                return [text for text in found if isinstance(text, str)]
        return []
