"""Models that memory does not hold run with weights read from disk."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

import helm
from helm.compiler import budget
from helm.machine.profile import Profile, load_profile
from helm.measure.disk import DEPTH, READ_BYTES, _buffers, measure_disk
from helm.plan.disk import disk_units
from helm.session.disk import read_through_cache
from synthetic_folder import synthetic_folder

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_folder(tmp_path_factory.mktemp("disk"))


def machine() -> Profile:
    """Of these threads and memories, with a disk of 200 MB/s."""
    found = load_profile("thesis-3090")
    return dataclasses.replace(found, accelerator=None, link=None, disk_bytes_per_s=2e8)


def options(**more: Any) -> dict[str, Any]:
    return {"context": 128, "max_sequences": 2, "threads": 2, "device": "cpu",
            "profile": machine(), **more}  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[list[int], int]:
    """Tokens of the run in memory, and the memory that it takes."""
    with helm.LLM(folder, **options()) as llm:
        use = llm.plan.memory["cpu"]
        return tokens(llm), use.total_bytes + use.reserve_bytes


def tokens(llm: helm.LLM) -> list[int]:
    return llm.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens


def test_tokens_are_those_of_the_run_in_memory_and_reads_those_planned(
    folder: Path, whole: tuple[list[int], int]
) -> None:
    expected, needed = whole
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    memory = needed - weights * 3 // 5
    with helm.LLM(folder, **options(memory_bytes=memory, speculate="off")) as llm:
        assert tokens(llm) == expected
        use, stats = llm.plan.memory["cpu"], llm.stats
        assert use.total_bytes + use.reserve_bytes <= memory
        assert stats["devices"][0]["peak_bytes"] <= use.total_bytes + use.reserve_bytes
        assert stats["disk_step_bytes"] > weights // 2
        assert stats["disk_used_bytes"] == 6 * stats["disk_step_bytes"]
        ahead = stats["disk_read_bytes"] - stats["disk_used_bytes"]
        assert 0 <= ahead <= llm.plan.schedule.disk_ring_bytes
        assert any("read from disk in every step" in notice for notice in llm.plan.notices)
        assert llm.plan.prediction is not None
        assert llm.plan.prediction.bottleneck == "weights read from disk"


def test_an_accelerator_holds_layers_beside_it(
    folder: Path, whole: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tokens, within both memories; as little stays free beside it as beside the CPU
    alone, which a small model would rather have."""
    monkeypatch.setattr(budget, "MOST_RESERVE_BYTES", 64 << 20)
    expected, needed = whole
    profile = dataclasses.replace(load_profile("thesis-3090"), disk_bytes_per_s=2e8)
    assert profile.accelerator is not None
    vram = profile.accelerator.reserve_bytes + (80 << 20)
    asked = options(memory_bytes=needed - (54 << 20), device=f"sim:vram={vram}", profile=profile)
    with helm.LLM(folder, **asked, speculate="off") as llm:
        assert tokens(llm) == expected
        plan, stats = llm.plan, llm.stats
        assert plan.memory["accelerator"].weights_bytes > 20 << 20
        step = sum(unit.read_bytes for unit in disk_units(plan))
        assert 0 < step == stats["disk_step_bytes"]
        assert stats["disk_used_bytes"] == 6 * step
        for use, taken in zip(plan.memory.values(), stats["devices"], strict=True):
            assert taken["peak_bytes"] <= use.total_bytes + use.reserve_bytes
        assert any("read from disk in every step" in notice for notice in plan.notices)


def test_saved_kv_goes_on_in_the_other_way_of_loading(
    folder: Path, whole: tuple[list[int], int], tmp_path: Path
) -> None:
    """The digest of the weights is the same."""
    memory = whole[1] - (40 << 20)
    with helm.LLM(folder, **options(memory_bytes=memory)) as llm:
        tokens(llm)
        llm.save_kv(tmp_path / "kept.kv")
    with helm.LLM(folder, **options()) as llm:
        llm.load_kv(tmp_path / "kept.kv")


def test_a_file_that_changes_ends_the_run(folder: Path, whole: tuple[list[int], int]) -> None:
    file = folder / "model.safetensors"
    before = file.stat()
    with helm.LLM(folder, **options(memory_bytes=whole[1] - (40 << 20))) as llm:
        tokens(llm)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        with pytest.raises(helm.HelmError, match="was written to since the model was loaded"):
            tokens(llm)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_weights_that_were_asked_for_otherwise_are_refused_with_this_way(
    folder: Path, whole: tuple[list[int], int]
) -> None:
    asked = options(memory_bytes=whole[1] - (40 << 20), weights="copied")
    with pytest.raises(helm.OutOfMemoryError, match=r"weights='auto' fits: .* read from disk"):
        helm.LLM(folder, **asked)


def test_a_study_has_the_same_plan(folder: Path, whole: tuple[list[int], int]) -> None:
    asked = options(memory_bytes=whole[1] - (40 << 20))
    del asked["device"]
    best = helm.study(folder, **asked).best
    assert best.disk is not None
    assert best.disk.bytes_per_s == 2e8


def test_a_disk_is_measured_within_bounds(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    told: list[float] = []
    rate = measure_disk([file], lambda _what, share: told.append(share), most_bytes=8 << 20)
    assert rate is not None
    assert rate > 1e5
    assert told[-1] == 1.0
    assert measure_disk([tmp_path / "absent"]) is None
    (tmp_path / "small").write_bytes(bytes(100))
    assert measure_disk([tmp_path / "small"]) is not None


def test_reads_through_the_page_cache_are_told() -> None:
    assert read_through_cache({"disk_step_bytes": 0, "disk_direct": True}) == []
    assert read_through_cache({"disk_step_bytes": 1, "disk_direct": True}) == []
    (notice,) = read_through_cache({"disk_step_bytes": 1, "disk_direct": False})
    assert "refuses direct reads" in notice


def test_the_disk_is_read_into_memory_of_the_runtime_s_kind() -> None:
    """Huge pages, which shared memory has none of: a read into small ones falls into pieces."""
    buffers = _buffers()
    assert buffers.shape == (DEPTH, READ_BYTES)
    at = buffers.ctypes.data
    assert at % (2 << 20) == 0
    flags: dict[tuple[int, int], set[str]] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            place = (int(found[1], 16), int(found[2], 16))
        elif line.startswith("VmFlags:"):
            flags[place] = set(line.split()[1:])
    (own,) = (each for (begin, end), each in flags.items() if begin <= at < end)
    assert "sh" not in own
    assert "hg" in own or not Path("/sys/kernel/mm/transparent_hugepage").is_dir()
