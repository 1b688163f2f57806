"""Saved KV caches: damaged ones, and ones whose checksums fit what was changed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import kv_file
from fuzz import models, mutate
from fuzz.kind import Kind, NonsenseError, sensible, tokens_are_sensible
from helm import LLM
from helm.errors import HelmError

_PREFIX = 24  # bytes before the header: the magic, the header's length, its checksum
_STORY = "Once upon a time there was a little dog who lived by the sea with a girl named Lily. "
_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"context": 256},
    {"context": 256, "kv_dtype": "i8"},
    {"context": 256, "page_tokens": 16},
)


class KvFile(Kind):
    """`load_kv` of a file, then going on from what it holds."""

    name = "kv_file"
    inputs = 1500

    def __init__(self, folder: Path) -> None:
        self._files: list[bytes] = []
        self._expected: list[list[int]] = []
        for number, options in enumerate(_OPTIONS):
            path = folder / f"{number}.kv"
            with models.load(models.BUNDLED, **options) as llm:
                whole = llm.generate(_STORY, **_GREEDY, max_tokens=40).tokens
                llm.generate(_STORY, **_GREEDY, max_tokens=20)
                messages = [{"role": "user", "content": "Hello"}]
                llm.save_kv(path, messages=messages if number else None)
            self._files.append(path.read_bytes())
            self._expected.append(whole[20:23])

    def run(self, random: Random, folder: Path) -> None:
        number = random.randrange(len(_OPTIONS))
        with models.load(models.BUNDLED, **_OPTIONS[number]) as llm:
            self._load(random, folder, llm, number)

    def _load(self, random: Random, folder: Path, llm: LLM, number: int) -> None:
        file = self._files[number]
        path = folder / "x.kv"
        pick = random.random()
        if pick < 0.35:
            data = mutate.octets(random, file)
        elif pick < 0.85:
            data = self._resealed(random, file)
        else:
            data = random.choice(self._files)  # at times another LLM's
        path.write_bytes(data)
        if random.random() < 0.05:
            mutate.file(random, path)
        try:
            saved = llm.load_kv(path)
        except HelmError:
            tokens = llm.generate(_STORY, **_GREEDY, max_tokens=23).tokens
            sensible(tokens[20:] == self._expected[number], "other tokens after a refusal")
            raise
        sensible(saved.cached > 0, "nothing in the cache")
        if pick < 0.35 and data != file:
            raise NonsenseError("a damaged file was taken")
        vocab = llm.vocab_size
        if saved.tokens and all(token < vocab for token in saved.tokens):
            completion = llm.generate(saved.tokens, **_GREEDY, max_tokens=3)
            tokens_are_sensible(completion.tokens, 3, vocab)
            if data == file:
                sensible(completion.tokens == self._expected[number], "other tokens")

    def _resealed(self, random: Random, file: bytes) -> bytes:
        size = int.from_bytes(file[8:16], "little")
        header = file[_PREFIX : _PREFIX + size]
        document = json.loads(header)
        if random.random() < 0.4:
            metadata = json.loads(document["metadata"])
            changed = mutate.dumped(random, mutate.json_value(random, metadata))
            document["metadata"] = changed.decode(errors="replace")
        elif random.random() < 0.8:
            document = mutate.json_value(random, document)
        else:  # values of the pages themselves: numbers as any others, or none at all
            special = random.choice((b"\xff\xff", b"\x00\x7c", b"\x80\x7f", random.randbytes(2)))
            place = _PREFIX + size + 8 + random.randrange(1000)
            file = file[:place] + special * 8 + file[place + 16 :]
        return kv_file.replaced(file, header, mutate.dumped(random, document))
