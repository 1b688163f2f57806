"""config.json: what transformers reads, we read; hostile input fails."""

from __future__ import annotations

import math
import re
import time

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import small_models
from helm.errors import CheckpointError, ConfigError, HelmError, UnsupportedModelError
from helm.model.families import FAMILIES, load_config, parse_config
from helm.model.rope import rope_table

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    **{key: QWEN[key] for key in QWEN if key not in ("tie_word_embeddings", "head_dim")},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}


def read(base, **changes):
    config = {**base, **changes}
    return parse_config({k: v for k, v in config.items() if v != "absent"})


def test_every_key_is_read():
    config = read(QWEN, eos_token_id=[5, 6], bos_token_id=4, attention_bias=True)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (151936, 1024, 3072)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 8, 128)
    assert (config.num_hidden_layers, config.max_context) == (4, 40960)
    assert config.rope is not None
    assert config.rope.theta == 1e6
    assert config.norm_eps == 1e-6
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.dtype == "bf16"
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (4, (5, 6), None)


@pytest.mark.parametrize("name", small_models.CASES)
def test_agrees_with_transformers_on_saved_configs(name):
    folder = small_models.model_dir(name)
    ours, theirs = load_config(folder), transformers.AutoConfig.from_pretrained(folder)
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_hidden_layers == theirs.num_hidden_layers
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.norm_eps == getattr(theirs, "rms_norm_eps", ours.norm_eps)
    kinds = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None) or 0
    sliding = [k == "sliding_attention" for k in kinds] if kinds else [True] * len(ours.windows)
    assert ours.windows == tuple(window if slides else 0 for slides in sliding)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_of_absent_keys_are_transformers(architecture):
    family = FAMILIES[architecture]
    on = {"use_sliding_window": True} if "max_window_layers" in family.defaults else {}
    theirs = getattr(transformers, re.sub("ForCausalLM|LMHeadModel", "Config", architecture))(**on)
    theirs = theirs.get_text_config()
    for key, value in family.defaults.items():
        assert getattr(theirs, key) == value, key


def test_family_defaults():
    assert not read(LLAMA).tie_word_embeddings
    assert read(OPT).tie_word_embeddings
    assert read(LLAMA).head_dim == 64
    assert read(LLAMA, head_dim=None).head_dim == 64
    assert read(QWEN, head_dim="absent").head_dim == 128
    assert read(LLAMA, num_key_value_heads="absent").num_key_value_heads == 16
    assert read(LLAMA, num_key_value_heads=None).num_key_value_heads == 16
    assert read(LLAMA).eos_token_ids == (2,)
    assert read(LLAMA, pad_token_id=-1).pad_token_id is None
    assert read(OPT, word_embed_proj_dim=None).word_embed_proj_dim == 1024
    assert read(OPT).norm_eps == 1e-5
    assert read(OPT).rope is None


@pytest.mark.parametrize(
    "architectures",
    [
        None,
        [],
        ["LlamaModel"],
        ["LLaMAForCausalLM"],
        ["LLaMAModel"],
        ["LlamaForSequenceClassification"],
        ["OurChatModel", "LlamaForCausalLM"],
        ["OurChatModel"],
    ],
)
def test_architecture_in_any_spelling_at_any_place_or_by_model_type(architectures):
    assert read(LLAMA, architectures=architectures).architecture == "LlamaForCausalLM"
    assert read(LLAMA, architectures=architectures, model_type="LLaMA").architecture == (
        "LlamaForCausalLM"
    )


def test_of_several_architectures_the_one_of_the_model_type_counts():
    listed = ["LlamaForCausalLM", "Qwen2ForCausalLM"]
    assert read(QWEN2, architectures=listed).architecture == "Qwen2ForCausalLM"
    assert read(LLAMA, architectures=listed).architecture == "LlamaForCausalLM"
    assert read(LLAMA, model_type=None, architectures=["x", "qwen2model"]).architecture == (
        "Qwen2ForCausalLM"
    )


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        *((name, "f16") for name in ("half", "fp16", "float16", "torch.float16", "torch.half")),
        *((name, "bf16") for name in ("bf16", "bfloat16", "torch.bfloat16")),
        *((name, "f32") for name in ("float", "fp32", "float32", "torch.float32")),
        *((name, None) for name in ("auto", "int8", "torch.float64", None)),
    ],
)
def test_dtype_in_any_spelling(spelling, dtype):
    assert read(LLAMA, torch_dtype=spelling).dtype == dtype
    assert read(LLAMA, dtype=spelling, torch_dtype="absent").dtype == dtype


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "linear", "factor": 4.0}, 4 * 40960),
        ({"type": "linear", "factor": 2.5, "original_max_position_embeddings": 32768}, 81920),
        ({"type": "linear", "factor": 0.5}, 40960),
        ({"type": "dynamic", "factor": 4.0}, 40960),
        ({"type": "yarn", "factor": 4.0}, 4 * 40960),
    ],
)
def test_rope_scaling_says_how_far_a_model_reaches(scaling, context):
    assert read(LLAMA, rope_scaling=scaling).max_context == context


def test_ten_to_the_nine_layers_are_refused_at_once():
    begin = time.monotonic()
    for base in (LLAMA, MISTRAL, QWEN, OPT):
        with pytest.raises(ConfigError, match="num_hidden_layers: expected an integer from 1 to"):
            read(base, num_hidden_layers=10**9, max_window_layers=10**9)
    assert time.monotonic() - begin < 1.0


@pytest.mark.parametrize(
    ("base", "changes", "windows"),
    [
        (MISTRAL, {"sliding_window": 7}, (7, 7, 7, 7)),
        (MISTRAL, {"sliding_window": None}, (0, 0, 0, 0)),
        (MISTRAL, {}, (4096,) * 4),
        (LLAMA, {"sliding_window": 7}, (0, 0, 0, 0)),
        (QWEN2, {"sliding_window": 7}, (0, 0, 0, 0)),
        (QWEN2, {"sliding_window": 7, "use_sliding_window": True}, (0, 0, 0, 0)),
        (
            QWEN2,
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 7),
        ),
        (
            QWEN,
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, 0, 7, 0),
        ),
    ],
)
def test_sliding_windows(base, changes, windows):
    assert read(base, **changes).windows == windows


def test_old_and_new_rope_keys_agree():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768}
    old = read(QWEN, rope_scaling={"type": "yarn", **scaling})
    new = read(
        QWEN,
        rope_theta="absent",
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **scaling},
    )
    assert old.rope == new.rope
    assert old.max_context == 131072
    assert read(LLAMA, rope_theta="absent").rope == read(LLAMA, rope_theta=10000.0).rope


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            LLAMA,
            {"hidden_size": "absent"},
            r"config\.json\].*key 'hidden_size' is missing",
        ),
        (LLAMA, {"hidden_size": True}, "hidden_size: expected an integer"),
        (LLAMA, {"hidden_size": 1024.0}, "hidden_size: expected an integer"),
        (LLAMA, {"hidden_size": -1024}, "hidden_size: expected an integer"),
        (LLAMA, {"hidden_size": 2**25}, "hidden_size: expected an integer"),
        (LLAMA, {"vocab_size": 2**32}, "vocab_size"),
        (LLAMA, {"num_hidden_layers": 1001}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"rms_norm_eps": math.nan}, "rms_norm_eps: expected a finite number"),
        (LLAMA, {"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a finite number"),
        (LLAMA, {"rope_theta": math.inf}, "rope_theta"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        (LLAMA, {"num_attention_heads": 24, "num_key_value_heads": 8}, "num_attention_heads"),
        (LLAMA, {"head_dim": 63}, "head_dim: expected an even"),
        (LLAMA, {"hidden_act": "mish"}, "hidden_act: expected one of silu"),
        (LLAMA, {"hidden_act": None}, "hidden_act"),
        (LLAMA, {"attention_bias": "yes"}, "attention_bias: expected true or false"),
        (LLAMA, {"torch_dtype": 16}, "torch_dtype: expected a string"),
        (LLAMA, {"eos_token_id": "2"}, "eos_token_id"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling: key 'short_factor' is missing",
        ),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling: key 'factor' is missing"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor"),
        (LLAMA, {"rope_scaling": [1]}, "rope_scaling: expected an object"),
        (LLAMA, {"model_type": "qwen3"}, "model_type: 'qwen3' contradicts"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window"),
        (QWEN, {"layer_types": ["full_attention"]}, "layer_types: expected 4"),
        (QWEN, {"layer_types": ["sliding_attention"] * 4}, "layer_types.*is off"),
        (QWEN, {"layer_types": ["chunked"] * 4}, r"layer_types\[0\]: expected one of"),
    ],
)
def test_hostile_values_name_the_key(base, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(base, **changes)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [10**5000, nested(5000), [10**5000], "x" * 10**6], ids="abcd")
def test_values_that_cannot_be_shown(value):
    with pytest.raises(ConfigError, match="hidden_size: expected an integer") as caught:
        read(LLAMA, hidden_size=value)
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match="rms_norm_eps: expected a finite number"):
        read(LLAMA, rms_norm_eps=value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen3XForCausalLM"], "model_type": "qwen3_x"},
            r"Qwen3XForCausalLM is not supported; the nearest that is: Qwen3ForCausalLM; "
            r"supported are .*LlamaFor.*Qwen3For",
        ),
        (
            {
                "architectures": ["Qwen3XForCausalLM"],
                "linear_num_value_heads": 4,
                "model_type": "x",
            },
            r"the nearest that is: Qwen3ForCausalLM; HELM lacks gated delta nets; supported are",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "model_type": "x"},
            r"DeepseekV3ForCausalLM is not supported; HELM knows this family and does not run it "
            r"yet; HELM lacks latent attention; supported are",
        ),
        (
            {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
            r"Qwen3_5For.* is not supported; HELM knows this family and does not run it yet; "
            r"the nearest that is: Qwen3ForCausalLM; HELM lacks gated delta nets; supported are",
        ),
        (
            {
                "architectures": ["Gemma4ForConditionalGeneration"],
                "model_type": "gemma4",
                "text_config": {"num_kv_shared_layers": 4},
            },
            r"the nearest that is: Gemma\dForCausalLM; HELM lacks KV shared between layers",
        ),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: weights quantised by 'bitsandbytes' are not supported; expected "
            "gptq, .* use the f32",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config: weights quantised are not"),
        ({"quantization_config": [1]}, "quantization_config: weights quantised are not"),
    ],
)
def test_unsupported_models_are_named(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(QWEN, **changes)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_malformed_files_are_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_config(tmp_path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
KEYS = sorted({*QWEN, *OPT, "rope_scaling", "rope_parameters", "layer_types", "sliding_window"})


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([QWEN, LLAMA, MISTRAL, QWEN2, OPT]),
    changes=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=3),
)
def test_any_change_reads_or_raises_helm_error(base, changes):
    try:
        config = read(base, **changes)
    except HelmError:
        return
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert len(config.windows) == config.num_hidden_layers


ROPE_KEYS = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "truncate",
    "attention_factor",
]


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    parameters=st.dictionaries(st.sampled_from(ROPE_KEYS), JUNK | st.floats(0.5, 64), max_size=5),
)
def test_any_rope_gives_a_finite_table_or_helm_error(kind, parameters):
    try:
        config = read(LLAMA, rope_scaling={"rope_type": kind, "factor": 2.0, **parameters})
    except HelmError:
        return
    table = rope_table(config.rope, config.head_dim)
    assert len(table.inv_freq) == config.head_dim // 2
    assert all(math.isfinite(f) for f in (*table.inv_freq, table.attention_factor))
