"""GGUF files: keys, vocabularies, tables of tensors, parts of split models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import gguf
from gguf_whole import whole
from plans import make_plan

from fuzz import models, mutate
from fuzz.kind import Kind, sensible, tokens_are_sensible
from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U8, U32, U64, File
from helm.model.gguf.file import Gguf, read_gguf
from helm.model.model_files import read_model
from helm.text.of_model import defaults_of, tokenizer_of

_TEXTS = ("", "a", "Hello  world 123\n", "naïve 你好 😀", "<|end|>x<tool>", "\x00\u2581" * 9)
_WORDS = (
    "", "a", "llama", "qwen2", "gpt2", "none", "clip", "adapter", "yarn", "linear", "default",
    "x" * 999, "\u2581", "{{ x }}", "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ 'a' * 10**9 }}", "{% for i in range(99999) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}",
    "{{ '{0.__class__}'.format(messages) }}", "a " * 999, "\u2581" * 300,
)  # fmt: skip
_BYTES = (b"\xff", b"\xed\xa0\x80", b"\0", b"\n")
_NUMBERS = {
    U8: (0, 1, 255), U32: (0, 1, 3, 8, 2**31 - 1, 2**32 - 1), I32: (-1, 0, 2**31 - 1),
    F32: (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")), BOOL: (True, False),
    U64: (0, 1, 2**63, 2**64 - 1),
}  # fmt: skip
_MOST_BYTES = 1 << 30


class GgufFile(Kind):
    """A model in GGUF, whole or in parts."""

    name = "gguf"
    inputs = 10_000
    most_bytes = 256 << 20

    def __init__(self, folder: Path) -> None:
        self._files = [
            whole("llama", "llama", 0), whole("qwen2", "gpt2", 1), whole("llama", "gpt2", 8)
        ]  # fmt: skip
        self._path = folder / "oracle.gguf"
        for file in self._files:  # as they are, they are models
            _use(Random(0), file.write(self._path))

    def run(self, random: Random, folder: Path) -> None:
        file = random.choice(self._files)
        for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
            file = _changed(random, file)
        path = folder / "model.gguf"
        if random.random() < 0.1:
            path = _split(random, file, folder)
        else:
            file.write(path)
        pick = random.random()
        if pick < 0.3:
            path.write_bytes(_damaged(random, path.read_bytes(), len(file.header())))
        elif pick < 0.35:
            mutate.file(random, path)
        _use(random, path)


def _use(random: Random, path: Path) -> None:
    """What is accepted makes sense, up to a plan, and at times up to an answer."""
    _as_the_package(read_gguf(path), path)
    files = read_model(path)
    tokenizer = tokenizer_of(files)
    defaults_of(files)
    weights = files.weights()
    plan = make_plan(weights.config, weights.tensors, threads=1, memory_bytes=1 << 28)
    sensible(len(plan.tensors) == len(weights.tensors), "tensors that the plan leaves out")
    if tokenizer is not None:
        for text in random.sample(_TEXTS, 3):
            ids = tokenizer.encode(text)
            sensible(all(0 <= i < weights.config.vocab_size for i in ids), f"ids {ids[:20]}")
            sensible(isinstance(tokenizer.decode(ids), str), "text that is none")
        if tokenizer.chat_templates:
            name = random.choice(list(tokenizer.chat_templates))
            tokenizer.render_chat([{"role": "user", "content": "x"}], template=name)
    if random.random() < 0.1:
        options = {
            "weights": random.choice(("copied", "auto")),
            "dtype": random.choice(("auto", "auto", "q8", "q4", "bf16")),
        }
        with models.load(path, **options) as llm:
            prompt = [random.randrange(llm.vocab_size) for _ in range(3)]
            tokens_are_sensible(llm.generate(prompt, max_tokens=2).tokens, 2, llm.vocab_size)


def _as_the_package(found: Gguf, path: Path) -> None:
    """What HELM reads in a file, the gguf package reads too."""
    if len(found.files) > 1 or path.stat().st_size > _MOST_BYTES:  # it maps the whole file
        return
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    sensible(set(theirs) == set(found.tensors), "tensors are in one reading only")
    for name, own in found.tensors.items():
        shape = tuple(int(extent) for extent in theirs[name].shape[::-1])
        sensible(shape == own.shape, f"{name!r} has shape {shape} or {own.shape}")
        place = int(theirs[name].data_offset)
        sensible(place == own.offset, f"{name!r} begins at {place} or {own.offset}")


def _damaged(random: Random, data: bytes, header: int) -> bytes:
    """Mostly in the header, at times cut behind it."""
    if random.random() < 0.1:
        return data[: random.randrange(len(data))]
    return mutate.octets(random, data[:header]) + data[header:]


def _changed(random: Random, file: File) -> File:
    pick = random.random()
    if pick < 0.45:
        return _other_key(random, file)
    if pick < 0.85:
        return _other_tensor(random, file)
    counts = random.choice((0, 1, 2**20, 2**32, 2**63, 2**64 - 1))
    return random.choice((
        dataclasses.replace(file, version=random.choice((0, 1, 2, 4, 3 << 24))),
        dataclasses.replace(file, claimed_keys=counts),
        dataclasses.replace(file, claimed_tensors=counts),
        dataclasses.replace(file, magic=random.choice((b"GGML", b"\0\0\0\0", b"FUGG"))),
        dataclasses.replace(file, alignment=random.choice((8, 64))),
        dataclasses.replace(file, tail=bytes(100)),
    ))  # fmt: skip


def _other_key(random: Random, file: File) -> File:
    keys = list(file.keys)
    place = random.randrange(len(keys))
    name, kind, content = keys[place]
    pick = random.random()
    if pick < 0.1:
        del keys[place]
    elif pick < 0.15:
        keys.append(keys[place])
    elif pick < 0.2:
        keys[place] = (random.choice((*_BYTES, *_WORDS, keys[0][0])), kind, content)
    elif pick < 0.6 and kind == ARRAY:
        keys[place] = (name, kind, _other_array(random, content))
    else:
        keys[place] = (name, *_typed(random))
    return dataclasses.replace(file, keys=tuple(keys))


def _typed(random: Random) -> tuple[int, Any]:
    kind = random.choice((STRING, ARRAY, *_NUMBERS))
    if kind == STRING:
        return kind, random.choice((*_WORDS, *_BYTES))
    if kind == ARRAY:
        own = random.choice((STRING, *_NUMBERS))
        values = _WORDS if own == STRING else _NUMBERS[own]
        return kind, (own, [random.choice(values) for _ in range(random.choice((0, 1, 3, 300)))])
    return kind, random.choice(_NUMBERS[kind])


def _other_array(random: Random, content: tuple[int, list[Any]]) -> tuple[int, list[Any]]:
    kind, items = content[0], list(content[1])
    place = random.randrange(len(items) + 1)
    values = (*_WORDS, *_BYTES) if kind == STRING else _NUMBERS[kind]
    pick = random.random()
    if pick < 0.2:
        return kind, items[:place]
    if pick < 0.4:
        return kind, items * random.choice((2, 5))
    if pick < 0.5:
        return kind, items[::-1]
    return kind, [*items[:place], random.choice(values), *items[place + 1 :]]


def _other_tensor(random: Random, file: File) -> File:
    tensors = list(file.tensors)
    place = random.randrange(len(tensors))
    own, other = tensors[place], random.choice(tensors)
    extents = (0, 1, 2, 31, 32, 33, 256, 2**31, 2**40, 2**63, 2**64 - 1)
    shape = tuple(random.choice(extents) for _ in range(random.choice((0, 1, 2, 3, 4, 5))))
    offsets = (0, 8, 32, 2**20, 2**40, 2**63, 2**64 - 32)
    names = (
        other.name,
        "",
        "x" * 5000,
        "lm_head.weight",
        "model.norm.weight",
        "blk.1.ffn_up.weight",
    )
    changes: dict[str, Any] = random.choice((
        {"shape": shape, "data": b""},
        {"shape": own.shape[::-1]},
        {"kind": random.choice((*range(42), 99, 2**32 - 1)), "data": own.content()},
        {"offset": random.choice(offsets)},
        {"name": random.choice((*names, *_BYTES))},
        {"data": random.randbytes(len(own.content()))},
    ))  # fmt: skip
    pick = random.random()
    if pick < 0.1:
        del tensors[place]
    elif pick < 0.15:
        tensors.append(own)
    elif pick < 0.2:
        random.shuffle(tensors)
    else:
        tensors[place] = dataclasses.replace(own, **changes)
    return dataclasses.replace(file, tensors=tuple(tensors))


def _split(random: Random, file: File, folder: Path) -> Path:
    """Two parts, of which one may be wrong; the path of either."""
    middle = random.randrange(len(file.tensors) + 1)
    halves = (file.tensors[:middle], file.tensors[middle:])
    numbers = random.choice(((0, 1), (0, 1), (0, 1), (1, 0), (0, 0)))
    paths = []
    for i, (tensors, number) in enumerate(zip(halves, numbers, strict=True)):
        split = (
            ("split.no", U32, number),
            ("split.count", U32, random.choice((2, 2, 2, 2, 3, 0))),
            ("split.tensors.count", U32, len(file.tensors)),
        )
        part = dataclasses.replace(
            file, keys=(*(file.keys if i == 0 else ()), *split), tensors=tensors
        )
        paths.append(part.write(folder / f"model-{i + 1:05}-of-00002.gguf"))
    if random.random() < 0.2:
        random.choice(paths).unlink()
        return paths[0] if paths[0].exists() else paths[1]
    return random.choice(paths)
