# ruff: noqa: RUF001 - patterns name letters of all scripts
"""How byte-level vocabularies of GGUF files cut text into words, by `tokenizer.ggml.pre`.

One row per kind, with what the models' own tokenizer.json files say. Words are cut by patterns
one after the other: each cuts what the one before left between and inside its matches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    """The pattern that GPT-4 began: contractions, words with what stands before them, `digits`,
    signs, and spaces apart from those before a word."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_ENDS}"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(digits: str, contractions: str = "") -> str:
    """The pattern that GPT-4o began: words break before capitals."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{contractions}|{before}{_UPPER}+{_LOWER}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
    )


# Cased letters. Those that NFC changes are escaped.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: see the file's first lines. whole_words: a word that is a token is that token,
    whatever the merges say. nfc: the text is normalised so. bos: a beginning token is added where
    the file does not say."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False

    def parts(self) -> list[dict[str, Any]]:
        """For a tokenizer.json: the splits, then bytes as characters."""
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return [*splits, level]


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_words=True, bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_CHATGLM = PreTokenizer((_words(r"\p{N}{1,3}"),))
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "olmo"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "megrez"), _QWEN2),
    "deepseek-r1-qwen": PreTokenizer((_words(r"\p{N}"),)),
    "qwen35": PreTokenizer((_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),), nfc=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), whole_words=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _CHATGLM),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}",
        )
    ),
}
