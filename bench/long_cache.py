"""Fills a sequence's KV cache with that of a short prompt again and again.

That takes seconds where a prompt of 32K tokens takes minutes; values do not matter to speed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh64_intdigest

from helm.plan.schema import Plan

SHORT = 512  # tokens of the prompt that fills the cache
# Of a KV file (cpp/kv/file.cc): its magic, the size of its header, the checksum of that; of
# each checksum, before header and blocks, with the one before as its seed.
_PREFIX_BYTES, _CHECKSUM_BYTES = 24, 8


def write_long_cache(engine: Any, kept: Any, plan: Plan, tokens: int, path: Path) -> None:
    """Writes the KV file of a sequence of `tokens` positions. kept: the engine's PrefixCache, which
    is emptied."""
    prompt = [(i * 7919 + 13) % plan.model.vocab_size for i in range(SHORT)]
    kept.clear()
    sequence, _ = kept.open(prompt, SHORT)
    engine.forward(sequence, np.array(prompt, np.int32))
    kept.keep(sequence, prompt)
    short = path.with_suffix(".short")
    kept.save(prompt, str(short))
    kept.clear()
    with short.open("rb") as source, path.open("wb") as target:
        prefix = source.read(_PREFIX_BYTES)
        header = json.loads(source.read(int.from_bytes(prefix[8:16], "little")))
        size = plan.kv.block_bytes
        blocks = []
        while source.read(_CHECKSUM_BYTES):
            blocks.append(source.read(size))
        header["tokens"] = (prompt * -(-tokens // SHORT))[:tokens]
        text = json.dumps(header).encode()
        target.write(prefix[:8] + len(text).to_bytes(8, "little"))
        checksum = 0
        pages = (blocks[i % len(blocks)] for i in range(-(-tokens // plan.kv.page_tokens)))
        for part in itertools.chain((text,), pages):
            checksum = xxh64_intdigest(part, checksum)
            target.write(checksum.to_bytes(_CHECKSUM_BYTES, "little") + part)
    short.unlink()
