"""The runtime's count of scratch against the oracle's, and what it refuses to count."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

import naive_scratch
import search_cases
import small_models
from helm import _helm
from helm.base.formats import KV_ELEMENT_BYTES
from helm.compiler.memory import accelerator_workspace_bytes, overflow_bytes, workspace_bytes
from helm.errors import InvalidError
from helm.model.families import build_graph, load_config
from helm.model.graph import Graph, whole_layers
from helm.plan.kv import KvSpec
from helm.plan.schema import Limits

MODELS = [*small_models.CASES, "qwen3-14b", "llama-3.1-70b"]


@functools.cache
def graph_of(name: str) -> Graph:
    if name in small_models.CASES:
        return build_graph(load_config(small_models.model_dir(name)))
    return search_cases.model_of(name).graph


def random_setting(graph: Graph, rng: random.Random) -> tuple[Limits, KvSpec]:
    sequences = rng.choice((1, 2, 8, 9, 64))
    outputs = sequences + rng.choice((0, 0, 20))
    steps = outputs + rng.choice((0, 1, 30, 500, 2000))
    limits = Limits(rng.choice((1, 63, 64, 1000, 32768)), steps, outputs, sequences)
    dtype, kv = rng.choice((*KV_ELEMENT_BYTES, "i8")), graph.kv
    page_tokens = rng.choice((1, 16, 100, 512))
    return limits, KvSpec(dtype, page_tokens, kv.layers, kv.kv_heads, kv.head_dim, 0)


@pytest.mark.parametrize("name", MODELS)
def test_scratch_is_what_the_oracle_counts(name: str) -> None:
    graph, rng = graph_of(name), random.Random(name)
    for _ in range(30):
        limits, kv = random_setting(graph, rng)
        threads = rng.choice((1, 2, 16))
        first = rng.randrange(len(graph.units))
        units = list(graph.units[first : rng.randint(first, len(graph.units))])
        where = (limits, kv, threads, [unit.name for unit in units])
        found = workspace_bytes(graph, units, limits, kv, threads)
        assert found == naive_scratch.of_cpu(graph, units, limits, kv, threads), where
        for packed in (False, True):
            found = accelerator_workspace_bytes(graph, units, limits, kv, packed=packed)
            assert found == naive_scratch.of_accelerator(graph, units, limits, kv, packed), where
        far = overflow_bytes(graph, graph.units[1:-1], limits, kv, threads, 0).host_workspace
        assert far == naive_scratch.of_far_pages(graph, graph.units[1:-1], limits, kv, threads)


def test_keys_without_their_bias_take_more() -> None:
    graph = graph_of("qwen2_window")
    limits, (heads, size) = Limits(100, 8, 1, 1), dataclasses.astuple(graph.kv)[1:]
    kv = KvSpec("i8", 16, graph.kv.layers, heads, size, 0)
    plain = dataclasses.replace(kv, dtype="f16")
    with_bias = workspace_bytes(graph, graph.units, limits, kv, 1)
    assert with_bias > workspace_bytes(graph, graph.units, limits, plain, 1)


def test_what_no_memory_holds_is_64_tib() -> None:
    graph = graph_of("llama-3.1-70b")
    limits = Limits(1 << 30, 4096, 4096, 4096)
    kv = KvSpec("f16", 1, graph.kv.layers, graph.kv.kv_heads, graph.kv.head_dim, 0)
    for kind in ("cpu", "accelerator"):
        names = [unit.name for unit in graph.units]
        assert graph.footprint.workspace(names, kind, limits, kv, 4096) == 1 << 46


@pytest.mark.parametrize(
    ("limits", "page_tokens", "threads", "message"),
    [
        (Limits(0, 4, 2, 1), 16, 1, "context is 0; expected 1 to 2147483648"),
        (Limits(9, 4, 5, 1), 16, 1, "step_outputs is 5; expected 1 to 4"),
        (Limits(9, 4, 2, 3), 16, 1, "sequences is 3; expected 1 to 2"),
        (Limits(9, 4, 2, 1), 0, 1, "page_tokens is 0; expected"),
        (Limits(9, 4, 2, 1), 16, 5000, "threads is 5000; expected 1 to 4096"),
    ],
)
def test_settings_out_of_range_are_refused(
    limits: Limits, page_tokens: int, threads: int, message: str
) -> None:
    footprint = graph_of("qwen3").footprint
    kv = KvSpec("f16", page_tokens, whole_layers(1, 1), 1, 1, 0)
    with pytest.raises(InvalidError, match=message):
        footprint.workspace(["head"], "cpu", limits, kv, threads)


def test_a_unit_or_graph_that_is_none_is_refused() -> None:
    limits, kv = Limits(9, 4, 2, 1), KvSpec("f16", 16, whole_layers(1, 1), 1, 1, 0)
    with pytest.raises(InvalidError, match='the graph has no unit "tail"'):
        graph_of("qwen3").footprint.workspace(["tail"], "accelerator", limits, kv, 1)
    with pytest.raises(InvalidError, match='kind is "gpu"; expected "cpu" or "accelerator"'):
        graph_of("qwen3").footprint.workspace(["head"], "gpu", limits, kv, 1)
    with pytest.raises(InvalidError, match=r"\[graph\] not valid JSON"):
        _helm.Footprint("{")
    with pytest.raises(InvalidError, match=r"\[graph\] .*kv"):
        _helm.Footprint("{}")
