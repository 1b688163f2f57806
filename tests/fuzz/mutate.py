"""Mutations of bytes, JSON values, text and files, by a seeded generator; knows nothing of HELM."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from random import Random
from typing import Any

INTEGERS = (
    0, 1, -1, 2, 3, 7, 8, 15, 16, 17, 64, 127, 128, 255, 256, 1000, 4096, 4097, 65536,
    2**24, 2**24 + 1, 2**30, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64,
    -(2**31), -(2**63), 10**9, 10**18, 10**30, 10**400,
)  # fmt: skip
REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 1e-5, 1e-30, 1e30, 1e300, 1e308, 5e-324, -1e300, 0.1)
WORDS = (
    "", " ", "a", "null", "true", "0", "-1", "auto", "cpu", "f16", "bfloat16", "float32", "half",
    "torch.float32", "\ud800", "\x00", "a\x00b", "\n", "\u202e", "é", "e\u0301", "😀", "../x",
    "/etc/passwd",
    "{{ x }}", "%s%n", "<s>", "</s>", "<|im_end|>", "x" * 300, "model.safetensors",
    "LlamaForCausalLM",
)  # fmt: skip


def scalar(random: Random) -> Any:
    """A JSON value without children."""
    pick = random.random()
    if pick < 0.4:
        return random.choice(INTEGERS)
    if pick < 0.6:
        return random.choice(REALS)
    if pick < 0.8:
        return random.choice(WORDS)
    return random.choice((None, True, False, random.randint(-300, 300), random.random()))


def nested(random: Random, depth: int) -> Any:
    """Arrays or objects within one another."""
    value = scalar(random)
    for _ in range(depth):
        value = [value] if random.random() < 0.5 else {random.choice(WORDS): value}
    return value


def value(random: Random) -> Any:
    """Any JSON value, seldom a deep one."""
    pick = random.random()
    if pick < 0.7:
        return scalar(random)
    if pick < 0.8:
        return random.choice(([], {}, [[]], [{}], {"": {}}))
    if pick < 0.95:
        return [scalar(random) for _ in range(random.randint(1, 4))]
    return nested(random, random.choice((1, 3, 30, 200)))


def json_value(random: Random, original: Any, changes: int | None = None) -> Any:
    """`original` with one to a few places changed; a place is found by walking down, so that the
    leaves of large tables are not all that changes."""
    root = [copy.deepcopy(original)]
    for _ in range(changes or random.choice((1, 1, 1, 2, 3))):
        _change(random, root)
    return root[0]


def _change(random: Random, root: list[Any]) -> None:
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], (dict, list)) and holder[key] and random.random() < 0.85:
        holder = holder[key]
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    found = holder[key]
    pick = random.random()
    if pick < 0.15 and holder is not root:
        del holder[key]
    elif pick < 0.25 and isinstance(holder, dict):
        holder[random.choice((*WORDS, *map(str, holder)))] = copy.deepcopy(found)
    elif pick < 0.3 and isinstance(holder, list) and holder is not root:
        holder.insert(key, copy.deepcopy(found))
    elif pick < 0.4 and isinstance(holder, dict):
        other = random.choice(list(holder))
        holder[key], holder[other] = holder[other], found
    elif pick < 0.65 and isinstance(found, bool):
        holder[key] = not found
    elif pick < 0.65 and isinstance(found, int):
        steps = (found + 1, found - 1, -found, found * 2, found // 2, str(found), found % 97 + 0.0)
        holder[key] = random.choice(steps)
    elif pick < 0.65 and isinstance(found, float):
        holder[key] = random.choice((-found, found * 1e6, found / 1e6, str(found), 1, 0))
    elif pick < 0.65 and isinstance(found, str) and found:
        holder[key] = text(random, found)
    else:
        holder[key] = value(random)


def dumped(random: Random, document: Any) -> bytes:
    """JSON text of `document`, mostly as usual, at times as only few writers have it."""
    written = json.dumps(document, ensure_ascii=random.random() < 0.5)
    pick = random.random()
    if pick < 0.03:
        written = "\ufeff" + written
    elif pick < 0.06 and written.startswith("{") and isinstance(document, dict) and document:
        name = random.choice(list(document))
        written = "{" + json.dumps({name: value(random)})[1:-1] + ", " + written[1:]
    elif pick < 0.09:
        number = random.choice(("NaN", "Infinity", "-Infinity", "1e999", "01", "1" * 5000, "-"))
        written = written.replace(": ", f": {number}, ", 1)
    elif pick < 0.11:
        written = written + random.choice(("x", "{}", "\x00", " " * 1000, "]" * 10))
    elif pick < 0.13:
        deep = random.choice((100, 5000, 200_000))
        return b'{"a":' * deep if random.random() < 0.5 else b"[" * deep
    encoded = written.encode("utf-8", errors="surrogatepass")
    return octets(random, encoded) if random.random() < 0.05 else encoded


def octets(random: Random, original: bytes) -> bytes:
    """Bytes changed, cut, doubled or filled in."""
    data = bytearray(original)
    for _ in range(random.choice((1, 1, 2, 8))):
        place = random.randrange(len(data) + 1)
        length = random.choice((1, 1, 2, 4, 8, 64, 1000))
        pick = random.random()
        if pick < 0.4 and place < len(data):
            data[place] = random.choice((data[place] ^ (1 << random.randrange(8)), 0, 255))
        elif pick < 0.55:
            del data[place : place + length]
        elif pick < 0.7:
            data[place:place] = data[place : place + length]
        elif pick < 0.8:
            data[place:place] = random.randbytes(length)
        elif pick < 0.9:
            word = random.choice(INTEGERS) % 2**64
            data[place : place + 8] = word.to_bytes(8, "little")
        else:
            del data[place:]
    return bytes(data)


def text(random: Random, original: str) -> str:
    """Characters cut, doubled or replaced."""
    place, other = sorted(random.randrange(len(original) + 1) for _ in range(2))
    pick = random.random()
    if pick < 0.25:
        return original[:place] + original[other:]
    if pick < 0.5:
        return original[:other] + original[place:]
    if pick < 0.75:
        return original[:place] + random.choice(WORDS) + original[place:]
    return random.choice((original.upper(), original[::-1], original * 3, original + "\ud800"))


_MOST_BYTES = 64 << 20


def file(random: Random, path: Path) -> None:
    """Another thing, or nothing, in the place of a file."""
    readable = path.is_file() and path.stat().st_size <= _MOST_BYTES  # not one that was stretched
    data = path.read_bytes() if readable else b""
    if path.is_symlink() or path.exists():
        path.unlink()
    pick = random.randrange(11)
    if pick == 0:
        path.mkdir()
    elif pick == 1:
        os.mkfifo(path)
    elif pick == 2:
        path.symlink_to(path.name)
    elif pick == 3:
        path.symlink_to("absent")
    elif pick == 4:
        path.symlink_to(random.choice(("/dev/zero", "/dev/null", "/proc/self/mem", "/")))
    elif pick == 5:
        path.write_bytes(b"")
    elif pick == 6:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    elif pick == 7:
        with path.open("wb") as stream:  # sparse: far larger than memory
            stream.write(data)
            stream.truncate(random.choice((1 << 20, 1 << 34, 1 << 42)))
    elif pick == 8:
        path.write_bytes(data)
        path.chmod(stat.S_IWUSR if random.random() < 0.5 else 0)
    elif pick == 9:
        path.with_name("elsewhere").write_bytes(data)
        path.symlink_to("elsewhere")
    # else: it is missing
