"""The format of saved KV caches, read and written on its own."""

from __future__ import annotations

import json

from xxhash import xxh64_intdigest

_PREFIX = 24  # the magic, the header's length, its checksum


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


def _sealed(parts: list[bytes]) -> bytes:
    file = b"HELM-KV2" + len(parts[0]).to_bytes(8, "little")
    checksum = 0
    for part in parts:
        checksum = xxh64_intdigest(part, checksum)
        file += checksum.to_bytes(8, "little") + part
    return file


def checksums(file: bytes) -> None:
    """Asserts that the file's checksums are those of the specification."""
    assert _sealed(_parts(file)) == file


def replaced(file: bytes, old: bytes, new: bytes) -> bytes:
    """The file with other text in its header, and checksums of that."""
    header, *blocks = _parts(file)
    assert old in header
    return _sealed([header.replace(old, new), *blocks])
