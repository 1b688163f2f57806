"""Vocabularies and templates of GGUF files are whoever's who published them: whatever they hold,
they take seconds, little more memory than the file, and end in an error that names the file."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_whole import whole

import helm
from gguf_bytes import ARRAY, F32, I32, STRING, U32, File
from helm.errors import HelmError
from helm.model.model_files import read_model
from helm.text.of_model import tokenizer_of

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BASE, KINDS = ["<unk>", "<s>", "<|end|>", "<tool>"], [2, 3, 3, 4]
MORE_BYTES = 512 << 20  # that a process may take for one of these files
SECONDS = 20.0  # on a busy machine


def vocabulary(
    tokens: Sequence[str | bytes], kind: int = NORMAL, merges: Sequence[str] | None = None
) -> File:
    """A model with these tokens beside the usual special ones: with merges, or else pieces."""
    count = len(BASE) + len(tokens)
    keys: list[tuple[str, int, Any]] = [
        ("tokenizer.ggml.tokens", ARRAY, (STRING, [*BASE, *tokens])),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [*KINDS, *[kind] * len(tokens)])),
        ("llama.vocab_size", U32, count),
    ]
    if merges is None:
        scores = [-float(i) for i in range(count)]
        keys += [
            ("tokenizer.ggml.model", STRING, "llama"),
            ("tokenizer.ggml.scores", ARRAY, (F32, scores)),
        ]
    else:
        keys.append(("tokenizer.ggml.merges", ARRAY, (STRING, list(merges))))
    file = whole().with_keys(*keys)
    tensors = [
        replace(t, shape=(32, count)) if t.name == "token_embd.weight" else t for t in file.tensors
    ]
    return replace(file, tensors=tuple(tensors))


def words(count: int, length: int) -> list[str]:
    """Different ones, whose characters tell them apart at once."""
    return ["".join(chr(0x4E00 + (i * 7919 + k * k * i) % 20000) for k in range(length - 2))
            + chr(0x4E00 + i % 20000) + chr(0x4E00 + i // 20000) for i in range(count)]  # fmt: skip


TOO_MANY = r"tokenizer.ggml.token_type has control and user-defined tokens of .* bytes, expected at"
HOSTILE: dict[str, tuple[File, str]] = {
    "long control tokens": (vocabulary(words(60, 30_000), CONTROL, ()), TOO_MANY),
    "many control tokens": (vocabulary(words(60_000, 8), CONTROL, ()), TOO_MANY),
    "many user-defined tokens": (vocabulary(words(60_000, 8), USER_DEFINED, ()), TOO_MANY),
    "a long piece": (vocabulary(["▁", "a", "a" * 2**20]), r"tokens\[6\] has 1,048,576 characters"),
    "pieces of one another": (
        vocabulary(["▁", *("a" * i for i in range(1, 250)), *("b" * i for i in range(1, 250))]),
        r"tokens of two others in over .* ways",
    ),
    "merges of what is no token": (
        vocabulary(["a", "b"], merges=["a b"] * 100_000),
        "the vocabulary cannot be used",
    ),
}
ACCEPTED: dict[str, File] = {
    "odd characters": vocabulary(
        ["\0", "\ufffe", "\u202e", "e\u0301", "🏳\ufe0f\u200d🌈", "\x7f", "Ā", "Ġ\0", "\n"],
        merges=(),
    ),
    "odd pieces": vocabulary(["\0", "\ufffe", "\u202e", "▁", "▁▁", "<0x00>", "<0xZZ>", "\r\n"]),
    "a merge again and again": vocabulary(["a", "b", "ab"], merges=["a b"] * 300_000),
    "merges of merges": vocabulary(
        [*"ab", *("a" * 2**i for i in range(1, 18))],
        merges=[f"{'a' * 2**i} {'a' * 2**i}" for i in range(17)],
    ),
    "control tokens of a megabyte": vocabulary(words(40_000, 8), CONTROL, ()),
}


def opened(path: Path) -> None:
    """What a process that is limited does with a file; prints the error that ends it."""
    usage = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (usage + MORE_BYTES,) * 2)
    try:
        tokenizer = tokenizer_of(read_model(path))
        assert tokenizer is not None
        for text in ("Hello", "ab" * 50_000, "a" * 100_000, "\0\ufffe e\u0301 🏳", "x▁ y\n"):
            ids = tokenizer.encode(text)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            assert isinstance(tokenizer.decode(ids), str)
    except HelmError as error:
        print(error)


def in_a_process(path: Path) -> str:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from pathlib import Path; "
        f"import test_hostile_gguf as t; t.opened(Path({str(path)!r}))"
    )
    folder = str(Path(__file__).parent)
    start = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=6 * SECONDS,
        cwd=folder,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert time.monotonic() - start < SECONDS
    return ran.stdout.strip()


@pytest.mark.parametrize("name", HOSTILE)
def test_vocabularies_that_would_take_all_are_refused(name: str, tmp_path: Path) -> None:
    file, said = HOSTILE[name]
    message = in_a_process(file.write(tmp_path / "x.gguf"))
    assert re.search(said, message), message
    assert "x.gguf" in message
    assert message.endswith("give another with tokenizer=")


@pytest.mark.parametrize("name", ACCEPTED)
def test_odd_vocabularies_make_text_of_ids(name: str, tmp_path: Path) -> None:
    assert in_a_process(ACCEPTED[name].write(tmp_path / "x.gguf")) == ""


TEMPLATES = {
    "endless": "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3,
    "large": "{{ 'a' * 10 ** 10 }}",
    "doubling": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}"
    "{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "endless macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a long source": "{# x #}" * 20_000,
    "malformed": "{% for",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "globals by filter": "{{ (messages | attr('__class__')).__mro__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('true') }}",
    "a change of what is given": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_hostile_templates_are_refused_in_a_chat(name: str, tmp_path: Path) -> None:
    file = whole().with_keys(("tokenizer.chat_template", STRING, TEMPLATES[name]))
    path = file.write(tmp_path / "x.gguf")
    with helm.LLM(path, threads=1) as llm:
        start = time.monotonic()
        with pytest.raises(HelmError) as caught:
            llm.chat([{"role": "user", "content": "x"}], max_tokens=1)
        assert time.monotonic() - start < SECONDS
        assert "template" in str(caught.value)
        assert "root:" not in str(caught.value)
        assert len(llm.generate([1, 2], max_tokens=2, ignore_eos=True).tokens) == 2


def test_a_format_shows_no_attributes_of_ours(tmp_path: Path) -> None:
    hidden = "{{ 'a{0.__class__.__init__}b{1[0].role}'.format(messages, messages) }}"
    file = whole().with_keys(("tokenizer.chat_template", STRING, hidden))
    tokenizer = tokenizer_of(read_model(file.write(tmp_path / "x.gguf")))
    assert tokenizer is not None
    assert "class" not in tokenizer.render_chat([{"role": "user", "content": "x"}])
