"""Text that comes in pieces, broken between words at a terminal's width; code stays as it is."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

_TAB = 8
_FENCES = ("```", "~~~")


class Wrapper:
    """`push(a) + push(b) + ... + flush()` is the text with some spaces replaced by line breaks,
    and without an indent that leaves no room for a word.

    A word is held back until it is whole. Characters of double width, which are words of
    languages without spaces, stand alone. width: of the terminal, asked for at every word.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._gap = ""  # white space before the word
        self._word = ""
        self._line = ""  # all of the text's own line
        self._fence = ""  # what the code block that the text is in began with

    @property
    def column(self) -> int:
        """Where the cursor is, 0 at the start of a line."""
        return self._column

    def push(self, text: str) -> str:
        """What of the text so far can be shown."""
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """The last word."""
        return self._place()

    def _take(self, character: str) -> str:
        if character == "\n":
            shown = self._place() + "\n"
            self._fence = self._next_fence()
            self._gap = self._line = ""
            self._column = 0
            return shown
        self._line += character
        if self._fence:
            self._column += cell_len(character)
            return character
        if character in " \t":
            shown = self._place()
            self._gap += character
            return shown
        if cell_len(character) > 1:
            shown, self._word = self._place(), character
            return shown + self._place()
        self._word += character
        return self._place() if cell_len(self._word) >= self._width() else ""

    def _place(self) -> str:
        if not self._word:
            return ""
        word, gap = self._word, self._gap
        self._word = self._gap = ""
        column = self._column
        for character in gap:
            column += _TAB - column % _TAB if character == "\t" else 1
        if (gap or self._column) and column + cell_len(word) > self._width():
            broken = "\n" if self._column else ""  # an indent that leaves no room is left out
            self._column = cell_len(word)
            return broken + word
        self._column = column + cell_len(word)
        return gap + word

    def _next_fence(self) -> str:
        line = self._line.strip()
        if self._fence:
            closes = line.startswith(self._fence) and set(line) == {self._fence[0]}
            return "" if closes else self._fence
        fence = line[:3]
        return fence if fence in _FENCES and fence[0] not in line.lstrip(fence[0]) else ""
