"""Splits an answer's text into what the model thinks first and what it says; knows no tokens."""

from __future__ import annotations

from typing import Literal

from helm.text.thinking import marks_in

Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str]


class ReasoningSplitter:
    """Takes an answer's text in any pieces.

    opens_in_prompt: whether the prompt ends within the thought. A thought stands at the answer's
    beginning alone: tags that come later are content. White space around the thought belongs to
    neither part.
    """

    def __init__(
        self, opens_in_prompt: bool, open_tag: str = "<think>", close_tag: str = "</think>"
    ) -> None:
        self._open, self._close = open_tag, close_tag
        self._opened = opens_in_prompt
        self._shown = False  # whether any of the thought was
        self._state: Literal["begin", "thought", "gap", "content"] = "begin"
        self._held = ""

    @property
    def opened(self) -> bool:
        """Whether the answer begins within the thought."""
        return self._opened

    @property
    def tags(self) -> tuple[str, str]:
        """Texts that `feed` needs to see even where they are special tokens."""
        return self._open, self._close

    def feed(self, text: str, last: bool = False) -> list[Part]:
        """What `text` adds to each part; last: no more follows."""
        self._held += text
        out: list[Part] = []
        if self._state == "begin":
            self._begin(last)
        if self._state == "thought":
            self._thought(last, out)
        if self._state == "gap":
            self._held = self._held.lstrip()
            self._state = "content" if self._held else "gap"
        if self._state == "content" and self._held:
            out.append(("content", self._held))
            self._held = ""
        return out

    def _begin(self, last: bool) -> None:
        seen = self._held.lstrip()
        if seen.startswith(self._open):  # some models open it again after the prompt did
            self._held, self._state = seen[len(self._open) :], "thought"
        elif last or not self._open.startswith(seen):
            self._state = "thought" if self._opened else "content"

    def _thought(self, last: bool, out: list[Part]) -> None:
        thought, closed, rest = self._held.partition(self._close)
        if closed:
            self._held, self._state = rest, "gap"
            thought = thought.rstrip()
        else:
            end = len(thought) if last else _certain(thought, self._close)
            thought, self._held = thought[:end], thought[end:]
        if not self._shown:
            thought = thought.lstrip()
        if thought:
            self._shown = True
            out.append(("reasoning", thought))


def opens_thought(prompt: str, open_tag: str, close_tag: str, answer: str = "") -> bool:
    """Whether the answer to a rendered prompt begins within a thought. answer: the beginning that
    it continues, where the conversation's last message is continued."""
    if prompt.rstrip().endswith(open_tag):
        return True
    return answer.rfind(open_tag) > answer.rfind(close_tag)


def tags_of(template: str) -> tuple[str, str] | None:
    """What stands around a thought by a chat template's text; None: it has no thoughts."""
    found = marks_in(template)
    return None if found is None else (found[0], found[1])


def _certain(text: str, tag: str) -> int:
    """How much of the text is thought whatever follows: neither space nor half a tag."""
    end = len(text)
    for size in range(min(len(tag) - 1, end), 0, -1):
        if text.endswith(tag[:size]):
            end -= size
            break
    return len(text[:end].rstrip())
