"""How an answer is shown while it comes: words kept whole, code as it is, thinking taken out."""

from __future__ import annotations

import io
import json
import sys
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from tokenizers import AddedToken

import small_tokenizers
from helm.commands.answer_view import AnswerView
from helm.commands.wrapping import Wrapper
from helm.text.thinking import Answer, Marks, thinking_marks, thinking_switch
from helm.text.tokenizer import Tokenizer

TEXTS = st.text(alphabet="ab .,\n\t`~中😀é", max_size=120)


def wrapped(text: str, width: int, cuts: list[int] | None = None) -> str:
    wrapper = Wrapper(lambda: width)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    pieces = [text[a:b] for a, b in pairwise(places)]
    return "".join(map(wrapper.push, pieces)) + wrapper.flush()


@given(TEXTS, st.integers(1, 30), st.lists(st.integers(0, 200), max_size=20))
@example("```\n" + "a " * 40 + "\n```\n" + "a " * 40, 10, [3, 7])
def test_pieces_are_shown_as_the_whole_text_is(text: str, width: int, cuts: list[int]) -> None:
    assert wrapped(text, width, cuts) == wrapped(text, width)


@given(st.text(alphabet="ab .\n中😀é", max_size=120), st.integers(2, 30))
def test_lines_are_as_long_as_the_terminal_and_words_whole(text: str, width: int) -> None:
    shown = wrapped(text, width)
    assert "".join(shown.split()) == "".join(text.split())
    short = [word for word in text.split() if cell_len(word) < width]
    if len(short) == len(text.split()):
        assert all(cell_len(line) <= width for line in shown.split("\n"))
        if text.isascii():
            assert shown.split() == text.split()


def test_lines_break_where_they_are_full() -> None:
    assert wrapped("one two three", 7) == "one two\nthree"
    assert wrapped("one two  three", 6) == "one\ntwo\nthree"
    assert wrapped("  one\n  two", 7) == "  one\n  two"
    assert wrapped("中文字你", 4) == "中文\n字你"
    assert wrapped("a\tb c", 10) == "a\tb\nc"
    assert wrapped("  a", 2) == "a"
    assert wrapped("abcdefgh ij", 4) == "abcd\nefgh\nij"


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_code_stays_as_it_is(fence: str) -> None:
    code = "    total = first + second  # a comment of some length\n\tx\n"
    block = f"{fence}python\n{code}{fence}\n"
    assert wrapped(block, 10) == block
    words = "some words of a line"
    assert wrapped(f"{words}\n  {block}{words}", 14) == (
        f"some words of\na line\n  {block}some words of\na line"
    )
    assert wrapped("```ab cd``` ef", 6) == "```ab\ncd```\nef"  # no block, all on one line


# --- thinking ------------------------------------------------------------------------------------

THINK = Marks("<think>", "</think>", {})


@given(st.lists(st.integers(0, 60), max_size=12))
@example([])
def test_thinking_is_taken_out_however_the_text_comes(cuts: list[int]) -> None:
    for text, inside, expected in (
        ("<think>\nLet me </thin see.</think>\n\nIt <think> is.", False, "It <think> is."),
        ("Let me see.</think>Blue.", True, "Blue."),
        ("\n <think></think>Blue.", False, "Blue."),
        ("Blue <think>x</think>", False, "Blue <think>x</think>"),
        ("  <thing> is blue", False, "  <thing> is blue"),
        (" <thi", False, " <thi"),
        ("<think>never ends", False, ""),
    ):  # fmt: skip
        answer = Answer(THINK, inside)
        places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
        pieces = [text[a:b] for a, b in pairwise(places)]
        assert "".join(map(answer.push, pieces)) + answer.flush() == expected
        assert answer.thinking == (text == "<think>never ends")


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<reasoning>", "</reasoning>"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_marks_are_the_models_own(begin: str, end: str, special: bool) -> None:
    backend = small_tokenizers.byte_level()
    backend.add_tokens([AddedToken(mark, special=special) for mark in (begin, end)])
    by_token = Tokenizer(backend)
    marks = thinking_marks(by_token)
    assert marks is not None
    assert (marks.begin, marks.end) == (begin, end)
    template = {"default": f"{begin}{{{{ messages[0].content }}}}{end}"}
    by_template = thinking_marks(Tokenizer(small_tokenizers.byte_level(), {}, template))
    assert by_template == Marks(begin, end, {})
    answer, detokenizer = Answer(marks, inside=False), by_token.detokenizer()
    shown = ""
    for token in by_token.encode(f"{begin}Hm, so.{end}Blue it is."):
        shown += answer.push(detokenizer.push(token), [token])
    assert shown == "Blue it is."


def test_a_model_without_marks_or_switch_has_none() -> None:
    plain = Tokenizer(small_tokenizers.byte_level(), {}, {"default": "I <think> so"})
    assert thinking_marks(plain) is None
    assert thinking_switch(plain) is None
    prose = "{% set thinking = 'enable_thinking' %}{{ thinking }}"
    for source in (prose, "{% if enable_thinking"):
        assert thinking_switch(Tokenizer(plain.backend, {}, {"default": source})) is None
    template = {"default": "{% if enable_thinking %}x{% endif %}"}
    assert thinking_switch(Tokenizer(plain.backend, {}, template)) == "enable_thinking"


def test_an_answer_may_begin_within_the_thinking() -> None:
    assert THINK.opened_by("<|assistant|>\n<think>\n")
    assert not THINK.opened_by("<|assistant|>\n<think>\n\n</think>\n\n")
    assert THINK.left_open_in("<think> so")
    assert not THINK.left_open_in("<think> so </think> It")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_does_not_obey_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\x07\r\nc\x9b1m\x7f"
    for stream, expected in ((Screen(), "a�[2Jb�\nc�1m�\n"), (io.StringIO(), text + "\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        view = AnswerView()
        for character in text:
            view.write(character)
        view.end()
        assert stream.getvalue() == expected, json.dumps(stream.getvalue())
