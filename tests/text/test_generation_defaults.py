"""generation_config.json: what can be used is, what cannot is left out and said."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import helm
import small_models
from helm.errors import ConfigError
from helm.model.families import parse_config
from helm.model.hub import bundled_model
from helm.text.generation_defaults import GenerationDefaults, load_generation_defaults
from helm.text.sampling import SamplingParams

CONFIG = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "eos_token_id": 9,
    }
)


def load(folder: Path, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return load_generation_defaults(folder, CONFIG)


def test_what_the_file_says(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path, CONFIG) == GenerationDefaults((9,))
    assert load(tmp_path, eos_token_id=[3, 4], top_k=20, top_p=0.9, min_p=None) == (
        GenerationDefaults((3, 4), top_k=20, top_p=0.9)
    )
    assert load(tmp_path, do_sample=True, temperature=0.6, repetition_penalty=1.1) == (
        GenerationDefaults((9,), do_sample=True, temperature=0.6, repetition_penalty=1.1)
    )
    assert load(tmp_path, max_new_tokens=77, stop_strings=["a", "b"], pad_token_id=-1) == (
        GenerationDefaults((9,), max_new_tokens=77, stop_strings=("a", "b"))
    )
    assert load(tmp_path, stop_strings="###", bos_token_id=5).stop_strings == ("###",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", [0.5]),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 50.0),
        ("top_k", [50]),
        ("top_p", 1.5),
        ("top_p", 0),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", "x" * 10**6),
        ("do_sample", 1),
        ("eos_token_id", [1, "2"]),
        ("eos_token_id", 2.0),
        ("bos_token_id", "1"),
        ("pad_token_id", -7),
        ("max_new_tokens", -1),
        ("max_new_tokens", 20.0),
        ("max_new_tokens", "auto"),
        ("stop_strings", [""]),
        ("stop_strings", 5),
    ],
)
def test_what_cannot_be_used_is_left_out_with_a_notice(
    tmp_path: Path, key: str, value: object
) -> None:
    for more in ({}, {"top_p": 0.5, "do_sample": True}):
        found = load(tmp_path, **{**more, key: value})
        plain = load(tmp_path, **{k: v for k, v in more.items() if k != key})
        assert len(found.notices) == 1
        assert found.notices[0].startswith(f"generation_config.json: {key}: ")
        assert found.notices[0].endswith("; it is left out")
        assert len(found.notices[0]) < 250
        assert {**vars(found), "notices": ()} == vars(plain)


def test_what_is_not_supported_is_said(tmp_path: Path) -> None:
    said = load(tmp_path, num_beams=4, no_repeat_ngram_size=3, bad_words_ids=[[1]]).notices
    assert [notice.split()[1] for notice in said] == [
        "num_beams", "no_repeat_ngram_size", "bad_words_ids",
    ]  # fmt: skip
    neutral = {"num_beams": 1, "typical_p": 1.0, "bad_words_ids": None, "suppress_tokens": []}
    assert load(tmp_path, **neutral).notices == ()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"top_k": 1, "top_k": 2}'])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_generation_defaults(tmp_path, CONFIG)


def test_the_models_limit_and_stops_are_the_defaults_of_sampling() -> None:
    said = {"max_new_tokens": 77, "stop_strings": ("###",)}
    resolved = SamplingParams().resolve(said)
    assert (resolved.max_tokens, resolved.stop) == (77, ("###",))
    resolved = SamplingParams().resolve({})
    assert (resolved.max_tokens, resolved.stop) == (256, ())
    given = SamplingParams(max_tokens=5, stop="x").resolve(said)
    assert (given.max_tokens, given.stop) == (5, ("x",))
    unbounded = SamplingParams(max_tokens=None, stop=()).resolve(said)
    assert (unbounded.max_tokens, unbounded.stop) == (None, ())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model, with a generation_config.json of its own and a chat template."""
    shutil.copytree(bundled_model(), tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    return tmp_path / "model"


PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]


def test_generate_and_chat_heed_the_models_limit_and_stops(model: Path) -> None:
    load(model, max_new_tokens=7, top_p=2)
    with helm.LLM(model) as llm:
        assert any("top_p" in notice for notice in llm.plan.notices)
        options: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
        for call in (llm.generate, lambda p, **o: llm.chat(MESSAGES, **o)):
            assert len(call(PROMPT, **options).tokens) == 7
            assert len(call(PROMPT, max_tokens=9, **options).tokens) == 9
        whole = llm.generate(PROMPT, max_tokens=30, **options).text
        told = llm.chat(MESSAGES, max_tokens=30, **options).text
    word = whole.split()[4]
    load(model, stop_strings=[word], max_new_tokens=30)
    with helm.LLM(model) as llm:
        assert llm.generate(PROMPT, **options).text == whole[: whole.index(word)]
        assert llm.generate(PROMPT, stop=(), **options).text == whole
        assert llm.chat(MESSAGES, **options).text == told.partition(word)[0]


def test_the_commands_heed_them_too(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from helm.commands.cli import main

    load(model, max_new_tokens=3, eos_token_id=[])
    assert main(["run", str(model), PROMPT, "--json", "--temperature", "0"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    assert main(["chat", str(model), "--temperature", "0", "--verbose"]) == 0
    assert "output 3 tokens" in capsys.readouterr().err


def test_a_module_says_them_in_its_generation_config() -> None:
    module: Any = small_models.make_model("llama")
    module.generation_config.max_new_tokens = 5
    module.generation_config.stop_strings = ["x"]  # of no use without a tokenizer
    with helm.LLM.from_torch(module) as llm:
        assert len(llm.generate(small_models.PROMPT, ignore_eos=True).tokens) == 5
        assert llm.plan.notices == ()
