"""Assembling text: stop strings never show, chunks add up to the completion."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from helm.completion import Output, TextAssembler, Timings


@dataclass
class Letters:
    """A detokenizer whose tokens are code points; the last two letters stay back until flush."""

    lag: int = 0
    waiting: str = ""

    def push(self, token: int) -> str:
        self.waiting += chr(token)
        cut = max(0, len(self.waiting) - self.lag)
        piece, self.waiting = self.waiting[:cut], self.waiting[cut:]
        return piece

    def flush(self) -> str:
        piece, self.waiting = self.waiting, ""
        return piece


@dataclass
class Drawn:
    id: int
    finish: str = ""
    request: int = 0
    logprob: float = -0.5
    top: list[tuple[int, float]] = field(default_factory=list)


def assemble(text: str, stops: tuple[str, ...], lag: int) -> tuple[list[str], bool]:
    assembler = TextAssembler(Letters(lag), stops)  # type: ignore[arg-type]
    pieces = []
    for letter in text:
        pieces.append(assembler.push(ord(letter)))
        if assembler.stopped:
            return pieces, True
    pieces.append(assembler.flush())
    return pieces, assembler.stopped


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_stop_strings_against_searching_the_whole_text(lag: int) -> None:
    rng = random.Random(lag)
    for trial in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 20)))
        stops = tuple(
            "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))
            for _ in range(rng.randrange(0, 3))
        )
        # The text ends as soon as some stop string is complete, and is cut where it begins.
        ends = [n for n in range(len(text) + 1) if any(s in text[:n] for s in stops)]
        seen = text[: ends[0]] if ends else text
        cut = min((seen.find(s) for s in stops if s in seen), default=len(text))
        pieces, stopped = assemble(text, stops, lag)
        assert ("".join(pieces), stopped) == (text[:cut], bool(ends)), (trial, text, stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    pieces, _ = assemble("abxab", ("abc",), 0)
    assert pieces == ["", "", "abx", "", "", "ab"]


def output(stops: tuple[str, ...] = ()) -> Output:
    return Output(TextAssembler(Letters(), stops), prompt_tokens=3, seed=7)  # type: ignore[arg-type]


def test_the_end_token_is_reported_but_not_shown() -> None:
    result = output()
    assert [result.add(Drawn(ord("a"))), result.add(Drawn(ord("!"), "stop"))] == ["a", ""]
    completion = result.completion(Timings())
    assert (completion.text, completion.tokens) == ("a", [97, 33])
    assert (completion.finish_reason, completion.prompt_tokens, completion.seed) == ("stop", 3, 7)


def test_reaching_the_length_releases_what_was_held() -> None:
    result = output(("bc",))
    assert [result.add(Drawn(ord("a"))), result.add(Drawn(ord("b"), "length"))] == ["a", "b"]
    assert result.finish_reason == "length"


def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    result = output(("b",))
    assert [result.add(Drawn(ord("a"))), result.add(Drawn(ord("b"), "length"))] == ["a", ""]
    assert result.finish_reason == "stop"


def test_cancelling_releases_what_was_held() -> None:
    result = output(("ab",))
    assert result.add(Drawn(ord("a"))) == ""
    assert result.cancel() == "a"
    completion = result.completion(Timings())
    assert (completion.text, completion.finish_reason) == ("a", "cancelled")


def test_chunks_carry_every_token_once() -> None:
    result = output()
    result.add(Drawn(ord("a")))
    result.add(Drawn(ord("b")))
    first = result.chunk("ab")
    result.add(Drawn(ord("c"), "length"))
    last = result.chunk("c", result.completion(Timings()))
    assert (first.tokens, first.finish_reason) == ([97, 98], None)
    assert (last.tokens, last.finish_reason) == ([99], "length")
    assert last.completion is not None
    assert last.completion.text == "abc"


def test_rates_without_time_are_zero() -> None:
    assert Timings(decode_tokens=5, decode_s=0.0).decode_tokens_per_s == 0.0
    assert Timings(decode_tokens=5, decode_s=0.5, decode_bytes=100).decode_bytes_per_s == 200.0
