"""Plans: dtypes, numbers, and what happens when memory is short."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_tensors import tensors_of
from plans import make_plan

import small_models
from helm.base import formats
from helm.compiler.load_cost import LoadingRequest
from helm.compiler.problem import beside_reserve, host_reserve
from helm.errors import CheckpointError, InvalidError, OutOfMemoryError
from helm.machine.profile import load_profile
from helm.model.checkpoint import TensorInfo
from helm.model.checkpoint.safetensors import read_checkpoint
from helm.model.families import build_graph, load_config, parse_config
from helm.model.hub import bundled_model
from helm.model.source import Extent
from helm.plan.records import Workload
from helm.plan.schema import Plan
from search_cases import config_of

MIB = 1 << 20
GIB = 1 << 30
QWEN3_06B = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
)
TOKEN_BYTES = 28 * 2 * 8 * 128 * 2  # K and V of one position over all layers
WEIGHT_BYTES = 2 * (151936 * 1024 + 28 * (1024 * (4096 + 2048) + 3 * 1024 * 3072)) + 4 * (
    28 * (2 * 1024 + 2 * 128) + 1024
)


def plan_of(name="qwen3", dtype_stored="f32", **options):
    folder = small_models.model_dir(name, dtype_stored)
    arguments = {"threads": 1, "memory_bytes": 4 * GIB, **options}
    return make_plan(load_config(folder), tensors_of(folder), **arguments)


def big(**options):
    arguments = {"threads": 2, "memory_bytes": 64 * GIB, **options}
    return make_plan(QWEN3_06B, None, **arguments)


EMBEDDING = "model.embed_tokens.weight"


def formats_of(plan, dimensions):
    return {held.format for tensor, held in plan.held("cpu") if len(tensor.shape) == dimensions}


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
def test_auto_dtypes_follow_the_checkpoint(stored):
    plan = plan_of("qwen3", stored)
    assert plan.kv.dtype == stored
    for tensor, held in plan.held("cpu"):
        assert held.format == ("f32" if len(tensor.shape) == 1 else stored)
        assert tensor.source.stored == stored


def test_explicit_dtypes_convert_matrices_only():
    plan = plan_of("qwen3", "f32", dtype="bf16", kv_dtype="f16")
    assert plan.kv.dtype == "f16"
    assert formats_of(plan, 2) == {"bf16"}
    assert formats_of(plan, 1) == {"f32"}
    assert {tensor.source.stored for tensor in plan.tensors} == {"f32"}
    assert plan_of("qwen3", "f32", dtype="bf16").kv.dtype == "bf16"


def test_numbers_of_a_real_model():
    plan = big()
    use = plan.memory["cpu"]
    assert use.weights_bytes == WEIGHT_BYTES
    assert plan.kv.page_bytes == 2 * MIB
    assert plan.limits.context == 40960
    assert plan.kv.pages == 8 * 80 * 28
    assert use.kv_bytes == 8 * 40960 * TOKEN_BYTES
    assert use.activations_bytes == 4 * (
        512 * (1024 + 1024 + 4096 + 2048 + 6144 + 3072)
        + 8 * (1024 + 1024 + 2048 + 6144 + 3072 + 151936)
    )
    assert plan.notices == ()
    assert all(tensor.source is None for tensor in plan.tensors)


def test_fewer_pages_when_memory_is_short():
    plan = big(memory_bytes=16 * GIB, context=40960)
    assert plan.limits.context == 40960
    assert 80 * 28 <= plan.kv.pages < 8 * 80 * 28
    assert plan.kv.pages % 28 == 0
    assert len(plan.notices) == 1
    assert "KV cache holds" in plan.notices[0]
    left = 16 * GIB - 512 * MIB - plan.memory["cpu"].total_bytes
    assert 0 <= left < 28 * plan.kv.page_bytes, "as many as fit, and no more"


def test_context_shrinks_only_when_not_asked_for():
    plan = big(memory_bytes=4 * GIB)
    assert 512 <= plan.limits.context < 40960
    assert plan.limits.context % 512 == 0
    assert plan.kv.pages == plan.limits.context // 512 * 28
    assert f"context of {plan.limits.context:,} tokens" in plan.notices[0]
    use = plan.memory["cpu"]
    assert 254 * MIB < use.reserve_bytes <= 256 * MIB  # a sixteenth
    assert use.total_bytes + use.reserve_bytes <= 4 * GIB
    with pytest.raises(OutOfMemoryError, match=r"a context of (\d+) would fit") as caught:
        big(memory_bytes=4 * GIB, context=40960)
    fits = int(str(caught.value).split("a context of ")[-1].split()[0])
    assert big(memory_bytes=4 * GIB, context=fits).limits.context == fits


def test_the_reserve_is_a_share_of_the_memory_within_bounds():
    taken = [0, 279 * MIB, 960 * MIB - 1, 960 * MIB, 960 * MIB + 1, 3 * GIB, 7680 * MIB, 80 * GIB]
    reserves = [int(host_reserve(size)) for size in taken]
    assert reserves[:2] == [64 * MIB] * 2
    assert reserves[-2:] == [512 * MIB] * 2
    assert reserves[5] == -(-3 * GIB // 15)
    for size, reserve in zip(taken, reserves, strict=True):
        assert beside_reserve(size + reserve) == size
        assert beside_reserve(size + reserve - 1) < size


def test_a_small_plan_fits_a_small_container():
    plan = plan_of("qwen3", "f32", max_sequences=8, memory_bytes=GIB)
    needed = plan.memory["cpu"].total_bytes + 64 * MIB
    tight = plan_of("qwen3", "f32", max_sequences=8, memory_bytes=needed)
    assert (tight.limits, tight.kv, tight.memory) == (plan.limits, plan.kv, plan.memory)


def test_refusal_is_itemised():
    with pytest.raises(OutOfMemoryError) as caught:
        big(memory_bytes=GIB)
    message = str(caught.value)
    assert "weights 1.11 GiB" in message
    assert "KV cache 4.38 GiB for a context of 40960" in message
    assert "reserve 378.0 MiB" in message  # with the whole cache; less with what fits
    assert "1.00 GiB are available" in message
    assert "even a context of 512 lacks" in message
    lacks = float(message.split("lacks ")[1].split()[0])
    assert big(memory_bytes=GIB + round((lacks + 0.1) * MIB)).limits.context == 512


@pytest.mark.parametrize("memory", [-5, 0, 1])
def test_no_memory_at_all(memory):
    with pytest.raises(OutOfMemoryError):
        plan_of(memory_bytes=memory)


def test_short_context_takes_a_short_page():
    plan = big(context=100)
    assert plan.kv.page_tokens == 100
    assert plan.kv.pages == 8 * 28


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 40961}, "context of 40961 .* 1 to 40960"),
        ({"context": 0}, "context of 0"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"max_sequences": 9, "step_tokens": 8}, "raise step_tokens"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"dtype": "int8"}, "dtype is 'i8'; expected auto, f32, f16, bf16, q8, q4"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'; expected auto, f32, f16, bf16, i8"),
        ({"dtype": "i8"}, "dtype is 'i8'; expected auto, f32, f16, bf16, q8, q4"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(InvalidError, match=message):
        big(**options)


def tampered(name="llama", **changes):
    folder = small_models.model_dir(name)
    tensors = {**read_checkpoint(folder), **changes}
    kept = {key: info for key, info in tensors.items() if info is not None}
    return make_plan(load_config(folder), kept, threads=1, memory_bytes=GIB)


def extra(name, dtype="f32", shape=(4,)):
    return {name: TensorInfo(name, shape, dtype, (Extent("m", 0, shape[0]),))}


def test_checkpoint_must_match_the_graph():
    with pytest.raises(CheckpointError, match=r"needs 1 tensors.*model\.norm\.weight"):
        tampered(**{"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[4\], expected \[48\]"):
        tampered(**extra("model.norm.weight"))
    name = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"does not use: {name}"):
        tampered(**extra(name))
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(CheckpointError, match=f"1 tensors .* does not use: {name}"):
        tampered(**extra(name))


def test_unusable_dtype_is_an_error():
    norm = "model.norm.weight"
    wrong = extra(norm, "F64", (48,))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'.*F64"):
        tampered(**wrong)


def test_bound_tensors_take_no_memory_when_used_in_place():
    infos = {
        tensor.name: TensorInfo.in_memory(tensor.name, "bf16", tensor.shape)
        for tensor in big().tensors
    }
    options = {"threads": 1, "memory_bytes": GIB, "context": 512, "max_sequences": 1}
    plan = make_plan(QWEN3_06B, infos, **options)
    assert all(tensor.source is None for tensor in plan.tensors)
    assert plan.memory["cpu"].weights_bytes == WEIGHT_BYTES
    with pytest.raises(OutOfMemoryError):
        make_plan(QWEN3_06B, infos, dtype="f32", **options)


def test_fingerprint_tells_models_apart():
    prints = {plan_of(name).model.fingerprint for name in small_models.CASES}
    assert len(prints) == len(small_models.CASES)
    assert plan_of("llama").model.fingerprint == plan_of("llama", threads=3).model.fingerprint
    assert plan_of("llama").model.fingerprint != plan_of("llama", "f16").model.fingerprint


@settings(max_examples=200, deadline=None)
@given(
    memory=st.integers(0, 40 * GIB),
    context=st.none() | st.integers(1, 40960),
    sequences=st.integers(1, 16),
    page=st.integers(1, 1024),
    dtype=st.sampled_from(["auto", "f32"]),
)
def test_a_plan_never_exceeds_its_budget(memory, context, sequences, page, dtype):
    try:
        plan = big(
            memory_bytes=memory,
            context=context,
            max_sequences=sequences,
            page_tokens=page,
            dtype=dtype,
        )
    except OutOfMemoryError:
        return
    use = plan.memory["cpu"]
    assert use.total_bytes + max(use.reserve_bytes, 64 * MIB) <= memory
    assert plan.limits.context <= (context or 40960)
    blocks = -(-plan.limits.context // plan.kv.page_tokens)
    assert blocks * 28 <= plan.kv.pages <= sequences * blocks * 28
    assert plan.memory["cpu"].kv_bytes == plan.kv.pages * plan.kv.page_bytes


def test_fingerprints_are_those_of_before():
    """What was saved for a model goes on being of use: recorded with plans of version 5."""
    config = config_of("qwen3-8b")
    shapes = build_graph(config).tensors
    bound = {name: TensorInfo.in_memory(name, "bf16", shape) for name, shape in shapes.items()}
    folder = bundled_model()
    for own, tensors, wanted in (
        (config, None, "6d30e9214b77b60c51d28b6e0041341a2078f69c9efbbd149c197f16e48d7c95"),
        (config, bound, "c40bbc2256a53163e589410f6350c6b4748865ec19ec386c367ac847b799c14a"),
        (
            load_config(folder),
            read_checkpoint(folder),
            "a5029765114bd92040ddbae9b03f91fed1a64f54dce04ea16c6778c44f17d3e0",
        ),
    ):
        plan = make_plan(own, tensors, threads=1, memory_bytes=64 * GIB, context=64)
        assert plan.model.fingerprint == wanted
    first, *_ = read_checkpoint(folder).values()
    (extent,) = first.extents
    parts = (dataclasses.replace(extent, rows=1), dataclasses.replace(extent, rows=extent.rows - 1))
    for extents in (parts, (dataclasses.replace(extent, row_stride=1 << 20),)):
        assert dataclasses.replace(first, extents=extents).identity != first.identity


def test_packed_policies_choose_formats_by_tensor():
    config = config_of("llama-3.2-1b")
    for policy in ("q8", "q4"):
        plan = make_plan(config, None, threads=4, memory_bytes=64 * GIB, dtype=policy)
        assert plan.kv.dtype == "bf16"
        for tensor, held in plan.held("cpu"):
            small = math.prod(tensor.shape) < 1 << 17 or tensor.name == EMBEDDING
            want = "c8.s32" if policy == "q8" or small else "c4.km32"
            assert held.format == (want if len(tensor.shape) == 2 else "f32"), tensor.name
        sizes = [formats.tensor_bytes(held.format, t.shape) for t, held in plan.held("cpu")]
        assert plan.memory["cpu"].weights_bytes == sum(sizes)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.loading == "copied"
    small = plan_of("qwen3", "f32", dtype="q4")
    # Of less than 2^17 weights, and what attention's values pass of less than 2^15.
    stored = {t.name for t, held in small.held("cpu") if held.format == "f32" and len(t.shape) == 2}
    assert formats_of(small, 2) == {"c8.s32", "f32"}
    assert stored == {
        t.name for t in small.tensors if t.name.split(".")[-2] in ("v_proj", "o_proj")
    }
    assert small.kv.dtype == "f16"
    assert plan_of("qwen3", "bf16", dtype="q8").kv.dtype == "bf16"
    assert plan_of("qwen3", "f32", dtype="q8", kv_dtype="f32").kv.dtype == "f32"


@pytest.mark.parametrize("policy", ["q8", "q4"])
def test_what_attention_passes_stays_as_stored_where_it_is_small(policy: str):
    """In the bundled model, whose other matrices have four fifths of the bytes."""
    folder = bundled_model()
    infos = read_checkpoint(folder)
    plan = make_plan(
        load_config(folder), infos, threads=1, memory_bytes=GIB, context=64, dtype=policy
    )
    sizes = dict.fromkeys(("c8.s32", "bf16"), 0)
    for tensor, held in plan.held("cpu"):
        if len(tensor.shape) == 2:
            of_values = tensor.name.split(".")[-2] in ("v_proj", "o_proj")
            assert held.format == ("bf16" if of_values else "c8.s32"), tensor.name
            sizes[held.format] += formats.tensor_bytes(held.format, tensor.shape)
    assert sizes["c8.s32"] > 0.75 * sum(sizes.values())


def test_packed_weights_lie_on_an_accelerator_too():
    profile = load_profile("rtx-4090-24gb-ddr5")
    plan = make_plan(
        config_of("llama-3.2-1b"), None, profile=profile, dtype="q4", max_sequences=1,
        workload=Workload(512, 128, 1, 4096),
    )  # fmt: skip
    assert plan.units_cpu == 0
    assert {(s.device, s.format) for s in plan.slices} == {
        ("accelerator", format) for format in ("f32", "c8.s32", "c4.km32")
    }
    assert not any(profile.accelerator.name in notice for notice in plan.notices)


def test_packed_weights_are_read_at_the_rate_of_bytes():
    profile = load_profile("cpu-laptop-16gb")
    config = config_of("llama-3.2-1b")
    memory_s, decode_s = {}, {}
    for dtype in ("bf16", "q8", "q4"):
        plan = make_plan(
            config, None, profile=profile, dtype=dtype, max_sequences=1,
            workload=Workload(16, 128, 1, 4096), loading=LoadingRequest("copied"),
        )  # fmt: skip
        terms = plan.prediction.predicted.decode_terms
        matrices = [t for t in plan.held("cpu") if len(t[0].shape) == 2]
        read = sum(formats.tensor_bytes(held.format, t.shape) for t, held in matrices)
        assert terms["cpu_compute_s"] == 0
        memory_s[dtype] = terms["cpu_memory_s"] / read
        decode_s[dtype] = plan.prediction.predicted.decode_s
    assert memory_s["q8"] == pytest.approx(memory_s["bf16"])
    assert memory_s["q4"] == pytest.approx(memory_s["bf16"])
    assert decode_s["q4"] < decode_s["q8"] < decode_s["bf16"]
