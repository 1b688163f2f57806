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
        tokenize: Callable[[bytes], list[int]] | None,
        absent: Exception,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise InvalidError(f"{absent}; nor can its Python interface be used: {error}") from None
        self._library: Any = llguidance
        self._ends = ends
        self._forces = tokenize is not None
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
        return CalledGrammar(made, self._ends, self._forces)


class CalledGrammar:
    """The calls of helm._helm.Grammar."""

    def __init__(self, matcher: Any, ends: list[int], forces: bool) -> None:
        self._parts = (matcher, ends, forces)

    def start(self) -> Any:
        """A helm._helm.TokenConstraint."""
        from helm import _helm

        matcher, ends, forces = self._parts
        return _helm.CalledConstraint(_Called(matcher.deep_copy(), ends, forces))


class _Called:
    """One request's, as helm/constraint.h has it."""

    def __init__(self, matcher: Any, ends: list[int], forces: bool) -> None:
        self._matcher = matcher
        self._ends = ends
        self._forces = forces
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
        return list(self._matcher.compute_ff_tokens()) if self._forces else []

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
        tokenize: Callable[[bytes], list[int]] | None,
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

    def __call__(self, text: bytes) -> list[int]:
        tokens = [] if self._tokenize is None else self._tokenize(text)
        return tokens if b"".join(self._pieces[i] for i in tokens) == text else []
