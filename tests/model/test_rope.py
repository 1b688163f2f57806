"""Rotary tables against transformers' own initialisers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import helm
import small_models
from helm.base.jsonio import Reader
from helm.errors import CapacityError, ConfigError, InvalidError
from helm.model.rope import parse_rope, rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.05 * i for i in range(32)],
    "long_factor": [1.5 + 0.5 * i for i in range(32)],
}
VARIANTS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    {**LLAMA3, "factor": 8.0, "low_freq_factor": 2.0},
    YARN,
    {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {**YARN, "attention_factor": 0.8},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
]


def theirs(parameters, theta, head_dim, positions):
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    if parameters["rope_type"] == "default":
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    return inv_freq.numpy(), factor


def ours(parameters, theta, head_dim, positions, **outer):
    config = {"rope_theta": theta, "rope_scaling": parameters, **outer}
    return rope_table(parse_rope(Reader(config, "config.json", ConfigError), positions), head_dim)


@pytest.mark.parametrize("head_dim", [4, 10, 64, 128])
@pytest.mark.parametrize("theta", [10.0, 10000.0, 500000, 1e6])
@pytest.mark.parametrize("parameters", VARIANTS)
def test_tables_agree_within_two_ulp(parameters, theta, head_dim):
    want, factor = theirs(parameters, theta, head_dim, 131072)
    table = ours(parameters, theta, head_dim, 131072)
    got = np.array(table.inv_freq, np.float32)
    assert [float(f) for f in got] == list(table.inv_freq), "not f32 values"
    off = np.abs(got.view(np.int32) - want.view(np.int32))
    # The smooth ramps subtract nearly equal f32 numbers, so a last-bit difference can grow there.
    ramps = parameters["rope_type"] in ("llama3", "yarn")
    assert not np.any(~(off <= (8 if ramps else 2))), f"{off.max()} ulp at {off.argmax()}"
    assert table.attention_factor == pytest.approx(factor, rel=1e-15)


def test_variants_differ():
    tables = {ours(parameters, 1e6, 64, 131072) for parameters in VARIANTS}
    assert len(tables) == len(VARIANTS) - 1, "only dynamic equals default within its context"


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.25}])
def test_longrope_has_two_tables(more, far):
    config = transformers.Phi3Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_theta": 10000.0, **LONGROPE, **more},
    )
    theirs = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=4097 if far else None)
    read = {"rope_scaling": {**LONGROPE, **more}}
    rope = parse_rope(Reader(read, "config.json", ConfigError), 131072)
    got = rope_table(rope, 64, far=far)
    off = np.array(got.inv_freq, np.float32).view(np.int32) - theirs[0].numpy().view(np.int32)
    assert np.abs(off).max() <= 2
    assert got.attention_factor == pytest.approx(theirs[1], rel=1e-15)


def test_kinds_of_layers_have_their_own_ropes():
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default"},
    }
    new = Reader({"rope_parameters": kinds}, "config.json", ConfigError)
    outer = {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    old = Reader({**outer, **scaling}, "config.json", ConfigError)
    for kind, theta, factor in (("full_attention", 1e6, 8.0), ("sliding_attention", 1e4, 1.0)):
        key = {"theta_key": "rope_local_base_freq"} if kind == "sliding_attention" else {}
        for node in (new, old):
            rope = parse_rope(node, 4096, layers=kind, **key)
            assert (rope.theta, rope.factor) == (theta, factor)


def test_partial_rotary_factor():
    table = ours({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, 1e4, 64, 99)
    assert table.inv_freq == ours({"rope_type": "linear", "factor": 2.0}, 1e4, 32, 99).inv_freq
    outer = ours({"rope_type": "linear", "factor": 2.0}, 1e4, 64, 99, partial_rotary_factor=0.5)
    assert outer == table


def test_original_context_defaults_to_the_models():
    short = {key: YARN[key] for key in ("rope_type", "factor")}
    assert ours(short, 1e6, 64, 32768) == ours(YARN, 1e6, 64, 131072)
    # A top-level original_max_position_embeddings goes first, as in transformers.
    assert ours(LLAMA3, 1e6, 64, 131072, original_max_position_embeddings=64) != ours(
        LLAMA3, 1e6, 64, 131072
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "expected one of default, linear"),
        ({"rope_type": "longrope", "factor": 2.0}, "'short_factor' is missing"),
        ({**LONGROPE, "long_factor": [1.0, "2"]}, r"long_factor\[1\]: expected a finite number"),
        ({**LONGROPE, "long_factor": [1.0, 0.0]}, r"long_factor\[1\]: expected a number from"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "embeddings above 1, found 1"),
        ({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor' is missing"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor: expected more than"),
        ({**YARN, "factor": "4"}, "factor: expected a finite number"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_malformed_parameters(parameters, message):
    with pytest.raises(ConfigError, match=message):
        ours(parameters, 1e4, 64, 4096)


def test_linear_scaling_reaches_as_far_as_its_factor_says():
    folder = small_models.model_dir("llama_linear")  # 600 positions, four times
    tokens = [(i * i * 7 + 3 * i + 11) % 131 for i in range(1000)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    with helm.LLM(folder, kv_dtype="f32", threads=1) as llm:
        assert llm.context == 2400
        got = llm.logits(tokens)
    assert not np.any(~(np.abs(got - want) <= 5e-5 * np.abs(want).max()))


def test_dynamic_scaling_says_why_it_reaches_no_farther():
    folder = small_models.model_dir("llama_dynamic")
    with pytest.raises(InvalidError, match=r"allows 1 to 600 .*dynamic rope turns every new key"):
        helm.LLM(folder, context=601)


@pytest.mark.parametrize(
    ("name", "options", "length", "advised"),
    [
        ("llama", {}, 601, False),
        ("llama", {"context": 64}, 601, False),
        ("llama", {"context": 64}, 600, True),
        ("llama_dynamic", {"context": 64}, 601, False),
        ("llama_linear", {"context": 64}, 601, True),
    ],
)
def test_a_longer_context_is_advised_only_where_it_can_be_had(name, options, length, advised):
    with helm.LLM(small_models.model_dir(name), threads=1, **options) as llm:
        with pytest.raises(CapacityError, match="shorten the prompt") as caught:
            llm.generate([1] * length)
        assert ("context=" in str(caught.value)) == advised
