"""What the Python API takes beside prompts and sampling, and what it refuses."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import helm
import small_models
from command import helm as command
from helm.machine.profile import load_profile
from helm.measure.benchmark import Load
from helm.model.hub import bundled_model

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(kv_dtype="f32") as loaded:
        yield loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model without a tokenizer."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bundled_model() / name, tmp_path)
    return tmp_path


def test_a_folder_without_a_tokenizer_takes_token_ids(folder: Path, llm: helm.LLM) -> None:
    with helm.LLM(folder, kv_dtype="f32") as bare:
        found = bare.generate([1, 2, 3], max_tokens=5)
        assert found.tokens == llm.generate([1, 2, 3], max_tokens=5).tokens
        assert bare.benchmark(Load(10, 4, 1), 1).decode.tokens == 1
        for call in (lambda: bare.generate(PROMPT), lambda: bare.chat(MESSAGES)):
            with pytest.raises(helm.TokenizerError, match=r"put tokenizer\.json into its folder"):
                call()
    for name in ("run", "chat"):
        result = command(name, str(folder), status=2)
        assert "has no tokenizer.json" in result.stderr
        assert "[plan" not in result.stderr


def test_logits_are_computed_step_by_step_and_can_be_interrupted(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        """Counts steps; the second is interrupted."""

        def __init__(self, engine: Any) -> None:
            self._engine, self.steps = engine, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def forward(self, sequence: int, ids: Any, all: bool) -> Any:
            self.steps.append(len(ids))
            if interrupt and len(self.steps) == 2:
                signal.raise_signal(signal.SIGINT)
            return self._engine.forward(sequence, ids, all=all)

    ids = small_models.PROMPT * 7
    whole, interrupt = llm.logits(ids), False
    limits = llm.plan.limits
    engine = Engine(llm._engine)
    monkeypatch.setattr(llm, "_engine", engine)
    monkeypatch.setitem(limits.__dict__, "step_tokens", 13)
    np.testing.assert_array_equal(llm.logits(ids), whole)
    assert engine.steps == [13] * 7
    interrupt, engine.steps = True, []
    with pytest.raises(KeyboardInterrupt):
        llm.logits(ids)
    assert len(engine.steps) == 2
    llm._service.close(llm._service.open(llm.context)[0])  # nothing is left open


@pytest.mark.parametrize("path", [None, 3, b"x.kv", "\ud800.kv", "a\0b", "", "x" * 9000])
def test_what_is_no_file_name_is_refused(llm: helm.LLM, path: Any) -> None:
    llm.generate(PROMPT, max_tokens=1)
    for call in (llm.save_kv, llm.load_kv):
        with pytest.raises(helm.InvalidError, match=r"^\[kv\]"):
            call(path)


def test_a_file_name_that_is_no_text_is_refused_before_loading() -> None:
    for option in ("--save-kv", "--load-kv"):
        result = command("run", option, "x" * 9000, status=2)
        assert result.stderr.startswith("error: [kv]")


@pytest.mark.parametrize("variables", [5, {1: 5}, {"messages": []}, {"tools": 1}, ["a"]])
def test_what_are_no_template_variables_is_refused(llm: helm.LLM, variables: Any) -> None:
    with pytest.raises(helm.InvalidError, match="template_variables"):
        llm.chat(MESSAGES, max_tokens=1, template_variables=variables)
    assert llm.chat(MESSAGES, max_tokens=1, template_variables={"a": 5}).tokens


def test_other_arguments_of_a_wrong_type_are_refused(llm: helm.LLM) -> None:
    for call, message in (
        (lambda: llm.benchmark(5), r"expected helm\.measure\.benchmark\.Load"),
        (lambda: helm.LLM(prefix_cache="no"), "prefix_cache must be True or False"),
        (lambda: helm.LLM(profile=5), "expected a preset's name, a file or a Profile"),
        (
            lambda: helm.LLM.from_torch(small_models.make_model("llama"), tokenizer=5),
            "tokenizer must be",
        ),
    ):
        with pytest.raises(helm.InvalidError, match=message):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["memory_bytes", "vram_bytes", "kv_vram_bytes"])
def test_a_size_in_other_units_is_questioned(name: str) -> None:
    message = rf"{name} is 8, which is less than 1 MiB; did you mean 8 << 30\?"
    with pytest.raises(helm.InvalidError, match=message):
        helm.LLM(device="sim", **{name: 8})


def test_a_profile_may_be_given_by_name_or_path(tmp_path: Path) -> None:
    name = "cpu-laptop-16gb"
    path = tmp_path / "mine.json"
    path.write_text(load_profile(name).to_json())
    for profile in (name, path, str(path), load_profile(name)):
        with helm.LLM(profile=profile) as llm:
            assert llm.plan.prediction is not None
            assert llm.plan.prediction.profile.name == name


def test_from_torch_takes_the_work_to_plan_for() -> None:
    module = small_models.make_model("llama")
    with helm.LLM.from_torch(
        module, profile="cpu-laptop-16gb", prompt_tokens=30, output_tokens=20, batch=2,
        objective="decode", measuring=lambda _what, _share: None,
    ) as llm:  # fmt: skip
        assert llm.plan.prediction is not None
        work = llm.plan.prediction.workload
        assert (work.prompt, work.output, work.batch, work.objective) == (30, 20, 2, "decode")


def test_more_threads_than_cpus_are_told() -> None:
    with helm.LLM(threads=64) as llm:
        assert any("64 threads take turns" in notice for notice in llm.plan.notices)
    with helm.LLM(threads=1) as llm:
        assert llm.plan.notices == ()


def test_closing_ends_the_wait_for_room() -> None:
    llm = helm.LLM(max_sequences=1)
    stream = llm.stream(PROMPT, max_tokens=None, ignore_eos=True)
    next(stream)
    errors: list[object] = []
    prompts = [PROMPT] * 1000  # more than are done before the LLM is closed

    def ask() -> None:
        try:
            found = llm.generate(prompts, max_tokens=None, ignore_eos=True)
        except helm.InvalidError as error:  # they had not all been submitted
            errors.append(error)
        else:
            errors.append(found[-1].error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "most have no room yet"
    llm.close()
    thread.join(60)
    assert not thread.is_alive(), "still waiting"
    assert "this LLM is closed" in str(errors[0])
    assert next(stream).tokens, "an open stream goes on"
    stream.close()
