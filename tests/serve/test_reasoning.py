"""The split of an answer into thought and content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helm.serve.reasoning import ReasoningSplitter, opens_thought, tags_of


def split(pieces: list[str], opened: bool) -> tuple[str, str]:
    """All thought and all content; they come in this order."""
    splitter = ReasoningSplitter(opened)
    parts = [part for piece in pieces for part in splitter.feed(piece, last=False)]
    parts += splitter.feed("", last=True)
    kinds = [kind for kind, _ in parts]
    assert kinds == sorted(kinds, reverse=True)
    assert all(text for _, text in parts)
    texts = {kind: "".join(t for k, t in parts if k == kind) for kind in ("reasoning", "content")}
    return texts["reasoning"], texts["content"]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes", False, ("Hm.", "Yes")),
        ("Hm.\n</think>\n\nYes", True, ("Hm.", "Yes")),
        ("<think>Hm</think>Yes", True, ("Hm", "Yes")),  # opened twice
        ("\n<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        ("Yes", False, ("", "Yes")),
        ("  Yes", False, ("", "  Yes")),
        ("A tag is <think>x</think>.", False, ("", "A tag is <think>x</think>.")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("cut off", True, ("cut off", "")),
        ("cut </thi", True, ("cut </thi", "")),
        ("<thi", False, ("", "<thi")),
        ("<thing>", False, ("", "<thing>")),
        ("", True, ("", "")),
        (" \n", False, ("", " \n")),
    ],
)
def test_each_cut_of_an_answer_splits_alike(
    text: str, opened: bool, expected: tuple[str, str]
) -> None:
    assert split([text], opened) == expected
    assert split(list(text), opened) == expected
    for place in range(len(text)):
        assert split([text[:place], text[place:]], opened) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n", "é"])),
    st.booleans(),
    st.data(),
)
def test_no_cut_matters(words: list[str], opened: bool, data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, opened) == split([text], opened)


def test_a_thought_comes_as_it_is_made() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.feed("One", last=False) == [("reasoning", "One")]
    assert splitter.feed(" two </", last=False) == [("reasoning", " two")]
    assert splitter.feed("b></think> So", last=False) == [("reasoning", " </b>"), ("content", "So")]
    assert splitter.feed(" it is", last=True) == [("content", " it is")]


def test_other_tags() -> None:
    splitter = ReasoningSplitter(False, "[THINK]", "[/THINK]")
    parts = splitter.feed("[THINK]a[/THINK]b", last=True)
    assert parts == [("reasoning", "a"), ("content", "b")]


@pytest.mark.parametrize(
    ("prompt", "answer", "opens"),
    [
        ("<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("What is <think>?<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\nI was", "<think>\nI was", True),
        ("<|im_start|>assistant\n<think>a</think>b", "<think>a</think>b", False),
    ],
)
def test_a_prompt_may_open_the_thought(prompt: str, answer: str, opens: bool) -> None:
    assert opens_thought(prompt, "<think>", "</think>", answer) is opens


def test_tags_of_templates() -> None:
    assert tags_of("{{ '<think>\n\n</think>\n\n' }}") == ("<think>", "</think>")
    assert tags_of("{{ '[THINK]' }}{{ '[/THINK]' }}") == ("[THINK]", "[/THINK]")
    assert tags_of("{{ messages }}") is None
