"""The format of saved KV caches, read and written on its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xxhash import xxh64_intdigest

_PREFIX = 24  # the magic, the header's length, its checksum
_ELEMENT = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
_SCALE = {"i8": 4}


def _parts(file: bytes) -> list[bytes]:
    """The header, then the blocks of pages."""
    size = int.from_bytes(file[8:16], "little")
    header = file[_PREFIX : _PREFIX + size]
    text = json.loads(header)
    blocks = -(-len(text["tokens"]) // text["page_tokens"])
    pages = file[_PREFIX + size :]
    step = len(pages) // blocks
    assert step * blocks == len(pages)
    return [header, *(pages[i * step + 8 : (i + 1) * step] for i in range(blocks))]


def sealed(parts: list[bytes]) -> bytes:
    file = b"HELM-KV2" + len(parts[0]).to_bytes(8, "little")
    checksum = 0
    for part in parts:
        checksum = xxh64_intdigest(part, checksum)
        file += checksum.to_bytes(8, "little") + part
    return file


def checksums(file: bytes) -> None:
    """Asserts that the file's checksums are those of the specification."""
    assert sealed(_parts(file)) == file


def replaced(file: bytes, old: bytes, new: bytes) -> bytes:
    """The file with other text in its header, and checksums of that."""
    header, *blocks = _parts(file)
    assert old in header
    return sealed([header.replace(old, new), *blocks])


class _Pages:
    """Where a block of so many positions has the row, and the scale, of each."""

    def __init__(self, header: dict[str, Any], page_tokens: int) -> None:
        dtype = header["dtype"].split()[0]  # of keys without biases, if more follows
        self.row = header["head_dim"] * _ELEMENT[dtype]
        self.scale = _SCALE.get(dtype, 0)
        self.page_tokens = page_tokens
        self.rows = page_tokens * self.row
        if self.scale:
            self.rows += -self.rows % 4
        self.slab = self.rows + page_tokens * self.scale
        self.slabs = header["layers"] * 2 * header["kv_heads"]

    def places(self, slot: int) -> Iterator[slice]:
        for slab in range(0, self.slabs * self.slab, self.slab):
            row, scale = slab + slot * self.row, slab + self.rows + slot * self.scale
            yield slice(row, row + self.row)
            yield slice(scale, scale + self.scale)


def repaged(file: bytes, page_tokens: int) -> bytes:
    """The same positions as a file whose pages hold so many has them."""
    header, *blocks = _parts(file)
    text = json.loads(header)
    old, new = _Pages(text, text["page_tokens"]), _Pages(text, page_tokens)
    positions = len(text["tokens"])
    out = [bytearray(new.slabs * new.slab) for _ in range(-(-positions // page_tokens))]
    for i in range(positions):
        source, target = blocks[i // old.page_tokens], out[i // page_tokens]
        where = zip(old.places(i % old.page_tokens), new.places(i % page_tokens), strict=True)
        for there, here in where:
            target[here] = source[there]
    name = b'"page_tokens":%d'
    assert name % old.page_tokens in header
    header = header.replace(name % old.page_tokens, name % page_tokens)
    return sealed([header, *map(bytes, out)])
