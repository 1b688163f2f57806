"""Planning from Python: `helm.study`, and the one list of options behind it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import command
import gguf_models
import helm
import small_models
from helm.compiler.explain import to_dict
from helm.compiler.search import Search, search
from helm.session.options import LoadOptions, StudyKeywords, TorchKeywords, load_options

QWEN = Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json"
GIB = 1 << 30


def test_a_study_says_what_the_command_says() -> None:
    said = command.helm(
        "plan", str(QWEN), "--profile", "thesis-4060", "--context", "2048", "--objective", "decode",
        "--kv-vram", "1GiB", "--json",
    ).stdout  # fmt: skip
    found = helm.study(
        QWEN, profile="thesis-4060", context=2048, objective="decode", kv_vram_bytes=GIB,
        max_sequences=1,
    )  # fmt: skip
    assert json.loads(json.dumps(to_dict(found))) == json.loads(said)
    assert isinstance(found, helm.Study)
    assert isinstance(found.plan, helm.Plan)
    assert found.plan.prediction is not None
    assert found.plan.prediction.predicted == found.best.predicted


def test_a_gguf_file_and_a_folder_are_planned_with_their_weights(tmp_path: Path) -> None:
    folder = small_models.model_dir("qwen3")
    for model in (folder, gguf_models.write(folder, tmp_path / "small.gguf")):
        found = helm.study(model, profile="cpu-laptop-16gb")
        assert all(tensor.source is not None for tensor in found.plan.tensors)
        assert found.problem.name == Path(model).stem


def test_threads_may_be_given() -> None:
    found = helm.study(QWEN, profile="cpu-desktop-64gb-ddr5", threads=3)
    assert found.plan.threads == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"contxt": 4}, helm.InvalidError, "unknown parameter 'contxt'; did you mean context"),
        ({"revison": "x"}, helm.InvalidError, "unknown parameter 'revison'"),
        ({"prefix_cache": True}, helm.InvalidError, "unknown parameter 'prefix_cache'"),
        ({"device": "cpu"}, helm.InvalidError, "profile= names a machine and device= one of"),
        ({"context": 0}, helm.InvalidError, "context must be an integer"),
        ({"context": 10**6}, helm.InvalidError, "the model allows 1 to 40960"),
        ({"dtype": "q5"}, helm.InvalidError, "dtype is 'q5'"),
        ({"weights": "fast"}, helm.InvalidError, "weights must be"),
        ({"vram_bytes": 8}, helm.InvalidError, "less than 1 MiB"),
        ({"memory_bytes": GIB}, helm.OutOfMemoryError, "does not fit on thesis-4060"),
        ({"profile": "absent"}, helm.ProfileError, "neither a preset nor a file"),
        (
            {"profile": "cpu-laptop-16gb", "vram_bytes": GIB}, helm.InvalidError,
            "vram_bytes=, but cpu-laptop-16gb has no accelerator",
        ),
    ],
)  # fmt: skip
def test_wrong_options_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        helm.study(QWEN, **{"profile": "thesis-4060", **options})


def test_wrong_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(helm.HelmError, match="does not exist"):
        helm.study(tmp_path / "absent" / "config.json", profile="thesis-4060")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF")
    with pytest.raises(helm.CheckpointError, match=r"torn\.gguf"):
        helm.study(tmp_path / "torn.gguf", profile="thesis-4060")


def test_every_place_takes_the_options_of_one_list() -> None:
    known = {field.name for field in dataclasses.fields(LoadOptions)} - {"kv"}
    known |= {"kv_overflow", "kv_vram_bytes", "watermark"}
    own = set(inspect.signature(helm.LLM.__init__).parameters)
    assert own - known == {*("self", "model", "revision", "tokenizer", "prefix_cache", "speculate")}
    assert known <= own
    assert set(TorchKeywords.__annotations__) - {"prefix_cache", "speculate"} <= known
    assert set(StudyKeywords.__annotations__) <= known
    options = load_options({"context": 5, "kv_overflow": "cpu", "model": "ignored"})
    assert (options.context, options.kv.overflow, options.max_sequences) == (5, "cpu", 8)


def test_candidates_that_were_priced_once_rank_as_in_a_search_of_their_own() -> None:
    found = helm.study(QWEN, profile="thesis-4060", batch=3).search
    profile, limits, model = found.profile, found.limits, found.model
    more = 12 * GIB
    wider = dataclasses.replace(limits, accelerator_bytes=more)
    assert found.within(accelerator_bytes=more) == search(
        model, profile, found.workload, wider, found.space
    )
    for objective in ("decode", "ttft", "throughput"):
        work = dataclasses.replace(found.workload, objective=objective)
        anew = Search(model, profile, work, limits, found.space)
        assert found.towards(objective) == anew.result
        assert anew.towards("total") == found.result
