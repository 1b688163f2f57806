"""The tokenizer in a GGUF file: its vocabulary as a tokenizer.json, and what stands beside it.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, all of which begin
with `tokenizer.`. Two kinds are read: "gpt2", byte-level BPE with merges, and "llama", the BPE of
SentencePiece, whose merges follow from the scores of its tokens. Vocabularies are hostile input.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from helm.base.arguments import shown
from helm.base.jsonio import Reader
from helm.errors import TokenizerError
from helm.model.gguf.cursor import Array
from helm.model.gguf.file import Gguf
from helm.model.gguf.token_ids import CONTROL
from helm.text.pre_tokenizers import PRE_TOKENIZERS
from helm.text.tokenizer import Tokenizer
from helm.text.tokenizer_backend import answering

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, CONTROL, 4  # of token_type
_MOST_TOKENS = 1 << 24
# Published vocabularies stay far below. Without bounds a small file would take minutes
# and gigabytes.
_MOST_ADDED_BYTES = 1 << 20  # of all tokens that are found before words are cut
_MOST_PIECE = 256  # characters of a token that merges make
_MOST_SPLITS = 16  # of a token into two others, on average
_PURPOSES = {  # of special tokens, by the key's name
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # the key is spelt so
    "mask": "mask_token",
}
_REMEDY = "the file's tokenizer is damaged or of an unknown kind; give another with tokenizer="
_Parts = tuple[dict[str, Any], dict[str, Any]]  # of a tokenizer.json; arguments of its BPE
_SPACE = "\u2581"  # SentencePiece's sign of a space


@dataclass(frozen=True)
class Vocabulary:
    """tokens: by id. kinds: of each token, see `_NORMAL` and its kin."""

    source: str
    tokens: list[str]
    kinds: list[int]

    def reject(self, message: str) -> NoReturn:
        raise TokenizerError(f"[tokenizer] {self.source}: {message}")


def gguf_tokenizer(gguf: Gguf, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a model, None where the file has none. vocab_size: rows of the embedding.
    Raises TokenizerError that names file and key."""
    node = Reader(gguf.keys, gguf.source, TokenizerError)
    model = node.get("tokenizer.ggml.model", "none").string()
    if model in ("none", "no_vocab"):
        return None
    makers: dict[str, Callable[[Reader, Vocabulary], _Parts]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    if model not in makers:
        node["tokenizer.ggml.model"].reject(
            f"{shown(model)} is not supported; expected {' or '.join(makers)}; give a tokenizer "
            "with tokenizer="
        )
    vocabulary = _vocabulary(node, vocab_size)
    special = _special_tokens(node, vocabulary)
    parts, bpe = makers[model](node, vocabulary)
    parts["post_processor"] = _post_processor(node, vocabulary, model)
    return Tokenizer(_backend(vocabulary, parts, bpe), special, _templates(node))


def _backend(vocabulary: Vocabulary, parts: dict[str, Any], bpe: dict[str, Any]) -> Any:
    """The library's tokenizer. parts: of a tokenizer.json beside the model; bpe: arguments of its
    model. Hundreds of thousands of merges go in as objects: as JSON they take twice the time."""
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    frame = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts}
    frame["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    added = [
        (token, kind != _USER_DEFINED)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]
    size = sum(len(token.encode()) for token, _ in added)
    if size > _MOST_ADDED_BYTES:
        vocabulary.reject(
            f"tokenizer.ggml.token_type has control and user-defined tokens of {size:,} bytes, "
            f"expected at most {_MOST_ADDED_BYTES:,}; {_REMEDY}"
        )
    with answering(f"[tokenizer] {vocabulary.source}: the vocabulary cannot be used", _REMEDY):
        backend = Backend.from_str(json.dumps(frame, ensure_ascii=False))
        backend.model = models.BPE(**bpe)
        for special in (True, False):
            backend.add_tokens(
                [
                    AddedToken(token, normalized=False, special=special)
                    for token, is_special in added
                    if is_special == special
                ]
            )
    return backend


def _array(node: Reader, key: str, count: int | None = None) -> Array:
    found = node[key]
    if not isinstance(found.value, Array):
        found.reject("expected an array")
    if found.value.count > _MOST_TOKENS:
        found.reject(f"{found.value.count} elements, expected at most {_MOST_TOKENS}")
    if count is not None and found.value.count != count:
        found.reject(
            f"{found.value.count} elements, tokenizer.ggml.tokens has {count}; expected as many; "
            "convert the original checkpoint again"
        )
    return found.value


def _vocabulary(node: Reader, vocab_size: int) -> Vocabulary:
    listed = _array(node, "tokenizer.ggml.tokens")
    if listed.count > vocab_size:
        node["tokenizer.ggml.tokens"].reject(
            f"has {listed.count} tokens, the model's embedding {vocab_size} rows; expected no more "
            "tokens than rows; convert the original checkpoint again"
        )
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(listed.strings())]
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        node["tokenizer.ggml.tokens"].reject(
            f"holds {shown(twice)} twice; expected every token once; convert the original "
            "checkpoint again"
        )
    kinds = [_NORMAL] * len(tokens)
    if not node.get("tokenizer.ggml.token_type").null:
        numbers = _array(node, "tokenizer.ggml.token_type", len(tokens)).numbers()
        kinds = numbers.tolist()
    return Vocabulary(node.subject, tokens, kinds)


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: i for i, token in enumerate(vocabulary.tokens)}


def _byte_level(node: Reader, vocabulary: Vocabulary) -> _Parts:
    key = node.get("tokenizer.ggml.pre")
    name = None if key.null else key.string()
    if name not in PRE_TOKENIZERS:
        said = "is missing" if name is None else f"{shown(name)} is not supported"
        key.reject(
            f"{said}; expected one of {', '.join(sorted(PRE_TOKENIZERS))}; give the model's own "
            "tokenizer with tokenizer="
        )
    pre = PRE_TOKENIZERS[name]
    parts = {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.parts()},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
    }
    merges = []
    for i, merge in enumerate(_array(node, "tokenizer.ggml.merges").strings()):
        left, space, right = merge.partition(" ")
        if not space:
            node["tokenizer.ggml.merges"].reject(
                f"entry {i} is {shown(merge)}, expected two tokens with a space between; convert "
                "the original checkpoint again"
            )
        merges.append((left, right))
    return parts, {
        "vocab": _ids(vocabulary),
        "merges": merges,
        "ignore_merges": pre.whole_words,
    }


def _sentencepiece(node: Reader, vocabulary: Vocabulary) -> _Parts:
    scores = _array(node, "tokenizer.ggml.scores", len(vocabulary.tokens)).numbers().tolist()
    bad = next((score for score in scores if not math.isfinite(score)), None)
    if bad is not None:
        node["tokenizer.ggml.scores"].reject(
            f"{bad} is no finite number; expected a score of every token; download the file again"
        )
    ids = _ids(vocabulary)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = node.get("tokenizer.ggml.add_space_prefix", True).boolean()
    steps = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    return parts, {
        "vocab": ids,
        "merges": _merges_of_scores(vocabulary, scores, ids),
        "unk_token": _token(node, "unknown", vocabulary),
        "byte_fallback": all(f"<0x{byte:02X}>" in ids for byte in range(256)),
        "fuse_unk": True,
    }


def _merges_of_scores(
    vocabulary: Vocabulary, scores: list[float], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Every split of a token into two others, the best token first. Among equals the longer first
    part comes first, then the longer second one, as in transformers' conversion."""
    found: list[tuple[float, int, int, int, str, str]] = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind != _NORMAL and kind != _USER_DEFINED:  # control tokens come out of no merge
            continue
        if len(token) > _MOST_PIECE:
            vocabulary.reject(
                f"tokenizer.ggml.tokens[{i}] has {len(token):,} characters, expected at most "
                f"{_MOST_PIECE} of a piece; {_REMEDY}"
            )
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in ids and token[cut:] in ids:
                found.append((-scores[i], -cut, cut - len(token), i, left, token[cut:]))
        if len(found) > _MOST_SPLITS * len(ids):
            vocabulary.reject(
                f"tokenizer.ggml.tokens has tokens of two others in over {len(found):,} ways, "
                f"expected at most {_MOST_SPLITS} of each on average; {_REMEDY}"
            )
    found.sort()
    return [(left, right) for *_, left, right in found]


def _token(node: Reader, name: str, vocabulary: Vocabulary) -> str | None:
    """The text of the token whose id the file states under `name`."""
    key = node.get(f"tokenizer.ggml.{name}_token_id")
    if key.null:
        return None
    return vocabulary.tokens[key.integer(0, len(vocabulary.tokens) - 1)]


def _special_tokens(node: Reader, vocabulary: Vocabulary) -> dict[str, str]:
    """By the name of their purpose, as chat templates use them."""
    found = {purpose: _token(node, name, vocabulary) for name, purpose in _PURPOSES.items()}
    return {purpose: token for purpose, token in found.items() if token is not None}


def _post_processor(node: Reader, vocabulary: Vocabulary, model: str) -> dict[str, Any]:
    """Adds tokens of beginning and end, as far as the file wants them."""
    pre = PRE_TOKENIZERS.get(str(node.get("tokenizer.ggml.pre").value))
    by_default = model == "llama" or (pre is not None and pre.bos)
    around = {}
    for name, default in (("bos", by_default), ("eos", False)):
        wanted = node.get(f"tokenizer.ggml.add_{name}_token", default)
        if not wanted.boolean():
            continue
        token = _token(node, name, vocabulary)
        if token is None:
            wanted.reject(
                f"tokenizer.ggml.{name}_token_id is missing; expected the id of the token to add; "
                "convert the original checkpoint again"
            )
        around[name] = token
    pieces = [_special(around["bos"], 0)] if "bos" in around else []
    single = [*pieces, _sequence("A", 0)]
    pair = [*single, *([_special(around["bos"], 1)] if "bos" in around else []), _sequence("B", 1)]
    if "eos" in around:
        single = [*single, _special(around["eos"], 0)]
        pair = [*pair, _special(around["eos"], 1)]
    ids = {token: vocabulary.tokens.index(token) for token in around.values()}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()
        },
    }


def _special(token: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": kind}}


def _sequence(name: str, kind: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}


def _templates(node: Reader) -> dict[str, str]:
    """Chat templates by name; "default" without one."""
    prefix = "tokenizer.chat_template"
    found = {}
    for key in node.names():
        if key == prefix or key.startswith(f"{prefix}."):
            found[key.removeprefix(prefix).removeprefix(".") or "default"] = node[key].string()
    return found
