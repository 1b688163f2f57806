"""Where an answer holds what a model thinks first, and the switch of that: by the model's chat
template and added tokens. Knows nothing of terminals."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from helm.text.tokenizer import Tokenizer

_BEGIN = re.compile(
    r"(<\|?|\[|◁)(begin_of_|start_)?(thinking|think|thought|reasoning)(\|?>|\]|▷)", re.I
)
_ENDS = {"begin_of_": "end_of_", "start_": "end_"}
_SWITCHES = ("enable_thinking", "thinking")  # variables of a template


@dataclass(frozen=True)
class Marks:
    """What stands before and after the thinking; special: their ids, of those that are special
    tokens, which a text does not show."""

    begin: str
    end: str
    special: dict[str, int]

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to this prompt begins within the thinking."""
        return prompt.rstrip().endswith(self.begin)

    def left_open_in(self, answer: str) -> bool:
        """Whether an answer ends within the thinking."""
        return answer.rfind(self.begin) > answer.rfind(self.end)


def thinking_marks(tokenizer: Tokenizer) -> Marks | None:
    """Those of a model; None for one that has none."""
    added = tokenizer.backend.get_added_tokens_decoder()
    known = "\n".join([*tokenizer.chat_templates.values(), *(t.content for t in added.values())])
    found = marks_in(known)
    if found is None:
        return None
    special = {token.content: i for i, token in added.items() if token.special}
    return Marks(*found, {mark: special[mark] for mark in found if mark in special})


def marks_in(known: str) -> tuple[str, str] | None:
    """The first pair of marks in a text, such as a chat template's; None without."""
    for found in _BEGIN.finditer(known):
        bracket, prefix, word, close = found.groups("")
        other = _ENDS.get(prefix.lower(), "/")
        end = f"{bracket}{other.upper() if prefix.isupper() else other}{word}{close}"
        if end in known:
            return found[0], end
    return None


def thinking_switch(tokenizer: Tokenizer) -> str | None:
    """The variable of the model's chat template that turns thinking on and off; None without."""
    from jinja2 import TemplateError, meta

    from helm.text.template_sandbox import Sandbox

    asked_for: set[str] = set()
    for source in tokenizer.chat_templates.values():
        with contextlib.suppress(TemplateError, RecursionError):
            asked_for |= meta.find_undeclared_variables(Sandbox().parse(source))
    return next((name for name in _SWITCHES if name in asked_for), None)


class Answer:
    """Takes the text of an answer as it comes and gives back what comes after the thinking."""

    def __init__(self, marks: Marks, inside: bool) -> None:
        self._marks = marks
        self._held = ""
        self._began = inside  # whether the thinking has
        self._ended = False  # whether there is none, or no more
        self._answering = False

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking."""
        return self._began and not self._ended

    def push(self, text: str, tokens: Sequence[int] = ()) -> str:
        """The part of `text`, made of `tokens`, that is answer."""
        for mark, token in self._marks.special.items():
            if token in tokens:
                text = mark + text
        self._held += text
        if not self._began and not self._ended:
            self._begin()
        if self.thinking:
            self._end()
        if not self._ended:
            return ""
        if not self._answering:  # what stands between the thinking and the answer is neither
            self._held = self._held.lstrip() if self._began else self._held
            self._answering = bool(self._held)
        text, self._held = self._held, ""
        return text

    def flush(self) -> str:
        """What was held back, once no text follows."""
        text, self._held = self._held, ""
        return "" if self.thinking else text

    def _begin(self) -> None:
        seen = self._held.lstrip()
        if seen.startswith(self._marks.begin):
            self._began, self._held = True, seen.removeprefix(self._marks.begin)
        elif not self._marks.begin.startswith(seen):
            self._ended = True

    def _end(self) -> None:
        thought, found, rest = self._held.partition(self._marks.end)
        if found:
            self._ended, self._held = True, rest
        else:
            self._held = thought[-len(self._marks.end) :]
