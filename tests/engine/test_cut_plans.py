"""Layers and the head cut between the CPU and a simulated device: the bits are those of the same
pieces one after the other on the CPU, and within rounding those of the whole plan."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import quantised_models
import torch
from cut_plans import OWN, cut_plan, elements_of, graph_of, heads_of, homes_of, random_cut
from model_tensors import tensors_of
from plans import make_plan

import gguf_models
import small_models
from engine_helpers import greedy, logits_in_chunks, prompt_of
from helm import _helm
from helm.compiler.cut.units import Cut, LayerCut
from helm.compiler.load_cost import LoadingRequest
from helm.errors import InvalidError
from helm.model.families import build_graph, load_config
from helm.model.graph import Graph
from helm.model.hub import bundled_model
from helm.model.model_files import read_model
from helm.model.source import Source
from helm.model.torch_module import module_config, module_weights
from helm.plan.schema import Plan
from helm.plan.units import CPU
from helm.plan.weights import slice_bytes
from whole import WHOLE

MODELS = [*small_models.CASES, *small_models.WIDE]
DEVICES = ("sim", "sim:jitter=200us")
# Tokens from which on weights of the CPU's units visit, and whether the accelerator's own do.
WAYS = ((0, False), (4, False), (0, True))
PROMPTS = [prompt_of(n) for n in (37, 5, 61, 18)]
OPTIONS = {
    "threads": 2, "memory_bytes": 4 << 30, "kv_dtype": "f32", "page_tokens": 16,
    "step_tokens": 24, "max_sequences": 4, "context": 100,
}  # fmt: skip


@functools.cache
def made(name: str, dtype: str = "f32") -> tuple[Plan, Graph, str]:
    """A small model's plan on the CPU, its graph and its folder."""
    folder = small_models.model_dir(name, dtype)
    plan = make_plan(load_config(folder), tensors_of(folder), **OPTIONS)
    return plan, graph_of(folder), str(folder)


def logits(plan: Plan, folder: str, device: str = "cpu", tensors: Any = None) -> Any:
    """Of a prompt in steps of 7 tokens, and in one of 24 and its rest."""
    engine = _helm.Engine(plan.to_json(), folder, tensors or {}, device=device)
    found = [logits_in_chunks(engine, PROMPTS[0], chunk) for chunk in (7, 24)]
    streamed = engine.stats["streamed_steps"]
    assert (streamed > 0) == (plan.schedule.visit_tokens > 0 or any(plan.lacking))
    return np.stack(found)


def check(
    plan: Plan, graph: Graph, folder: str, cut: Cut, *, devices: Any = ("sim",), tensors: Any = None
) -> npt.NDArray[np.float32]:
    """The logits of a cut, which are the same wherever its pieces are and when."""
    want: npt.NDArray[np.float32]
    want = logits(cut_plan(plan, graph, cut, alone=True), folder, tensors=tensors)
    for device, (visits, lacking) in itertools.product(devices, WAYS):
        own = cut_plan(plan, graph, cut, visits=visits, lacking=lacking)
        assert own.cut
        assert Plan.from_json(own.to_json()) == own
        if visits and not any(u.device == CPU and u.layer is not None for u in own.units):
            continue  # nothing visits
        if lacking and not any(own.lacking):
            assert all(u.device == CPU or u.layer is None for u in own.units)
            continue
        got = logits(own, folder, device, tensors)
        said = f"{cut} on {device}, visits {visits}, lacking {lacking}"
        np.testing.assert_array_equal(got, want, said)
    return want


def assert_near(got: Any, want: Any, rounding: float = 2.0**-24) -> None:
    bound = 32 * rounding * np.abs(want).max(axis=-1, keepdims=True)
    assert (np.abs(got - want) <= bound).all()


def every_cut(plan: Plan, graph: Graph) -> Iterator[Cut]:
    """Heads, elements and home of all layers alike, by rows of the vocabulary."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    _, attention, mlp, *_ = graph.units
    heads = [0, *heads_of(attention, tensors), plan.kv.kv_heads]
    elements = [0, *elements_of(mlp, tensors), 1 << 20]
    sizes = (heads, elements, homes_of(graph), (0, 1, 48, 130, 131), (CPU, OWN))
    for h, e, home, rows, embedding in itertools.product(*sizes):
        layers = tuple(LayerCut(h, e, home) for _ in graph.layers)
        if cut_plan(plan, graph, Cut(embedding, layers, rows)).cut:
            yield Cut(embedding, layers, rows)


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_has_the_bits_of_its_pieces_on_the_cpu(name: str) -> None:
    plan, graph, folder = made(name)
    whole = logits(plan, folder)
    rng = random.Random(name)
    cuts = [random_cut(graph, plan, rng)]
    if WHOLE:
        cuts += [*every_cut(plan, graph), *(random_cut(graph, plan, rng) for _ in range(20))]
    for cut in cuts:
        devices = DEVICES if WHOLE else (rng.choice(DEVICES),)
        assert_near(check(plan, graph, folder, cut, devices=devices), whole)


def test_models_are_cut_in_all_ways() -> None:
    """Somewhere among those of the test before."""
    ways = set()
    for name in MODELS:
        plan, graph, _ = made(name)
        cut = cut_plan(plan, graph, random_cut(graph, plan, random.Random(name)))
        ways |= {(u.kind, u.name.split(".")[-1], u.device) for u in cut.units}
    found = {way for way in ways if way[1] in ("home", "guest")}
    sides = itertools.product(("attention", "mlp"), ("home", "guest"), (CPU, OWN))
    assert found == {*sides, ("head", "home", CPU), ("head", "guest", OWN)}


@pytest.mark.parametrize("home", [CPU, OWN])
def test_several_sequences_and_shared_prefixes(home: str) -> None:
    plan, graph, folder = made("qwen3")
    cut = Cut(CPU, (LayerCut(1, 32, home), LayerCut(1, 64, home)), 77)
    alone = cut_plan(plan, graph, cut, alone=True)
    prompts = [prompt_of(40) + tail for tail in ([1], [2, 3], prompt_of(9), [4], [5, 6], [7])]
    first = _helm.Engine(alone.to_json(), folder)
    want = greedy(first, prompts, 12)
    assert want == greedy(_helm.Engine(plan.to_json(), folder), prompts, 12)
    for visits, device in itertools.product((0, 4), DEVICES):
        own = cut_plan(plan, graph, cut, visits=visits)
        engine = _helm.Engine(own.to_json(), folder, device=device)
        prefixes = _helm.PrefixCache(engine)
        for _ in range(2):
            assert greedy(engine, prompts, 12, prefixes) == want
        assert engine.stats["streamed_steps"] > 0 or not visits


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_saved_kv_passes_between_whole_and_cut_plans(kv_dtype: str, tmp_path: Path) -> None:
    plan, graph, folder = made("qwen3")
    plan = dataclasses.replace(plan, kv=dataclasses.replace(plan.kv, dtype=kv_dtype))
    layers = (LayerCut(1, 32), LayerCut(0, 64, OWN))
    cut = cut_plan(plan, graph, Cut(CPU, layers, 77))
    tokens, path = prompt_of(60), tmp_path / "x.kv"

    def saved(plan: Plan, device: str) -> tuple[bytes, Any]:
        engine = _helm.Engine(plan.to_json(), folder, device=device)
        prefixes = _helm.PrefixCache(engine)
        out = greedy(engine, [tokens], 12, prefixes)
        prefixes.save(tokens, str(path))
        return path.read_bytes(), out

    file, out = saved(plan, "cpu")
    files = {"cpu": file, "sim": saved(cut, "sim")[0]}
    for (of, here), device in itertools.product(files.items(), ("cpu", "sim")):
        path.write_bytes(here)
        other = plan if device == "cpu" else cut
        engine = _helm.Engine(other.to_json(), folder, device=device)
        prefixes = _helm.PrefixCache(engine)
        assert prefixes.load(str(path))[0] == tokens
        assert prefixes.save(tokens, str(tmp_path / "y.kv")) > 0
        assert (tmp_path / "y.kv").read_bytes() == here, (of, device)
        assert greedy(engine, [tokens], 12, prefixes) == out


@pytest.mark.parametrize("policy", ["f16", "bf16", "q8", "q4"])
def test_formats_that_are_made_while_loading(policy: str, tmp_path: Path) -> None:
    folder = quantised_models.wide_model(tmp_path / "wide")
    plan = make_plan(load_config(folder), tensors_of(folder), **OPTIONS, dtype=policy)
    assert {held.format for held in plan.slices} > {"f32"}
    graph = graph_of(folder)
    for home, heads in ((CPU, 1), (OWN, 1)):
        cut = Cut(CPU, (LayerCut(heads, 224, home), LayerCut(heads, 288, home)), 48)
        check(plan, graph, str(folder), cut)


def test_compressed_weights_of_the_cpu_are_bf16_beside_it() -> None:
    folder = bundled_model()
    config, infos = load_config(folder), tensors_of(folder)
    graph = build_graph(config)
    plain, small = (
        make_plan(config, infos, loading=LoadingRequest(weights), **OPTIONS)
        for weights in ("copied", "compressed")
    )
    tensors = {tensor.name: tensor for tensor in plain.tensors}
    heads, elements = heads_of(graph.units[1], tensors)[0], elements_of(graph.units[2], tensors)[3]
    layers = [LayerCut(heads, elements, home) for home in (CPU, OWN)]
    cut = Cut(CPU, tuple(layers[i % 2] for i in range(len(graph.layers))), config.vocab_size // 3)
    want = logits(cut_plan(plain, graph, cut, alone=True), str(folder))
    own = cut_plan(small, graph, cut)
    held = {(s.device, s.format) for s in own.slices}
    assert held >= {(CPU, "bf16c"), (OWN, "bf16")}
    assert (OWN, "bf16c") not in held
    np.testing.assert_array_equal(logits(own, str(folder), "sim"), want)


def _stored(folder: Path, name: str) -> Path:
    """A wide model as another format stores it, with heads of whole spans."""
    source = quantised_models.wide_model(folder / "source", head_dim=128)
    if name in _PIECES:
        quantised_models.write(source, folder / "model", folder / "dense", *_PIECES[name]())
        return folder / "model"
    kind = gguf.GGMLQuantizationType[name]
    return gguf_models.write(source, folder / "x.gguf", kind)


_PIECES: dict[str, Any] = {
    "gptq": quantised_models.gptq, "awq": quantised_models.awq,
    "compressed-tensors": quantised_models.compressed, "fp8": quantised_models.fp8,
    "mxfp4": quantised_models.mxfp4,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "BF16", *_PIECES])
def test_what_checkpoints_store_packed(name: str, tmp_path: Path) -> None:
    """Cut on the borders of blocks, where the parts have the values of the whole."""
    files = read_model(_stored(tmp_path, name))
    weights = files.weights()
    plan = make_plan(weights.config, weights.tensors, **OPTIONS)
    cut = Cut(CPU, (LayerCut(1, 256), LayerCut(1, 256, OWN)), 48)
    made_of = {t.source.stored for t in plan.tensors if isinstance(t.source, Source)}
    assert made_of - {"f32", "bf16"} or name == "BF16"
    folder = str(files.folder)
    got = check(plan, build_graph(weights.config), folder, cut)
    whole = logits(plan, folder)
    np.testing.assert_allclose(got, whole, rtol=0, atol=0.1 * whole.std())


def test_a_module_in_memory_is_cut_where_it_lies() -> None:
    module = small_models.make_model("qwen2_wide", "f32")
    weights = module_weights(module, module_config(module))
    graph = build_graph(weights.config)
    plan = make_plan(weights.config, weights.infos, **OPTIONS)
    cut = Cut(CPU, (LayerCut(1, 32), LayerCut(1, 64, OWN)), 48)
    got = check(plan, graph, "", cut, tensors=weights.tensors)
    assert_near(got, logits(plan, "", tensors=weights.tensors))
    lacking = {k: v for k, v in weights.tensors.items() if "down_proj" not in k}
    with pytest.raises(InvalidError, match=r"down_proj\.weight"):
        _helm.Engine(cut_plan(plan, graph, cut).to_json(), "", lacking, device="sim")
    wrong = {**weights.tensors, "model.norm.weight": torch.zeros(3)}
    with pytest.raises(InvalidError, match=r"model\.norm\.weight"):
        _helm.Engine(cut_plan(plan, graph, cut).to_json(), "", wrong, device="sim")


def test_mapped_weights_are_cut_by_rows() -> None:
    plan, graph, folder = made("llama")
    cut = Cut(CPU, (LayerCut(1, 32), LayerCut(1, 64)), 48)
    own = cut_plan(plan, graph, cut)
    tensors = {tensor.name: tensor for tensor in own.tensors}

    def rows_alone(name: str) -> bool:
        tensor = tensors[name]
        return len(tensor.shape) == 2 and tensor.shape[1] == tensor.whole_shape[1]

    slices = tuple(
        dataclasses.replace(held, access="mapped")
        if held.device == CPU and rows_alone(held.tensor) else held
        for held in own.slices
    )  # fmt: skip
    mapped = Plan.from_json(dataclasses.replace(own, slices=slices).to_json())
    assert sum(held.access == "mapped" for held in mapped.slices) > 6
    np.testing.assert_array_equal(logits(mapped, folder, "sim"), logits(own, folder, "sim"))


def test_parts_take_the_bytes_that_the_plan_counts() -> None:
    plan, graph, folder = made("llama_tied_sharded")
    cut = Cut(CPU, (LayerCut(1, 32), LayerCut(1, 64, OWN)), 48)
    own = cut_plan(plan, graph, cut)
    stats = _helm.Engine(own.to_json(), folder, device="sim").stats["devices"]
    for use, device in zip(stats, (CPU, OWN), strict=True):
        sizes = slice_bytes(own.tensors, own.slices, device)
        held = sum(-(-size // 256) * 256 for size in sizes.values())
        assert sum(sizes.values()) <= use["weights_bytes"] <= held
