"""The bytes that each token of a tokenizer stands for; knows no grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helm.errors import TokenizerError

if TYPE_CHECKING:
    from helm.text.tokenizer import Tokenizer

_CHECKED_PAIRS = 200
_SPACE = "\u2581"  # SentencePiece's
_FALLBACK = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


@dataclass(frozen=True)
class TokenBytes:
    """pieces: [vocab_size] bytes of each token, empty where it is none or no text. special: ids of
    tokens that are no text. tokenize: a text's own tokens within a longer one; they may spell
    another text, where the tokenizer changes it."""

    pieces: list[bytes]
    special: list[int]
    tokenize: Callable[[bytes], list[int]]


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Those of a byte-level or SentencePiece tokenizer, for a model of `vocab_size` tokens.
    TokenizerError for others: their text is more than its tokens' one after the other."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder()
    skipped = {i for i, token in added.items() if token.special}
    names = set(_decoders(backend))
    byte_level = "ByteLevel" in names
    if not byte_level and not names & {"ByteFallback", "Metaspace"}:
        raise TokenizerError(
            f"[grammar] the tokenizer decodes with {', '.join(sorted(names)) or 'nothing'}; "
            "grammars need a byte-level or SentencePiece tokenizer"
        )
    piece_of = _byte_level_piece if byte_level else _sentencepiece_piece
    pieces = [b""] * vocab_size
    for text, i in backend.get_vocab(with_added_tokens=True).items():
        if i < vocab_size and i not in skipped:
            pieces[i] = piece_of(text) if i not in added or byte_level else text.encode()
    _check(tokenizer, pieces)

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    # SentencePiece puts a space before a text, and so before its anchor.
    anchor = "" if byte_level else "\x02"
    before = encode(anchor)

    def tokenize(text: bytes) -> list[int]:
        ids = encode(anchor + text.decode())
        return ids[len(before) :] if ids[: len(before)] == before else []

    return TokenBytes(pieces, sorted(i for i in skipped if i < vocab_size), tokenize)


def _decoders(backend: Any) -> Iterator[str]:
    """The types of the decoders, those of a sequence one by one."""
    if backend.decoder is None:
        return
    state = json.loads(backend.decoder.__getstate__())
    for node in state.get("decoders", [state]):
        yield str(node.get("type"))


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: printable ones of Latin-1 for
    themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {
        **{chr(byte): byte for byte in shown},
        **{chr(0x100 + i): byte for i, byte in enumerate(hidden)},
    }


_BYTES = _byte_alphabet()


def _byte_level_piece(text: str) -> bytes:
    if all(character in _BYTES for character in text):
        return bytes(_BYTES[character] for character in text)
    return text.encode()


def _sentencepiece_piece(text: str) -> bytes:
    return _FALLBACK.get(text) or text.replace(_SPACE, " ").encode()


def _check(tokenizer: Tokenizer, pieces: list[bytes]) -> None:
    """Compares pairs of tokens with what the tokenizer itself makes of them."""
    chosen = random.Random(0)
    ids = [i for i, piece in enumerate(pieces) if piece]
    for _ in range(_CHECKED_PAIRS if ids else 0):
        pair = [chosen.choice(ids), chosen.choice(ids)]
        try:
            expected = b"".join(pieces[i] for i in pair).decode()
        except UnicodeDecodeError:
            continue  # part of a character: shown as U+FFFD
        found = tokenizer.decode(pair, skip_special_tokens=False)
        if found not in (expected, expected.removeprefix(" ")):
            raise TokenizerError(
                f"[grammar] the tokenizer decodes tokens {pair} to {found!r}, one by one they are "
                f"{expected!r}; grammars need tokens that follow one another unchanged"
            )
