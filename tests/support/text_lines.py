# ruff: noqa: RUF001, E501 - letters of all scripts, which are wider than they look
"""Lines of text that are hard to cut into tokens, always the same ones: code, prose in many
scripts, emoji, digits, runs of spaces, control characters."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

_PIECES = (
    "the", "The", "HELLO", "don't", "I'LL", "it's", "we'Ve", "naïve", "façade", "e\u0301te\u0301",
    "\u1e9b\u0323", "Ärger", "ß", "ﬁn", "Привет", "мир", "Ελλάδα", "שלום", "مرحبا", "नमस्ते",
    "สวัสดี", "한국어", "你好", "世界", "，", "。", "「", "」", "こんにちは", "カタカナ", "ﾊﾝｶｸ",
    "漢字", "😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "☃️", "∑", "≠", "½", "²", "Ⅷ", "٣", "१२३", "1", "12", "123",
    "1234", "12345", "1,234.56", "0x1F", "1e-9", "2024-01-31", "v1.2.3", "a_b", "camelCase",
    "ALLCAPS", "snake_case_9", "==", "!=", "->", "=>", "::", "//", "/*", "*/", "&&", "||", "<<=", "...", "---",
    "###", "***", "$x", "@y", "#z", "%", "{}", "[0]", "(a)", "<b>", "</b>", '"quoted"', "'single'",
    "`tick`", "http://example.org/a?b=c&d=e#f", "me@example.org", "C:\\dir", "\\n", "\u00a0",
    "\u3000", "\u2003", "\u200b", "\ufeff", "\u00ad", "\u0000", "\u007f", "\u0085", "\u2028", "\ufffd",
    "\u0001", "\u0008", "\u000b", "\u000c", "\u001b[0m", "\u001f", "\u009f", "Åбψ字ก", "тест_test", "ａｂｃ", "ᄒ\u1161\u11ab",
)  # fmt: skip
_SPACES = ("", "", " ", " ", " ", " ", "  ", "   ", "    ", " " * 7, " " * 16, "\t", "\t\t", " \t")
_ENDS = ("", "", "", "\n", "\n\n", " \n", "\r\n", "\n    ", "  ", "\n\n\n", "\t\n")


def lines(count: int = 2000) -> list[str]:
    """A third is code of Python's library, the others are made of the pieces above."""
    source = Path(argparse.__file__).read_text().splitlines()
    code = [line for line in source if line.strip()]
    random = Random(39)
    found = []
    for i in range(count):
        if i % 3 == 0:
            found.append(random.choice(code) + random.choice(_ENDS))
            continue
        text = ""
        for _ in range(random.randint(1, 12)):
            text += random.choice(_PIECES) + random.choice(_SPACES)
        found.append(random.choice(_SPACES) + text + random.choice(_ENDS))
    return found
