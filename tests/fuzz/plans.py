"""Plans, as Python and as the runtime read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from cut_plans import OWN, cut_plan

from device_profiles import fast_accelerator
from engine_helpers import partitioned
from fuzz import models, mutate
from fuzz.checkpoints import ARCHITECTURES
from fuzz.kind import Kind, sensible, tokens_are_sensible
from helm import _helm
from helm.compiler.cut.shares import shares_of, size_of
from helm.compiler.cut.units import Cut, LayerCut
from helm.errors import CapacityError
from helm.model.families import build_graph, parse_config
from helm.model.graph import Unit
from helm.plan.schema import Plan
from helm.plan.units import CPU

PROMPT = [3, 17, 99, 130, 0, 42, 42, 7]
SIM = "sim:vram=700MiB"


def valid_plans(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """A folder of weights and a plan for it: of every family, on the CPU and on two devices, with
    a prediction and without, with layers and the head cut."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for architecture in ARCHITECTURES:
        own = folder / architecture
        models.write_model(own, architecture)
        with models.load(own, context=64, max_sequences=2) as llm:
            plain = llm.plan
        limits = dataclasses.replace(plain.limits, step_tokens=16, step_outputs=16)
        small = dataclasses.replace(plain, limits=limits)
        count = len(plain.places)
        devices = ["cpu"] * (count // 2) + ["accelerator"] * (count - count // 2)
        plans = [small, partitioned(small, devices), partitioned(small, devices, overlap=True)]
        graph = build_graph(parse_config(models.config_of(architecture)))
        layers = tuple(
            LayerCut(0, _elements(layer.units[1]), home)
            for layer, home in zip(graph.layers, (CPU, OWN), strict=True)
        )
        plans.append(cut_plan(small, graph, Cut(CPU, layers, 40)))
        plans.append(cut_plan(small, graph, Cut(CPU, layers, 0), visits=4))
        with models.load(own, context=64, device=SIM, profile=fast_accelerator()) as llm:
            plans.append(llm.plan)
        found += [(own, plan.to_dict()) for plan in plans]
    return found


def _elements(mlp: Unit) -> int:
    """Some of an mlp's for the CPU; all of them where it is not cut."""
    return size_of(mlp) if isinstance(shares_of(mlp), str) else 32


class PlanFormat(Kind):
    """`Plan.from_json`."""

    name = "plan"
    inputs = 1500

    def __init__(self, folder: Path) -> None:
        self._plans = [plan for _, plan in valid_plans(folder)]

    def run(self, random: Random, folder: Path) -> None:
        document = mutate.json_value(random, random.choice(self._plans))
        plan = Plan.from_json(mutate.dumped(random, document))
        again = Plan.from_json(plan.to_json())
        sensible(again.to_dict() == plan.to_dict(), "a plan that reads otherwise when written")
        whole = sum(len(devices) == 1 for devices in plan.places)
        sensible(plan.units_cpu + plan.units_accelerator == whole, "units are counted")


class NativePlan(Kind):
    """`_helm.Engine` of a plan and a folder of weights."""

    name = "native_plan"
    inputs = 2000

    def __init__(self, folder: Path) -> None:
        self._plans = valid_plans(folder)

    def run(self, random: Random, folder: Path) -> None:
        origin, valid = random.choice(self._plans)
        document = mutate.json_value(random, valid)
        data = mutate.dumped(random, document)
        text = data.decode("utf-8", errors="replace")
        threads = random.choice((1, 1, 1, 2, 0 if _threads(document) <= 4 else 1))
        engine = _helm.Engine(text, str(origin), threads=threads, device=SIM)
        stats = engine.stats
        sensible(stats["weights_bytes"] >= 0, "weights of less than no bytes")
        sequence = engine.open(len(PROMPT) + 4)
        logits = engine.forward(sequence, np.array(PROMPT, np.int32), random.random() < 0.5)
        sensible(logits.ndim == 2 and logits.shape[0] in (1, len(PROMPT)), f"{logits.shape}")
        engine.close(sequence)
        generation = _helm.Generation(engine, [_helm.Request(prompt=PROMPT, max_tokens=3)])
        tokens: list[int] = []
        while not generation.done:
            for token in generation.advance(0.0):
                if token.finish == "error":  # there is no room for its pages, say
                    raise CapacityError("the request failed alone")
                tokens.append(token.id)
        tokens_are_sensible(tokens, 3, logits.shape[1])


def _threads(document: Any) -> int:
    found = document.get("threads") if isinstance(document, dict) else None
    return found if isinstance(found, int) else 4
