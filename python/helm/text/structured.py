"""Grammars that generated text must obey, compiled by llguidance; knows no engine.

JSON has no free white space: a model that would rather write blanks than end does end.
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.arguments import shown
from helm.errors import InvalidError, NoDeviceError, TokenizerError
from helm.text.called_grammar import CalledCompiler
from helm.text.token_bytes import token_bytes

if TYPE_CHECKING:
    from helm.text.sampling import SamplingParams
    from helm.text.thinking import Marks
    from helm.text.tokenizer import Tokenizer

MOST_BYTES = 256 << 10  # of a schema or another grammar
MOST_DEPTH = 64
# Of llguidance, see helm/constraint.h: about 100 ms to build the lexer.
_LEXER_FUEL = 5_000_000
_GRAMMAR_SIZE = 500_000
_MOST_GAP = 4  # white space between a thought and what follows
_KEPT = 32  # compiled grammars of a model
# Compact JSON, and no keyword is passed over: what is accepted is obeyed.
_COMPACT = {
    "whitespace_flexible": False, "item_separator": ",", "key_separator": ":",
    "coerce_one_of": False, "lenient": False,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Constraint:
    """A compiled grammar of one tokenizer; serves any number of requests.

    kind: "json_schema", "regex" or "lark". text: the grammar, compact JSON of a schema.
    """

    kind: str
    text: str
    _grammar: Any

    def start(self) -> Any:
        """A helm._helm.TokenConstraint for one request."""
        return self._grammar.start()


def json_schema(
    schema: Mapping[str, Any] | str | bool,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    end_tokens: Sequence[int] = (),
) -> Constraint:
    """Text that is one JSON value of `schema`, a dict or its JSON text.

    vocab_size: tokens of the model, None: of the tokenizer. end_tokens: that may end the text,
    besides the tokenizer's own. InvalidError for a schema that is none, is too large or deep, or
    has keywords that llguidance cannot enforce.
    """
    return _compiled("json_schema", schema_text(schema), tokenizer, vocab_size, end_tokens)


def json_object(
    tokenizer: Tokenizer, vocab_size: int | None = None, end_tokens: Sequence[int] = ()
) -> Constraint:
    """Text that is any one JSON object."""
    return json_schema({"type": "object"}, tokenizer, vocab_size, end_tokens)


def json_after_thought(
    schema: Mapping[str, Any] | str | bool,
    marks: Marks,
    opened: bool,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    end_tokens: Sequence[int] = (),
) -> Constraint:
    """Any thought up to the mark of its end, then one JSON value of `schema`, as `json_schema` has
    it.

    marks: what stands around a thought. opened: whether the prompt has opened it; else the text may
    also be the JSON alone.
    """
    begin, end = marks.special.get(marks.begin), marks.special.get(marks.end)
    first = json.dumps(marks.begin, ensure_ascii=False) if begin is None else f"<[{begin}]>"
    if end is None:
        closing = re.escape(marks.end).replace("/", "\\/")
        thought = rf"thought[lazy]: /(?s:.*){closing}/"
    else:
        thought = f"thought: INNER <[{end}]>\nINNER: /(?s:.*)/"
    lark = "\n".join(
        (
            f"start: {'thought GAP' if opened else f'({first} thought GAP)?'} answer",
            thought,
            f"GAP: /[ \\t\\r\\n]{{0,{_MOST_GAP}}}/",
            f"answer: %json {_with_separators(schema_text(schema))}",
        )
    )
    try:
        return _compiled("lark", lark, tokenizer, vocab_size, end_tokens)
    except InvalidError:
        json_schema(schema, tokenizer, vocab_size, end_tokens)  # says what is wrong with it
        raise


def regex(
    pattern: str,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    end_tokens: Sequence[int] = (),
) -> Constraint:
    """Text that matches a regular expression (of Rust's syntax, without anchors) as a whole."""
    return _compiled("regex", grammar_text(pattern, "regex"), tokenizer, vocab_size, end_tokens)


def grammar(
    lark: str,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    end_tokens: Sequence[int] = (),
) -> Constraint:
    """Text of a context-free grammar, in llguidance's variant of Lark's syntax."""
    return _compiled("lark", grammar_text(lark, "grammar"), tokenizer, vocab_size, end_tokens)


def constraint_of(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, end_tokens: Sequence[int]
) -> Constraint | None:
    """What sampling parameters ask for, None: nothing. TokenizerError without a tokenizer."""
    if params.json_schema is params.regex is params.grammar is None:
        return None
    if tokenizer is None:
        raise TokenizerError(
            "[grammar] a grammar needs a tokenizer and this model has none; put tokenizer.json "
            "into its folder, or give from_torch() one"
        )
    if params.json_schema is not None:
        return json_schema(params.json_schema, tokenizer, vocab_size, end_tokens)
    if params.regex is not None:
        return regex(params.regex, tokenizer, vocab_size, end_tokens)
    return grammar(str(params.grammar), tokenizer, vocab_size, end_tokens)


def schema_text(schema: Any) -> str:
    """A schema as compact JSON, checked: a JSON object or truth value of bounded size and depth."""
    if isinstance(schema, str):
        grammar_text(schema, "json_schema")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidError(f"[grammar] json_schema is no JSON: {error}") from None
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidError(
            f"[grammar] json_schema must be a JSON object (a dict) or its text, got {shown(schema)}"
        )
    _check_depth(schema)
    try:
        text = json.dumps(
            _plain(schema), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    except (TypeError, ValueError) as error:
        raise InvalidError(f"[grammar] json_schema is no JSON: {error}") from None
    return grammar_text(text, "json_schema")


def grammar_text(text: Any, name: str) -> str:
    """A grammar given as text, checked: not empty, of Unicode, of bounded size."""
    if not isinstance(text, str) or not text:
        raise InvalidError(f"[grammar] {name} must be text, and not empty, got {shown(text)}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidError(
            f"[grammar] {name} has a lone surrogate at character {error.start}"
        ) from None
    if size > MOST_BYTES:
        raise InvalidError(f"[grammar] {name} has {size} bytes; the most are {MOST_BYTES}")
    if "\0" in text:
        raise InvalidError(f"[grammar] {name} has a zero character; leave it out")
    return text


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise InvalidError(f"[grammar] json_schema is nested deeper than {MOST_DEPTH}")
        inner: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                inner += node.values()
            elif isinstance(node, (list, tuple)):
                inner += node
        if len(inner) > MOST_BYTES:
            raise InvalidError(f"[grammar] json_schema has more than {MOST_BYTES} values")
        level = inner


def _plain(node: Any) -> Any:
    """Other mappings as dicts, which json takes."""
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(item) for item in node] if isinstance(node, (list, tuple)) else node


class _Grammars:
    """A tokenizer's compiler for one model, and the grammars compiled last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> None:
        table = token_bytes(tokenizer, vocab_size)
        special = sorted({*table.special, *(i for i in ends if i < vocab_size)})
        if not ends:
            raise InvalidError(
                "[grammar] neither the model nor its tokenizer has an end-of-sequence token, with "
                "which a text could end"
            )
        self._compiler = _compiler(table.pieces, special, list(ends), table.tokenize)
        self._kept: OrderedDict[tuple[str, str], Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: str, text: str) -> Constraint:
        with self._lock:
            found = self._kept.get((kind, text))
            if found is not None:
                self._kept.move_to_end((kind, text))
                return found
        asked = _with_separators(text) if kind == "json_schema" else text
        made = self._compiler.compile(kind, asked, _LEXER_FUEL, _GRAMMAR_SIZE)
        constraint = Constraint(kind, text, made)
        with self._lock:
            self._kept[kind, text] = constraint
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return constraint


_by_tokenizer: weakref.WeakKeyDictionary[Tokenizer, dict[Any, _Grammars]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def _compiled(
    kind: str, text: str, tokenizer: Tokenizer, vocab_size: int | None, end_tokens: Sequence[int]
) -> Constraint:
    own = tokenizer.eos_token_id
    ends = tuple(dict.fromkeys((*end_tokens, *(() if own is None else (own,)))))
    key = (tokenizer.vocab_size if vocab_size is None else vocab_size, ends)
    with _lock:  # a large vocabulary takes a good second, once
        of_model = _by_tokenizer.setdefault(tokenizer, {})
        if key not in of_model:
            of_model[key] = _Grammars(tokenizer, *key)
        grammars = of_model[key]
    return grammars.compile(kind, text)


def _with_separators(text: str) -> str:
    schema = json.loads(text)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False)


def library() -> Path | None:
    """llguidance's shared library: HELM_LLGUIDANCE, or that of the installed package."""
    from importlib.util import find_spec

    named = os.environ.get("HELM_LLGUIDANCE")
    if named:
        return Path(named)
    found = find_spec("llguidance")
    places = [] if found is None else found.submodule_search_locations or []
    files = [file for place in places for file in sorted(Path(place).glob("_lib*.so"))]
    return files[0] if files else None


def _compiler(*tokens: Any) -> Any:
    """llguidance called from C++, or else from Python."""
    from helm import _helm

    path = library()
    if path is None:
        raise InvalidError(
            "[grammar] json_schema, regex and grammar need llguidance, which is not installed; "
            "pip install 'helm-llm[serve]' or llguidance"
        )
    try:
        return _helm.GrammarCompiler(str(path), *tokens)
    except NoDeviceError as absent:
        made: Any = CalledCompiler
        return made(*tokens, absent=absent)
