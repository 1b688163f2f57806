"""How `run` and `chat` show an answer: on a terminal in whole words, with its thinking folded;
elsewhere as it is."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from helm.text.thinking import Answer, thinking_marks

if TYPE_CHECKING:
    from helm.session.llm import LLM
    from helm.text.prompts import Template

_DIM, _PLAIN, _ERASE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
# Control characters of a text are not the terminal's: shown as such, or it would obey them.
_HARMLESS = {c: "\ufffd" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t\r"}
_HARMLESS[ord("\r")] = ""


class AnswerView:
    """Writes one answer to standard output. answer: takes the thinking out; None: there is none."""

    def __init__(self, answer: Answer | None = None) -> None:
        self._wrapper = None
        if sys.stdout.isatty():
            from helm.commands.wrapping import Wrapper

            self._wrapper = Wrapper(lambda: shutil.get_terminal_size().columns)
        self._answer = answer
        self._thinking_since: float | None = None
        self._plain = os.environ.get("TERM", "dumb") == "dumb"

    def write(self, text: str, tokens: Sequence[int] = ()) -> None:
        """The next piece of the answer, made of `tokens`."""
        if self._wrapper is not None:
            if self._answer is not None:
                text = self._answer.push(text, tokens)
                self._fold(self._answer.thinking)
            text = self._wrapper.push(text.translate(_HARMLESS))
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the answer, and its line."""
        if self._wrapper is not None:
            self._fold(False)
            rest = self._answer.flush() if self._answer is not None else ""
            sys.stdout.write(self._wrapper.push(rest.translate(_HARMLESS)) + self._wrapper.flush())
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _fold(self, thinking: bool) -> None:
        """One line stands for the thinking, at first that it goes on, then how long it took."""
        if thinking and self._thinking_since is None:
            self._thinking_since = time.monotonic()
            sys.stdout.write("" if self._plain else f"{_DIM}thinking ...{_PLAIN}")
        elif not thinking and self._thinking_since is not None:
            line = f"thought for {time.monotonic() - self._thinking_since:.0f} s"
            self._thinking_since = None
            sys.stdout.write(line if self._plain else f"{_ERASE}{_DIM}{line}{_PLAIN}")
            sys.stdout.write("\n")


def view_of(
    llm: LLM, template: Template, messages: Sequence[Mapping[str, Any]], continues: bool = False
) -> AnswerView:
    """For the answer to a conversation, or for what its last message goes on with."""
    tokenizer = llm.tokenizer
    marks = None if tokenizer is None or not sys.stdout.isatty() else thinking_marks(tokenizer)
    if tokenizer is None or marks is None:
        return AnswerView()
    if continues:
        inside = marks.left_open_in(str(messages[-1]["content"]))
    else:
        inside = marks.opened_by(template.render(tokenizer, messages))
    return AnswerView(Answer(marks, inside))
