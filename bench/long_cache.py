"""Fills a sequence's KV cache with that of a short prompt again and again.

That takes seconds where a prompt of 32K tokens takes minutes; values do not matter to speed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from helm.plan import Plan

SHORT = 512  # tokens of the prompt that fills the cache
_MAGIC_BYTES = 8  # of a KV file, then the size of its header in as many


def write_long_cache(engine: Any, kept: Any, plan: Plan, tokens: int, path: Path) -> None:
    """Writes the KV file of a sequence of `tokens` positions. kept: the engine's PrefixCache, which
    is emptied."""
    prompt = [(i * 7919 + 13) % plan.model.vocab_size for i in range(SHORT)]
    sequence, _ = kept.open(prompt, SHORT)
    engine.forward(sequence, np.array(prompt, np.int32))
    kept.keep(sequence, prompt)
    short = path.with_suffix(".short")
    kept.save(prompt, str(short))
    kept.clear()
    with short.open("rb") as source, path.open("wb") as target:
        magic = source.read(_MAGIC_BYTES)
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        blocks = source.read()
        header["tokens"] = (prompt * -(-tokens // SHORT))[:tokens]
        text = json.dumps(header).encode()
        target.write(magic + len(text).to_bytes(8, "little") + text)
        size = len(blocks) // -(-SHORT // plan.kv.page_tokens)
        for block in range(-(-tokens // plan.kv.page_tokens)):
            at = block * size % len(blocks)
            target.write(blocks[at : at + size])
    short.unlink()
