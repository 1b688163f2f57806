"""Driving the native engine directly; imports neither torch nor transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm import _helm

Logits = npt.NDArray[np.float32]


def prompt_of(length: int) -> list[int]:
    return [(i * i * 7 + 3 * i + 11) % 131 for i in range(length)]


def logits_of(engine: _helm.Engine, tokens: list[int]) -> Logits:
    sequence = engine.open(len(tokens))
    try:
        return engine.forward(sequence, np.array(tokens, np.int32), True)
    finally:
        engine.close(sequence)


def greedy(engine: _helm.Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    requests = [_helm.Request(prompt=prompt, max_tokens=count) for prompt in prompts]
    generation = _helm.Generation(engine, requests)
    tokens: list[list[int]] = [[] for _ in prompts]
    while not generation.done:
        for token in generation.advance(0.0):
            tokens[token.request].append(token.id)
    return tokens


if __name__ == "__main__":  # plan, folder: the tokens of the tier that HELM_CPU_ISA names
    tested = _helm.Engine(Path(sys.argv[1]).read_text(), sys.argv[2])
    print(_helm.isa_choice()[0], greedy(tested, [prompt_of(50), prompt_of(3)], 30))
