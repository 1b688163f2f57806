"""Grammars by llguidance's Python interface, where its C interface is not one that HELM knows.

The engine then calls Python for every mask, which takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helm.errors import InvalidError

_SHOWN = 500  # characters of a reason


class CalledCompiler:
    """The calls of helm._helm.GrammarCompiler."""

    def __init__(
        self,
        pieces: list[bytes],
        special: list[int],
        ends: list[int],
        tokenize: Callable[[bytes], list[int]],
        absent: Exception,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise InvalidError(f"{absent}; nor can its Python interface be used: {error}") from None
        self._library: Any = llguidance
        self._ends = ends
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(pieces, special, ends[0], tokenize)),
            n_vocab=len(pieces),
            eos_token=ends,
        )

    def compile(self, kind: str, text: str, lexer_fuel: int, grammar_size: int) -> CalledGrammar:
        """A grammar; InvalidError with the reason."""
        matcher = self._library.LLMatcher
        make = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }[kind]
        limits = self._library.LLParserLimits(
            initial_lexer_fuel=lexer_fuel, max_grammar_size=grammar_size, verbose_errors=False
        )
        try:
            made = matcher(self._tokenizer, make(text), log_level=0, limits=limits)
        except Exception as error:
            raise InvalidError(f"[grammar] this {kind} cannot be used: {error}") from None
        if made.is_error():
            reason = made.get_error()[:_SHOWN]
            raise InvalidError(f"[grammar] this {kind} cannot be used: {reason}")
        return CalledGrammar(made, self._ends)


class CalledGrammar:
    """The calls of helm._helm.Grammar."""

    def __init__(self, matcher: Any, ends: list[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def start(self) -> Any:
        """A helm._helm.TokenConstraint."""
        from helm import _helm

        return _helm.CalledConstraint(_Called(self._matcher.deep_copy(), self._ends))


class _Called:
    """One request's, as helm/constraint.h has it."""

    def __init__(self, matcher: Any, ends: list[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._stopped = False

    def mask(self) -> bytes:
        mask = b"" if self._stopped else bytes(self._matcher.compute_bitmask())
        self._check()
        return mask

    def commit(self, token: int) -> None:
        end = token in self._ends
        if not (end and self._matcher.is_stopped()):
            self._matcher.consume_token(token)
        self._check()
        self._stopped = self._stopped or end

    def forced(self) -> list[int]:
        self._check()
        if self._stopped:
            return []
        if self._matcher.is_stopped():
            return self._ends[:1]
        return list(self._matcher.compute_ff_tokens())

    def is_stopped(self) -> bool:
        return self._stopped

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()[:_SHOWN]
            raise InvalidError(f"the text cannot go on: {reason}")


class _Tokens:
    """What llguidance.TokenizerWrapper asks for."""

    def __init__(
        self,
        pieces: list[bytes],
        special: list[int],
        end: int,
        tokenize: Callable[[bytes], list[int]],
    ) -> None:
        self.eos_token_id = end
        self.bos_token_id = None
        marked = set(special)
        self.tokens = [
            f"<{i}>".encode() if i in marked else piece for i, piece in enumerate(pieces)
        ]
        self.special_token_ids = special
        self._pieces = pieces
        self._tokenize = tokenize
        texts = {i: piece for i, piece in enumerate(pieces) if piece and i not in marked}
        self._ids = {piece: i for i, piece in reversed(texts.items())}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        try:
            tokens = self._tokenize(text)
            spelled = b"".join(self._pieces[i] if i >= 0 else b"" for i in tokens)
        except Exception:  # no answer: any split into tokens is right
            return self._greedy(text)
        return tokens if spelled == text else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        tokens: list[int] = []
        at = 0
        while at < len(text):
            fitting = (text[at : at + n] for n in range(self._longest, 0, -1))
            piece = next((piece for piece in fitting if piece in self._ids), None)
            if piece is None:
                break
            tokens.append(self._ids[piece])
            at += len(piece)
        return tokens
