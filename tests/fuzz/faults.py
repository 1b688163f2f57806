"""Faults of an accelerator while a model loads and generates."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from device_profiles import fast_accelerator
from fuzz import models
from fuzz.checkpoints import ARCHITECTURES
from fuzz.kind import Kind, sensible
from helm import LLM
from helm.errors import DeviceError, HelmError, OutOfMemoryError

_PROMPTS = [[(7 * i + p) % models.VOCAB for i in range(40 - 9 * p)] for p in range(3)]
_OPTIONS: dict[str, Any] = {"page_tokens": 16, "max_sequences": 2, "context": models.CONTEXT}
_BLOCK_BYTES = 2 * 16 * 2 * 16 * 4  # layers, positions, K and V, head_dim, f32


def tokens_of(llm: LLM) -> list[list[int]]:
    """Greedy tokens of several prompts at once."""
    found = llm.generate(_PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    return [completion.tokens for completion in found]


class Fault(Kind):
    """A simulated accelerator that is late, refuses memory or is lost: right tokens or an error
    that says so, and another LLM of the process goes on as before."""

    name = "fault"
    limit_s = 15.0
    inputs = 200

    def __init__(self, folder: Path) -> None:
        self._profile = fast_accelerator()
        self._models: list[tuple[Path, int, list[list[int]]]] = []
        for architecture in ARCHITECTURES:
            own = folder / architecture
            models.write_model(own, architecture)
            with models.load(own, **_OPTIONS) as llm:
                expected = tokens_of(llm)
            with self._shared(own, "sim:vram=1GiB") as llm:
                use = llm.plan.memory["accelerator"]
                whole = use.total_bytes + use.reserve_bytes - use.weights_bytes // 2
                sensible(tokens_of(llm) == expected, "other tokens without a fault")
            self._models.append((own, whole, expected))
        self._other = models.load(self._models[0][0], **_OPTIONS)

    def _shared(self, model: Path, device: str, **options: Any) -> LLM:
        return models.load(model, device=device, profile=self._profile, **{**_OPTIONS, **options})

    def run(self, random: Random, folder: Path) -> None:
        model, part, expected = random.choice(self._models)
        options: dict[str, Any] = {}
        if random.random() < 0.5:
            options["kv_vram_bytes"] = random.choice((8, 12, 20)) * _BLOCK_BYTES
            options["kv_overflow"] = random.choice(("stream", "cpu"))
        faults = [f"vram={random.choice((part, 1 << 30))}"]
        faults += [f"threads={random.choice((1, 2))}"]
        late = ("jitter=200us", "latency=300us", "link=50MB/s")
        faults += random.sample(late, random.choice((0, 1, 2)))
        refuse, lost = int(2 ** random.uniform(0, 6)), int(2 ** random.uniform(0, 11))
        faults += random.choice(([f"refuse={refuse}"], [f"lost={lost}"], [f"lost={lost}"], []))
        try:
            with self._shared(model, "sim:" + ",".join(faults), **options) as llm:
                self._generate(llm, expected)
        except (DeviceError, OutOfMemoryError) as error:
            sensible("refuse" in faults[-1] or "lost" in faults[-1], f"{faults}, but {error}")
            raise
        finally:
            sensible(tokens_of(self._other) == self._models[0][2], "other tokens of another LLM")

    def _generate(self, llm: LLM, expected: list[list[int]]) -> None:
        try:
            found = tokens_of(llm)
        except HelmError:
            try:
                again = tokens_of(llm)
            except HelmError:
                pass
            else:
                sensible(again == expected, "other tokens after a fault")
            raise
        sensible(found == expected, "other tokens beside a fault")
