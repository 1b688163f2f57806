"""Saved KV caches: taken up by pages of any size, whole or as they were whatever ends a save."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from model_tensors import tensors_of
from plans import make_plan

import helm
import small_models
from engine_helpers import greedy, partitioned, prompt_of
from helm import _helm
from helm.measure.profile_cache import keep
from helm.model.families import load_config
from helm.plan.schema import Plan
from kv_file import checksums, repaged, sealed

CONTEXT = 100
PROMPT = prompt_of(83)
STORY = "Once upon a time there was a little dog who lived near the sea with a girl. " * 4


def plan_of(name: str, kv_dtype: str, page_tokens: int) -> Plan:
    folder = small_models.model_dir(name, "f32")
    return make_plan(
        load_config(folder), tensors_of(folder), threads=2, memory_bytes=4 << 30,
        kv_dtype=kv_dtype, page_tokens=page_tokens, max_sequences=2, context=CONTEXT,
        step_tokens=24,
    )  # fmt: skip


class Cache:
    """An engine with what it keeps."""

    def __init__(self, name: str, plan: Plan, **options: Any) -> None:
        folder = small_models.model_dir(name, "f32")
        self.engine = _helm.Engine(plan.to_json(), str(folder), **options)
        self._prefixes = _helm.PrefixCache(self.engine)

    def tokens(self, prompt: list[int]) -> list[int]:
        return greedy(self.engine, [prompt], 10, self._prefixes)[0]

    def save(self, path: Path) -> bytes:
        assert self._prefixes.save(PROMPT, str(path), "", None) == len(PROMPT)
        return path.read_bytes()

    def load(self, path: Path) -> None:
        self._prefixes.clear()
        assert self._prefixes.load(str(path), None)[0] == PROMPT


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "i8"])
@pytest.mark.parametrize("name", ["qwen3", "llama_one_kv_head"])
def test_pages_of_any_size_take_up_those_of_any_other(
    name: str, kv_dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.kv"
    sizes = (1, 5, 16, 83, 100)
    first = Cache(name, plan_of(name, kv_dtype, 16))
    want = first.tokens(PROMPT)
    file = first.save(path)
    checksums(file)
    files = {size: repaged(file, size) for size in sizes}
    for here in sizes:
        cache = Cache(name, plan_of(name, kv_dtype, here))
        for there in sizes:
            path.write_bytes(files[there])
            cache.load(path)
            assert cache.save(path) == files[here], (there, here)
        assert cache.tokens(PROMPT) == want, here


def test_pages_are_taken_up_where_kv_overflows(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    whole = Cache("qwen3", plan_of("qwen3", "f16", 64))
    want = whole.tokens(PROMPT)
    file = whole.save(path)
    plan = partitioned(plan_of("qwen3", "f16", 5), ["cpu", "accelerator", "accelerator", "cpu"])
    pages = dict(plan.schedule.pages)
    kept = 10 * 2  # blocks of the two layers there
    pages["cpu"] += pages["accelerator"] - kept
    schedule = dataclasses.replace(plan.schedule, pages={**pages, "accelerator": kept})
    few = dataclasses.replace(plan, schedule=schedule)
    cache = Cache("qwen3", few, device="sim")
    cache.load(path)
    assert cache.engine.stats["evicted_blocks"] > 0
    assert cache.save(path) == repaged(file, 5)
    assert cache.tokens(PROMPT) == want


def test_another_context_takes_up_a_file(tmp_path: Path) -> None:
    """A context shorter than a page makes pages as short."""
    path = tmp_path / "a.kv"
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    with helm.LLM(context=300) as llm:
        llm.generate(STORY, **options)
        count = llm.save_kv(path)
        want = llm.generate(STORY + "Then", **options).tokens
    for other in ({}, {"context": 256}, {"page_tokens": 16}):
        with helm.LLM(**other) as llm:
            assert llm.load_kv(path).cached == count
            got = llm.generate(STORY + "Then", **options)
            assert got.tokens == want
            assert got.timings.prefill_tokens < 5


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def test_large_pages_of_a_file_take_no_more_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    cache = Cache("qwen3", plan_of("qwen3", "f32", 16))
    cache.tokens(PROMPT)
    path.write_bytes(repaged(cache.save(path), 50_000))
    assert path.stat().st_size > 20 << 20
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    cache.load(path)
    assert peak_bytes() - before < 8 << 20


def test_sizes_that_a_file_cannot_have_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    cache = Cache("qwen3", plan_of("qwen3", "i8", 16))
    cache.tokens(PROMPT)
    file = repaged(cache.save(path), 100)
    for size in (1, 99, 101, 2**20, 2**39):
        header = int.from_bytes(file[8:16], "little")
        text = file[24 : 24 + header].replace(b'"page_tokens":100', b'"page_tokens":%d' % size)
        path.write_bytes(sealed([text, file[24 + header + 8 :]]))
        with pytest.raises(helm.InvalidError, match="damaged"):
            cache.load(path)


# --- saves that are cut short ---------------------------------------------------------------------

SAVE = """
import sys, helm
llm = helm.LLM(context=256)
llm.generate("Once upon a time", max_tokens=2)
def wait(done, total):
    print("writing", flush=True)
    sys.stdin.readline()
llm.save_kv(sys.argv[1], progress=wait)
"""


@contextmanager
def saving(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the middle of a save, which goes on when it reads a line."""
    command = [sys.executable, "-c", SAVE, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            yield process
        finally:
            process.kill()


def parts(folder: Path) -> set[Path]:
    return set(folder.glob(".helm.part.??????"))


def test_the_part_of_a_killed_save_is_removed_by_the_next(tmp_path: Path) -> None:
    with saving(tmp_path / "a.kv") as process:
        process.kill()
    left = parts(tmp_path)
    assert len(left) == 1
    with saving(tmp_path / "b.kv") as running, helm.LLM(context=256) as llm:
        assert not left & parts(tmp_path)  # that save has removed it
        assert len(parts(tmp_path)) == 1
        llm.generate(STORY, max_tokens=2)
        llm.save_kv(tmp_path / "c.kv")
        assert len(parts(tmp_path)) == 1  # but that of a process at work stays
        running.communicate(b"\n" * 99, timeout=60)
        assert running.returncode == 0
        assert llm.load_kv(tmp_path / "b.kv").cached > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.kv", "c.kv"]


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("kept")
    for name in ("a.kv.part.abcdef", ".helm.part.abcdefg", ".helm.part.abcde"):
        (tmp_path / name).write_text("kept")
    (tmp_path / ".helm.part.link00").symlink_to("text")
    (tmp_path / ".helm.part.folder").mkdir()
    os.mkfifo(tmp_path / ".helm.part.fifo00")
    if os.geteuid() == 0:
        (tmp_path / ".helm.part.others").write_text("kept")
        os.chown(tmp_path / ".helm.part.others", 65534, 65534)
    before = sorted(tmp_path.iterdir())
    (tmp_path / ".helm.part.killed").write_text("left")
    with helm.LLM(context=256) as llm:
        llm.generate(STORY, max_tokens=2)
        llm.save_kv(tmp_path / "z.kv")
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "z.kv"]


def test_a_name_may_be_as_long_as_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "x" * 252 + ".kv"
    with helm.LLM(context=256) as llm:
        llm.generate(STORY, max_tokens=2)
        llm.save_kv(name)
    assert os.listdir() == [name]


def test_what_is_measured_is_kept_likewise(tmp_path: Path) -> None:
    (tmp_path / ".helm.part.killed").write_text("left")
    keep(tmp_path / "rates.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]
    assert (tmp_path / "rates.json").read_text() == "{}"
    keep(tmp_path / "rates.json" / "x.json", "{}")  # cannot be written: costs nothing


@pytest.mark.parametrize("weights", ["copied", "mapped", "compressed"])
def test_a_cache_saved_by_plans_of_version_5_is_taken_up(weights: str) -> None:
    """data/saved_by_plan_v5.kv: of the bundled model, by "Once upon a time" and four tokens."""
    path = Path(__file__).parents[1] / "data" / "saved_by_plan_v5.kv"
    with helm.LLM(context=64, threads=1, kv_dtype="i8", weights=weights) as llm:
        saved = llm.load_kv(path)
        assert saved.tokens == [0, 614, 615, 261, 415, 15, 444, 286, 261]
        found = llm.generate(saved.tokens, max_tokens=1, temperature=0)
        assert found.timings.prefill_tokens == 1
