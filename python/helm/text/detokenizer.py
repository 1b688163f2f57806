"""Text from tokens as they arrive; knows nothing of files or templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from helm.text.tokenizer_backend import raise_answer

if TYPE_CHECKING:
    import tokenizers


class Detokenizer:
    """Turns tokens into text as they arrive.

    `push(t0) + push(t1) + ... + flush()` equals decode(prompt + tokens)[len(decode(prompt)):]
    (a prompt that ends inside a character: the whole character is given).
    Text that later tokens could still change is held back: an unfinished UTF-8 character, and a
    run of byte-fallback tokens (its decoding is all or nothing) until the run ends.
    Each token is decoded at most `_window` times, whatever the length of the text.
    """

    # Tokens kept as context when the window slides: they absorb what decoders do at the start of
    # a text (dropped leading space), and cover more bytes than one UTF-8 character has.
    _kept = 6
    _window = 16

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt: Sequence[int] = (),
        skipped_ids: frozenset[int] = frozenset(),
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = backend
        self._skipped_ids = skipped_ids
        self._byte_ids = byte_ids
        visible: list[int] = []
        for token in reversed(prompt):
            if token not in skipped_ids:
                visible.append(token)
                if len(visible) >= self._window and token not in byte_ids:
                    break  # never inside a run of byte tokens
        self._tokens = visible[::-1]
        text = self._text()
        self._emitted = len(text) - text.endswith("\ufffd")  # characters of _text() given out
        self._held = 0  # tokens since everything decodable was given out

    def _text(self) -> str:
        try:  # a context manager would take a third of the time of a token
            return str(self._backend.decode(self._tokens, skip_special_tokens=False))
        except BaseException as error:
            raise_answer(error, "[tokenizer] these tokens cannot be decoded")

    def special(self, token: int) -> str:
        """The content of a special token, which `push` does not show; empty for others."""
        found = self._backend.id_to_token(token) if token in self._skipped_ids else None
        return found or ""

    def ahead(self) -> str:
        """What is held back, as it would be if no token followed."""
        return self._text()[self._emitted :]

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        if token in self._skipped_ids:
            return ""
        self._tokens.append(token)
        self._held += 1
        if token in self._byte_ids:
            return ""
        return self._give(last=False)

    def flush(self) -> str:
        """What was held back, once no token follows."""
        return self._give(last=True) if self._tokens else ""

    def _give(self, last: bool) -> str:
        text = self._text()
        end = len(text)
        if text.endswith("\ufffd") and not last:
            # An unfinished character spans fewer than _kept tokens; past that only the final
            # replacement character is open, what stands before it is truly invalid input.
            if self._held < self._kept:
                return ""
            end -= 1
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        self._held = 0
        if len(self._tokens) > self._window:
            del self._tokens[: -self._kept]
            self._emitted = len(self._text()) - (len(text) - end)
        return piece
