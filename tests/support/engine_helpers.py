"""Driving the native engine directly; imports neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm import _helm
from helm.base.formats import uncompressed
from helm.compiler.tensors import slices_of
from helm.model.graph import Attention
from helm.plan.schema import Plan, Schedule
from helm.plan.units import devices_named

Logits = npt.NDArray[np.float32]


def prompt_of(length: int) -> list[int]:
    return [(i * i * 7 + 3 * i + 11) % 131 for i in range(length)]


def logits_of(engine: _helm.Engine, tokens: list[int]) -> Logits:
    sequence = engine.open(len(tokens))
    try:
        return engine.forward(sequence, np.array(tokens, np.int32), True)
    finally:
        engine.close(sequence)


def greedy(
    engine: _helm.Engine,
    prompts: list[list[int]],
    count: int,
    prefixes: _helm.PrefixCache | None = None,
) -> list[list[int]]:
    requests = [_helm.Request(prompt=prompt, max_tokens=count) for prompt in prompts]
    generation = _helm.Generation(engine, requests, prefixes)
    tokens: list[list[int]] = [[] for _ in prompts]
    while not generation.done:
        for token in generation.advance(0.0):
            tokens[token.request].append(token.id)
    return tokens


def partitioned(
    plan: Plan, devices: Sequence[str], *, overlap: bool = False, decode_groups: int = 1
) -> Plan:
    """`plan` on other devices ("cpu" or "accelerator"), with its KV pages there and plenty of
    memory. devices: of the embedding, every layer and the head, or of every unit."""
    if len(devices) != len(plan.units):
        first, *of_layers, last = devices
        devices = (first, *(device for device in of_layers for _ in range(2)), last)
    layers = {
        op.layer
        for unit, device in zip(plan.units, devices, strict=True)
        for op in unit.ops
        if device == "accelerator" and isinstance(op, Attention)
    }
    own = sum(plan.kv.entry_pages(plan.kv.layers[layer]) for layer in layers)
    units = tuple(
        dataclasses.replace(unit, device=device)
        for unit, device in zip(plan.units, devices, strict=True)
    )
    formats = {held.tensor: held.format for held in plan.slices}
    use = dataclasses.replace(plan.memory["cpu"], reserve_bytes=64 << 20)
    return dataclasses.replace(
        plan,
        slices=slices_of(
            plan.tensors,
            units,
            lambda name, at: formats[name] if at == "cpu" else uncompressed(formats[name]),
        ),
        units=units,
        devices=devices_named(("cpu", "accelerator")),
        memory={**plan.memory, "accelerator": use},
        schedule=Schedule(
            prefill_overlap=overlap,
            decode_groups=decode_groups,
            pages={"cpu": plan.kv.pages - own, "accelerator": own},
        ),
    )


def logits_in_chunks(engine: _helm.Engine, tokens: list[int], chunk: int) -> Logits:
    sequence = engine.open(len(tokens))
    pieces = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    logits = [engine.forward(sequence, np.array(piece, np.int32), True) for piece in pieces]
    engine.close(sequence)
    return np.concatenate(logits)


# plan, folder[, file]: tokens of the tier that HELM_CPU_ISA names; its logits, whole and chunked
if __name__ == "__main__":
    tested = _helm.Engine(Path(sys.argv[1]).read_text(), sys.argv[2])
    if len(sys.argv) > 3:
        prompt = prompt_of(300)
        chunked = {f"by_{n}": logits_in_chunks(tested, prompt, n) for n in (1, 7, 13, 128)}
        np.savez(sys.argv[3], whole=logits_of(tested, prompt), **chunked)
    print(_helm.isa_choice()[0], greedy(tested, [prompt_of(50), prompt_of(3)], 30))
