"""What plans and calls take of the host's memory, and refusals of what it does not hold. Grants
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.sizes import size_text
from helm.errors import OutOfMemoryError
from helm.machine.devices import SIM, Accelerator
from helm.machine.grants import file_key
from helm.machine.resources import memory_available, memory_granted
from helm.plan.weights import slice_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from helm.model.checkpoint import TensorInfo
    from helm.plan.schema import Plan
    from helm.text.prompts import Job

SMALL_BYTES = 16 << 20  # of a call: less than any plan's reserve
# Of results, in Python's objects, rounded up: of a token with its text; of its log-probability with
# what that belongs to; of each of the most likely tokens beside it. And of a prompt's token, kept.
_TOKEN_BYTES, _LOGPROB_BYTES, _LIKELY_BYTES, _PROMPT_BYTES = 256, 640, 384, 32


@dataclass(frozen=True)
class HostUse:
    """What a plan takes of the host's memory. own_bytes: all but what is there already and mapped
    files; loaded_bytes: of that, weights; simulated_bytes: of that, a simulated accelerator's.
    files: bytes of mapped weights by `file_key`."""

    own_bytes: int
    loaded_bytes: int
    simulated_bytes: int
    reserve_bytes: int
    files: Mapping[str, int]


def host_use(
    plan: Plan, infos: Mapping[str, TensorInfo], directory: str, accelerator: Accelerator | None
) -> HostUse:
    """infos, directory: of the checkpoint, or of tensors that are bound from memory."""
    use = plan.memory["cpu"]
    weights_bytes, mapped = use.weights_bytes, dict[str, int]()
    sizes = slice_bytes(plan.tensors, plan.slices, "cpu")
    for tensor, held in plan.held("cpu"):
        info, size = infos[tensor.whole], sizes[tensor.name]
        bound = tensor.part is None  # parts of what is bound are copied
        if info.file is None and info.weight_dtype == held.format and bound:
            weights_bytes -= size
        elif info.file is not None and held.access == "mapped":
            weights_bytes -= size
            mapped[info.file] = mapped.get(info.file, 0) + size
    own_bytes = use.total_bytes - use.weights_bytes + weights_bytes
    simulated_bytes = 0
    there = plan.memory.get(plan.accelerator or "")
    if accelerator is not None and accelerator.kind == SIM and there is not None:
        simulated_bytes = there.total_bytes
        weights_bytes += there.weights_bytes
    return HostUse(
        own_bytes + simulated_bytes,
        weights_bytes,
        simulated_bytes,
        use.reserve_bytes,
        {file_key(Path(directory, file)): size for file, size in mapped.items()},
    )


def check_plan(use: HostUse, free_bytes: int) -> None:
    """Plans keep to the host's memory, but take what is simulated for an accelerator's own."""
    taken = use.own_bytes + sum(use.files.values())
    if use.simulated_bytes == 0 or taken + use.reserve_bytes <= free_bytes:
        return
    raise OutOfMemoryError(
        f"[load] the simulated accelerator takes {size_text(use.simulated_bytes)} of the host's "
        f"memory, the CPU {size_text(taken - use.simulated_bytes)}, and "
        f"{size_text(use.reserve_bytes)} are reserved; {size_text(free_bytes)} are free; name less "
        "vram, or lower context="
    )


def granted_text() -> str:
    """The end of a refusal: what loaded models hold of the memory that looks free."""
    granted = memory_granted()
    if granted == 0:
        return ""
    return (
        f"; {size_text(granted)} more are granted to models that are loaded: close one, or load it "
        "with a smaller context"
    )


def pageable(stats: Mapping[str, Any]) -> list[str]:
    """Says so when memory that visits a loaded model's accelerator could not be page-locked."""
    size = stats["pageable_bytes"]
    if size == 0:
        return []
    return [
        f"{size_text(size)} of weights and KV pages that visit the accelerator could not be "
        "page-locked, so that prompts take longer than predicted"
    ]


def check_call(what: str, needed_bytes: int, remedy: str) -> None:
    """OutOfMemoryError unless the machine has that much for a call, beside what loaded models were
    granted."""
    if needed_bytes <= SMALL_BYTES:
        return
    free_bytes = memory_available()
    if needed_bytes + SMALL_BYTES > free_bytes:
        raise OutOfMemoryError(
            f"{what} may take {size_text(needed_bytes)} of memory, {size_text(free_bytes)} are "
            f"free{granted_text()}; {remedy}"
        )


def logits_array(tokens: int, vocab_size: int, step_tokens: int) -> npt.NDArray[np.float32]:
    """A place for logits [tokens, vocab_size]; checked likewise, with those of a step beside it."""
    import numpy

    needed = 4 * vocab_size * (tokens + min(tokens, step_tokens))
    check_call(f"[logits] logits of {tokens} tokens", needed, "give fewer tokens")
    return numpy.empty((tokens, vocab_size), numpy.float32)


def check_results(jobs: Iterable[Job], vocab_size: int) -> None:
    """Likewise, for what is returned of `jobs` if all become as long as they may."""
    needed = 0
    for job in jobs:
        each, logprobs = _TOKEN_BYTES, job.sampling.logprobs
        if logprobs is not None:
            each += _LOGPROB_BYTES + _LIKELY_BYTES * min(logprobs, vocab_size)
        needed += _PROMPT_BYTES * len(job.tokens) + each * job.max_tokens
    check_call(
        "[generate] results", needed, "give fewer prompts at once, or lower max_tokens or logprobs"
    )
