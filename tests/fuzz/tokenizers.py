"""tokenizer.json with its companions, and chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from fuzz import models, mutate
from fuzz.kind import Kind, sensible
from helm.text.tokenizer import Tokenizer

_TEXTS = (
    "Once upon a time", "a", " ", "\n\t", "<|begin|>x<|end|>", "naïve façade 你好 😀", "\x00",
    "e\u0301" * 50,
    "<|user|>" * 20, "\u200d\u202e\ufeff", "x" * 2000, "A1 b2. C3!? " * 30,
)  # fmt: skip
_COMPANIONS: dict[str, Any] = {
    "special_tokens_map.json": {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}},
    "added_tokens.json": {"<|end|>": 1, "<|new|>": 1024, "<tool>": 5},
    "chat_template.json": {"chat_template": "{{ messages[0].content }}"},
}
_SPARE_PARTS: tuple[Any, ...] = (
    {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "b"},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Removed", "invert": True},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 2**63, "stop": 0},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Prepend", "prepend": "x" * 1000},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Digits", "individual_digits": True},
    {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},
    {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 3},
    {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None,
     "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
    {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
)  # fmt: skip


class TokenizerFiles(Kind):
    """A folder's tokenizer."""

    name = "tokenizer"
    inputs = 2300

    def __init__(self, folder: Path) -> None:
        names = ("tokenizer.json", "tokenizer_config.json")
        self._files = {n: json.loads((models.BUNDLED / n).read_text()) for n in names}

    def run(self, random: Random, folder: Path) -> None:
        files: dict[str, Any] = {**self._files}
        for name, document in _COMPANIONS.items():
            if random.random() < 0.3:
                files[name] = document
        changed = random.choice(("tokenizer.json", *files))
        if changed == "tokenizer.json" and random.random() < 0.4:
            part = random.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder",
            "model",
                                  "truncation", "padding"))  # fmt: skip
            files[changed] = {**files[changed], part: random.choice(_SPARE_PARTS)}
        else:
            files[changed] = mutate.json_value(random, files[changed])
        for name, document in files.items():
            plain = json.dumps(document).encode()
            data = mutate.dumped(random, document) if name == changed else plain
            (folder / name).write_bytes(data)
        if random.random() < 0.05:
            mutate.file(random, folder / random.choice(list(files)))
        if random.random() < 0.05:
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff{{")
        self._use(random, Tokenizer.from_directory(folder, models.VOCAB))

    def _use(self, random: Random, tokenizer: Tokenizer) -> None:
        for text in random.sample(_TEXTS, 4):
            ids = tokenizer.encode(text, add_special_tokens=random.random() < 0.5)
            sensible(all(isinstance(i, int) and i >= 0 for i in ids), f"ids {ids[:20]}")
            sensible(isinstance(tokenizer.decode(ids), str), "text that is none")
            pieces = tokenizer.detokenizer(ids[:2])
            streamed = [pieces.push(i) for i in ids[2:]] + [pieces.flush()]
            sensible(all(isinstance(piece, str) for piece in streamed), f"pieces {streamed[:9]}")
        for token in (0, random.randrange(models.VOCAB), 2**31 - 1):
            sensible(isinstance(tokenizer.token_text(token), str), "a token's text that is none")
        for token_id in (tokenizer.eos_token_id, tokenizer.bos_token_id):
            sensible(token_id is None or token_id >= 0, f"special token {token_id}")
        if tokenizer.chat_templates:
            name = random.choice(list(tokenizer.chat_templates))
            messages = [{"role": "user", "content": "Hello"}]
            sensible(isinstance(tokenizer.render_chat(messages, template=name), str), "no text")


_EXPRESSIONS = (
    "messages", "messages[0]['content']", "message.role", "bos_token", "eos_token", "tools", "''",
    "range(10)", "range(10**9)", "range(10**400)", "'a' * 10**9", "'a' * 3", "10**10**8", "0.1",
    "[]", "{}",
    "loop.index0", "namespace(x=1)", "x", "ns.x", "dict(a=1)", "joiner(', ')", "cycler(1, 2)",
    "strftime_now('%Y')", "strftime_now('%' * 9)", "raise_exception('no')",
    "raise_exception(messages)",
    "''.__class__.__mro__", "messages.append(1)", "messages.__class__", "self", "self.__init__",
    "lipsum(n=1000)", "lipsum.__globals__", "cycler.__init__", "caller()", "'%s' % messages",
    "'{0.__class__}'.format(x)", "'%1000000000d' % 1", "'{:>1000000000}'.format(1)", "1 // 0",
    "x.y.z", "messages[-1:]", "messages[::-1]", "messages[10**30]", "messages['a']", "none + 1",
    "'a'.join(range(9))", "documents", "'\\ud800'", "add_generation_prompt",
)  # fmt: skip
_FILTERS = (
    "tojson", "tojson(indent=4)", "tojson(indent=10**9)", "trim", "length", "upper", "string",
    "list",
    "join('a')", "first", "last", "sort", "unique", "map(attribute='role')", "selectattr('role')",
    "int",
    "groupby('role')", "batch(0)", "batch(2, 'x')", "slice(10**9)", "center(10**9)",
    "indent(10**8)",
    "wordwrap(0)", "truncate(-1)", "default('a')", "items", "dictsort", "pprint", "xmlattr",
    "round(10**9)",
    "replace('a', 'b' * 10**6)", "urlize", "format(1)", "attr('__class__')", "sum", "random",
    "absent",
    "filesizeformat", "escape", "safe", "float", "abs", "reverse", "min", "striptags",
)  # fmt: skip
_MESSAGES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "a" * 3000}],
    [{"role": "user", "content": None}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}] * 3,
    [{"role": "user", "content": "\ud800"}],
    [{"role": "__class__", "content": 10**30}],
)


class ChatTemplate(Kind):
    """A program in the template language, of the words that published templates and attacks use."""

    name = "template"
    inputs = 2000

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tokenizer"
        self._folder.mkdir()
        shutil.copy(models.BUNDLED / "tokenizer.json", self._folder)
        config = json.loads((models.BUNDLED / "tokenizer_config.json").read_text())
        self._published = config["chat_template"]
        self._backend = Tokenizer.from_directory(self._folder).backend

    def run(self, random: Random, folder: Path) -> None:
        if random.random() < 0.3:
            template = mutate.text(random, self._published)
        else:
            template = "".join(_statement(random, 0) for _ in range(random.randint(1, 4)))
        if random.random() < 0.05:
            depth = random.choice((50, 1000, 100_000))
            template = random.choice(
                ("{{ " + "(" * depth, "{% if x %}" * depth, "{{ " + "-" * depth + "1 }}")
            )
        special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
        tokenizer = Tokenizer(self._backend, special, {"default": template})
        tools = random.choice((None, None, [], [{"type": "function"}], [1]))
        variables = random.choice(
            ({}, {}, {"x": 1}, {"x": [[1]] * 3}, {"range": 3, "bos_token": None})
        )
        text = tokenizer.render_chat(random.choice(_MESSAGES), tools=tools, **variables)
        sensible(isinstance(text, str), f"a {type(text).__name__} instead of text")
        sensible(len(text) <= 1 << 28, f"a text of {len(text)} characters")
        tokenizer.encode(text[:100_000], add_special_tokens=False)


def _expression(random: Random) -> str:
    found = random.choice(_EXPRESSIONS)
    while random.random() < 0.35:
        found = f"({found}) | {random.choice(_FILTERS)}"
    if random.random() < 0.2:
        operator = random.choice(
            ("+", "~", "*", "-", "%", "in", "is", "==", "<", "and", "**", "//")
        )
        found = f"({found}) {operator} ({random.choice(_EXPRESSIONS)})"
    return found


def _statement(random: Random, depth: int) -> str:
    pick = random.random()
    if depth > 4 or pick < 0.4:
        return "{{ " + _expression(random) + " }}"
    body = "".join(_statement(random, depth + 1) for _ in range(random.choice((0, 1, 1, 2))))
    if pick < 0.6:
        flow = random.choice(("", "", "{% break %}", "{% continue %}"))
        recursive = random.choice(("", "", " recursive"))
        return f"{{% for message in {_expression(random)}{recursive} %}}{body}{flow}{{% endfor %}}"
    if pick < 0.75:
        return f"{{% if {_expression(random)} %}}{body}{{% else %}}{body}{{% endif %}}"
    if pick < 0.85:
        return f"{{% set x = {_expression(random)} %}}{body}"
    if pick < 0.92:
        call = "{{ m(" + _expression(random) + ") }}"
        return "{% macro m(x) %}" + body + "{{ m(x) }}{% endmacro %}" + call
    return random.choice((
        "{% generation %}" + body + "{% endgeneration %}", "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% raw %}{{{% endraw %}", "{# " + body + " #}", "{% block b %}" + body + "{% endblock %}",
        "{% filter upper %}" + body + "{% endfilter %}", "{% call m(1) %}" + body + "{% endcall %}",
        "{% extends 'x' %}", "{% set ns.x = 1 %}", "{% for x in", "{%- endfor -%}",
    ))  # fmt: skip
