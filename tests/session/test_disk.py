"""Models that memory does not hold run with weights read from disk."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import command
import helm
from helm.compiler import budget
from helm.compiler.solve import solve
from helm.machine.profile import Profile, load_profile
from helm.measure import disk as measured
from helm.measure.disk import DEPTH, READ_BYTES, _buffers, measure_drives
from helm.model.families import read_config
from helm.model.weight_names import read_weights
from helm.plan.disk import disk_units
from helm.session.disk import drives_of, read_through_cache, study_from_disk
from helm.session.options import load_options
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
def copies(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "model") for _ in range(2)]


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


def test_copies_on_other_drives_are_read_at_once(
    folder: Path, copies: list[Path], whole: tuple[list[int], int]
) -> None:
    expected, needed = whole
    asked = options(memory_bytes=needed - (40 << 20), speculate="off")
    with helm.LLM(folder, **asked, copies=copies) as llm:
        assert tokens(llm) == expected
        plan, stats = llm.plan, llm.stats
        step = sum(unit.read_bytes for unit in disk_units(plan))
        assert 0 < step == stats["disk_step_bytes"]
        assert stats["disk_used_bytes"] == 6 * step
        assert len(stats["disk_drive_bytes"]) == 3
        ahead = sum(stats["disk_drive_bytes"]) - 6 * step
        assert 0 <= ahead <= plan.schedule.disk_ring_bytes
        (said,) = (notice for notice in plan.notices if "read from disk in every step" in notice)
        assert "from 3 drives at once" in said
        assert all(str(each) in said for each in (folder, *copies))


def test_copies_of_a_model_that_memory_holds_are_of_no_use(
    folder: Path, copies: list[Path], whole: tuple[list[int], int]
) -> None:
    with helm.LLM(folder, **options(), copies=copies) as llm:
        assert tokens(llm) == whole[0]
        assert llm.stats["disk_drive_bytes"] == []
        assert any("read nothing from disk, nor from copies" in said for said in llm.plan.notices)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent", r"model\.safetensors cannot be read: No such file"),
        ("shorter", r"model\.safetensors has \d+ bytes, in .* copies= takes folders"),
        ("linked", r"model\.safetensors is the same file as in a folder before it"),
        ("own", r"model\.safetensors is the same file as in a folder before it"),
        ("changed", r"is no copy of .* their bytes from \d+ on differ"),
    ],
)
def test_what_is_no_copy_is_refused_by_name(
    folder: Path, whole: tuple[list[int], int], tmp_path: Path, kind: str, message: str
) -> None:
    copy = folder if kind == "own" else tmp_path
    file = tmp_path / "model.safetensors"
    if kind in ("shorter", "changed"):
        shutil.copy(folder / file.name, file)
    if kind == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    if kind == "linked":
        file.symlink_to(folder / file.name)
    if kind == "changed":
        file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
    asked = options(memory_bytes=whole[1] - (40 << 20), copies=[str(copy)])
    with pytest.raises(helm.CheckpointError, match=message):
        helm.LLM(folder, **asked)
    if kind != "changed":  # which reading alone shows
        del asked["device"]
        with pytest.raises(helm.CheckpointError, match=message):
            helm.study(folder, **asked)


def test_copies_are_a_list_of_folders_or_of_gguf_files(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    assert load_options({"copies": [str(file), folder]}).copies == (folder, folder)
    for wrong in (str(folder), 5, [None]):
        with pytest.raises(helm.InvalidError, match="copies must be a list of folders"):
            helm.LLM(folder, copies=wrong)  # type: ignore[arg-type]


def test_the_command_takes_copies_and_names_what_each_gives(
    folder: Path, copies: list[Path], whole: tuple[list[int], int], tmp_path: Path
) -> None:
    (tmp_path / "profile.json").write_text(machine().to_json())
    memory = ("--ram", str(whole[1] - (40 << 20)), "--profile", str(tmp_path / "profile.json"))
    named = [word for copy in copies for word in ("--copy", str(copy))]
    plan = ("plan", str(folder), *memory, "-c", "128")
    found = json.loads(command.helm(*plan, *named, "--json").stdout)
    assert found["drives"] == [
        {"folder": str(each), "bytes_per_s": 2e8} for each in (folder, *copies)
    ]
    alone = json.loads(command.helm(*plan, "--json").stdout)
    rates = [each["predicted"]["decode_tokens_per_s"] for each in (alone, found)]
    assert rates[1] > 2.5 * rates[0]
    shown = " ".join(command.helm(*plan, *named).stdout.split())
    assert "from 3 drives at once" in shown
    refused = command.helm(*plan, "--copy", str(tmp_path), status=2).stderr
    assert f"{tmp_path}/model.safetensors cannot be read" in refused
    assert "--copy takes folders" in refused
    assert "leave --copy out" in command.helm(*plan, *named, "--formats", status=2).stderr


def test_a_plan_has_the_rates_that_drives_have_together(
    folder: Path, copies: list[Path], whole: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Any]()

    def measure(drives: Any, _progress: Any) -> tuple[float, ...]:
        read.append(drives)
        return 3e8, 1e8

    monkeypatch.setattr(measured, "measure_drives", measure)
    weights = read_weights(folder, read_config(folder / "config.json"))
    asked = load_options({**options(memory_bytes=whole[1] - (40 << 20)), "profile": None})
    problem = asked.problem(weights.config, weights.tensors, machine())
    with pytest.raises(helm.OutOfMemoryError) as refused:
        solve(problem)
    drives = drives_of(weights.tensors, folder, copies[:1])
    disk = study_from_disk(problem, drives, asked, refused.value).best.disk
    assert read == [[[each / "model.safetensors"] for each in (folder, copies[0])]]
    assert disk is not None
    assert [drive.bytes_per_s for drive in disk.drives] == [3e8, 1e8]
    assert disk.bytes_per_s == 4e8


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
    rates = measure_drives([[file]], lambda _what, share: told.append(share), most_bytes=8 << 20)
    assert rates is not None
    assert len(rates) == 1
    assert rates[0] > 1e5
    assert told[-1] == 1.0
    assert measure_drives([[tmp_path / "absent"]]) is None
    (tmp_path / "small").write_bytes(bytes(100))
    assert measure_drives([[tmp_path / "small"]]) is not None


def test_drives_are_measured_at_once(folder: Path, copies: list[Path], tmp_path: Path) -> None:
    drives = [[each / "model.safetensors"] for each in (folder, *copies)]
    told = set[str]()
    rates = measure_drives(drives, lambda what, _share: told.add(what), most_bytes=24 << 20)
    assert rates is not None
    assert len(rates) == 3
    assert min(rates) > 1e5
    assert told == {"the checkpoint's 3 drives"}
    assert measure_drives([*drives, [tmp_path / "absent"]], most_bytes=4 << 20) is None


def test_reads_through_the_page_cache_are_told() -> None:
    assert read_through_cache({"disk_step_bytes": 0, "disk_direct": True}) == []
    assert read_through_cache({"disk_step_bytes": 1, "disk_direct": True}) == []
    (notice,) = read_through_cache({"disk_step_bytes": 1, "disk_direct": False})
    assert "refuses direct reads" in notice


def test_the_disk_is_read_into_memory_of_the_runtime_s_kind() -> None:
    """Huge pages, which shared memory has none of: a read into small ones falls into pieces."""
    buffers = _buffers(2)
    assert buffers.shape == (2, DEPTH, READ_BYTES)
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
