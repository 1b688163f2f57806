"""All kinds of input by name."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.arguments import Arguments
from fuzz.checkpoints import Checkpoint, Quantized, Shards
from fuzz.configs import Config, GenerationConfig, PlanCommand
from fuzz.containers import Container
from fuzz.faults import Fault
from fuzz.gguf_files import GgufFile
from fuzz.kind import Kind
from fuzz.kv_files import KvFile
from fuzz.native_calls import NativeCalls
from fuzz.pieces import Pieces
from fuzz.plans import NativePlan, PlanFormat
from fuzz.profiles import ProfileFile
from fuzz.signals import Signal
from fuzz.tokenizers import ChatTemplate, TokenizerFiles

KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (
        Checkpoint, Shards, Quantized, Pieces, GgufFile, Config, GenerationConfig, PlanCommand,
        TokenizerFiles, ChatTemplate, PlanFormat, NativePlan, ProfileFile, KvFile, Arguments,
        NativeCalls, Fault, Signal, Container,
    )
}  # fmt: skip


def unavailable(name: str) -> str:
    """Why this machine has no such inputs; empty where it has."""
    return Container.unavailable() if name == Container.name else ""


def inputs_of(counts: dict[str, int], first: int = 0) -> Iterator[tuple[str, int]]:
    """(kind, index) of so many inputs of each, one kind after the other."""
    return ((name, first + i) for name, count in counts.items() for i in range(count))
