"""The format of saved KV caches, read and written on its own."""

from __future__ import annotations

import json
import struct

_MASK = 2**64 - 1
_PRIMES = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_PREFIX = 24  # the magic, the header's length, its checksum


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK


def _mixed(lane: int, word: int) -> int:
    return _rotated((lane + word * _PRIMES[1]) & _MASK, 31) * _PRIMES[0] & _MASK


def xxh64(data: bytes, seed: int) -> int:
    """After the specification of xxHash, github.com/Cyan4973/xxHash."""
    p1, p2, p3, p4, p5 = _PRIMES
    whole = len(data) // 32 * 32
    state = seed + p5
    if whole:
        lanes = [(seed + p1 + p2) & _MASK, (seed + p2) & _MASK, seed, (seed - p1) & _MASK]
        for words in struct.iter_unpack("<4Q", data[:whole]):
            lanes = [_mixed(lane, word) for lane, word in zip(lanes, words, strict=True)]
        state = sum(_rotated(lanes[i], bits) for i, bits in enumerate((1, 7, 12, 18)))
        for lane in lanes:
            state = ((state ^ _mixed(0, lane)) * p1 + p4) & _MASK
    state = (state + len(data)) & _MASK
    rest = data[whole:]
    while len(rest) >= 8:
        state ^= _mixed(0, int.from_bytes(rest[:8], "little"))
        state = (_rotated(state, 27) * p1 + p4) & _MASK
        rest = rest[8:]
    if len(rest) >= 4:
        state ^= int.from_bytes(rest[:4], "little") * p1 & _MASK
        state = (_rotated(state, 23) * p2 + p3) & _MASK
        rest = rest[4:]
    for byte in rest:
        state = _rotated(state ^ byte * p5 & _MASK, 11) * p1 & _MASK
    state = (state ^ state >> 33) * p2 & _MASK
    state = (state ^ state >> 29) * p3 & _MASK
    return state ^ state >> 32


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
        checksum = xxh64(part, checksum)
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
