"""Text from tokens, cut before the first stop string; knows nothing of engines or results."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from helm.text.detokenizer import Detokenizer


class TextAssembler:
    """Text from tokens, cut before the first stop string.

    Stop strings are searched in the text that is shown and in the one that has special tokens, too.
    Text that may turn out to begin a stop string is held back, so a stop string never shows.
    """

    def __init__(self, detokenizer: Detokenizer | None, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        # Special tokens since then, and how many characters to show stand before each; there may be
        # more than are held, when the detokenizer holds some.
        self._specials: list[tuple[int, str]] = []
        self.stopped = False

    def push(self, token: int, shown: bool = True) -> str:
        """The text that `token` releases; sets `stopped` when a stop string is complete.

        shown: False for the token that ends the text.
        """
        if self._detokenizer is None:
            return ""
        special = self._detokenizer.special(token) if self._stops else ""
        if special and not self.stopped:
            ahead = self._detokenizer.ahead()
            self._specials.append((len(self._held) + len(ahead), special))
            return self._release(ahead)
        return self._add(self._detokenizer.push(token)) if shown else ""

    def flush(self) -> str:
        """What is still held back, once no token follows."""
        text = self._add(self._detokenizer.flush()) if self._detokenizer else ""
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _add(self, piece: str) -> str:
        if self.stopped or not piece:
            return ""
        self._held += piece
        return self._release()

    def _release(self, ahead: str = "") -> str:
        """Gives out what cannot begin a stop string; ahead: what the detokenizer holds back."""
        shown = self._held + ahead
        text, before = _with_specials(shown, self._specials)
        # The one complete first, however the text was cut into pieces; of several the longest.
        found = []
        for stop in self._stops:
            if (at := text.find(stop)) >= 0:
                found.append((at + len(stop), before[at]))
            if self._specials and (at := shown.find(stop)) >= 0:
                found.append((bisect_right(before, at + len(stop) - 1), at))
        if found:
            self.stopped = True
            self._held, self._specials = "", []
            return shown[: min(found)[1]]
        start = len(text) - self._open_suffix(text)
        if self._specials:
            start = min(start, bisect_right(before, len(shown) - self._open_suffix(shown)) - 1)
        released = min(before[start], len(self._held))
        piece, self._held = self._held[:released], self._held[released:]
        # A special token stays while text before it, or its own, may matter.
        kept, passed = [], 0
        for place, special in self._specials:
            passed += len(special)
            if place > released or place + passed > start:
                kept.append((place - released, special))
        self._specials = kept
        return piece

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def _with_specials(shown: str, specials: list[tuple[int, str]]) -> tuple[str, Sequence[int]]:
    """The text with its special tokens, and how many shown characters stand before each place."""
    if not specials:
        return shown, range(len(shown) + 1)
    text, before, at = "", list[int](), 0
    for place, special in specials:
        if place > len(shown):
            break
        text += shown[at:place] + special
        before += [*range(at, place), *[place] * len(special)]
        at = place
    return text + shown[at:], [*before, *range(at, len(shown) + 1)]
