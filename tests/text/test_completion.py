"""Assembling text: stop strings never show, chunks add up to the completion."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from helm.text.completion import Output, Timings
from helm.text.stop_strings import TextAssembler
from helm.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, sentencepiece

SPECIAL = 0x10000  # tokens from here on are special, and look like "<a>"


@dataclass
class Letters:
    """A detokenizer whose tokens are code points; the last `lag` letters stay back until flush."""

    lag: int = 0
    waiting: str = ""

    def special(self, token: int) -> str:
        return f"<{chr(token - SPECIAL)}>" if token >= SPECIAL else ""

    def ahead(self) -> str:
        return self.waiting

    def push(self, token: int) -> str:
        if token >= SPECIAL:
            return ""
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


def assemble(text: str | list[int], stops: tuple[str, ...], lag: int) -> tuple[list[str], bool]:
    assembler = TextAssembler(Letters(lag), stops)  # type: ignore[arg-type]
    pieces = []
    for token in [ord(letter) for letter in text] if isinstance(text, str) else text:
        pieces.append(assembler.push(token))
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


def cut_at_first_stop(tokens: list[int], stops: tuple[str, ...]) -> tuple[str, bool]:
    """The oracle: character by character, in the text with special tokens and in the shown one."""
    text, shown = "", ""
    before = [0]  # shown characters before each place of the text
    for token in tokens:
        for letter in Letters().special(token) or chr(token):
            text += letter
            shown += "" if token >= SPECIAL else letter
            before.append(len(shown))
            ends = [before[-1 - len(stop)] for stop in stops if text.endswith(stop)]
            if token < SPECIAL:
                ends += [len(shown) - len(stop) for stop in stops if shown.endswith(stop)]
            if ends:
                return shown[: min(ends)], True
    return shown, False


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_stop_strings_with_special_tokens_against_searching_letter_by_letter(lag: int) -> None:
    rng = random.Random(lag)
    stopped = 0
    for trial in range(4000):
        tokens = [
            ord(rng.choice("ab")) + (SPECIAL if rng.random() < 0.3 else 0)
            for _ in range(rng.randrange(1, 16))
        ]
        text = "".join(Letters().special(token) or chr(token) for token in tokens)
        begin = rng.randrange(len(text))
        within = text[begin : begin + rng.randrange(1, 8)]
        stops = (within, "".join(rng.choice("ab<>") for _ in range(rng.randrange(1, 6))))
        stops = stops[: rng.randrange(3)]
        pieces, ended = assemble(tokens, stops, lag)
        assert ("".join(pieces), ended) == cut_at_first_stop(tokens, stops), (trial, text, stops)
        stopped += ended
    assert stopped > 1000


@pytest.mark.parametrize(
    ("stop", "cut"),
    [
        ("<|end|>", "the fox. a"), ("a<|end|>", "the fox. "), ("<|end|>b", "the fox. a"),
        (" a<|end|>b", "the fox."), ("|en", "the fox. a"), ("ab", "the fox. "), ("b", "the fox. a"),
        ("a b", "the fox. ab"),
    ],
)  # fmt: skip
def test_a_stop_string_may_have_a_special_token(stop: str, cut: str) -> None:
    tokenizer = Tokenizer(byte_level())
    tokens = tokenizer.encode("the fox. a<|end|>b")
    assembler = TextAssembler(tokenizer.detokenizer(), (stop,))
    pieces = [assembler.push(token) for token in tokens if not assembler.stopped]
    assert "".join([*pieces, assembler.flush()]) == cut
    assert assembler.stopped == (cut != "the fox. ab")


def test_a_byte_before_a_special_token_is_part_of_a_stop_string() -> None:
    """A line break of Llama's kind is held back until it is known what follows."""
    tokenizer = Tokenizer(sentencepiece())
    for stop in ("\n</s>", "</s>", "x\n</s>"):
        assembler = TextAssembler(tokenizer.detokenizer(), (stop,))
        tokens = [tokenizer.token_id(token) for token in ("x", "<0x0A>", "</s>")]
        pieces = [assembler.push(token) for token in tokens if token is not None]
        assert assembler.stopped
        assert "".join(pieces) == "x\n</s>".removesuffix(stop).removesuffix("</s>")


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


def test_the_end_token_may_complete_a_stop_string() -> None:
    result = output(("b<e>",))
    assert [result.add(Drawn(ord(letter))) for letter in "ab"] == ["a", ""]
    assert result.add(Drawn(SPECIAL + ord("e"), "stop")) == ""
    assert (result.finish_reason, result.completion(Timings()).text) == ("stop", "a")


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
