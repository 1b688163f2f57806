"""What loaded models were granted counts as taken until they give it back."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import helm
from cgroup import memory_cgroup, needs_cgroup
from device_profiles import fast_accelerator
from helm.errors import OutOfMemoryError
from helm.machine import grants
from helm.machine.grants import Grant, claims, file_key, in_turn, pending_bytes
from helm.machine.resources import memory_available, memory_granted
from helm.model.hub import bundled_model

MIB = 1 << 20
SLACK = 8 * MIB  # arenas are whole huge pages
BIG = {"max_sequences": 256, "prefix_cache": False}  # a KV cache of 160 MiB
MEMINFO = {"proc/meminfo": "MemAvailable: 8388608 kB"}


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where grants are told, of these tests alone: models that other tests of this process hold
    do not count."""
    runtime = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    gc.collect()
    others = grants._live

    class Own(set[Grant]):
        def discard(self, grant: Grant) -> None:
            super().discard(grant)
            others.discard(grant)  # one that is given back meanwhile

    monkeypatch.setattr(grants, "_live", Own())
    return runtime / "helm"


def near(found: int, expected: int) -> bool:
    return abs(found - expected) <= SLACK


@contextlib.contextmanager
def another(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `program`, which says when it has come so far, and waits."""
    code = f"import helm, os, signal, time\n{textwrap.dedent(program)}\nprint('here', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\ntime.sleep(60)"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def test_models_of_one_process_are_not_granted_the_same_bytes() -> None:
    with helm.LLM(**BIG) as one:
        planned = one.plan.memory["cpu"].total_bytes
        assert near(memory_granted(), planned)
        with helm.LLM(**BIG):
            assert near(memory_granted(), 2 * planned)
        assert near(memory_granted(), planned)
    assert memory_granted() == 0


def test_what_a_model_has_taken_is_not_counted_twice() -> None:
    with helm.LLM(**BIG) as llm:
        before = memory_granted()
        llm.generate([[1 + i, 2] for i in range(256)], max_tokens=200)
        taken = before - memory_granted()
        assert 50 * MIB < taken < llm.plan.memory["cpu"].total_bytes


def test_a_stream_keeps_the_grant_and_the_collector_gives_it_back() -> None:
    llm = helm.LLM(**BIG)
    stream = llm.stream("Once upon a time")
    next(stream)
    llm.close()
    assert memory_granted() > 100 * MIB
    del stream
    gc.collect()
    assert memory_granted() == 0
    llm = helm.LLM(**BIG)
    assert memory_granted() > 100 * MIB
    del llm
    gc.collect()
    assert memory_granted() == 0


def test_a_load_that_fails_gives_its_grant_back() -> None:
    def cancel(_done: int, _total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        helm.LLM(progress=cancel, **BIG)
    assert memory_granted() == 0


def test_another_process_counts_until_it_is_killed(folder: Path) -> None:
    with another("llm = helm.LLM(max_sequences=256)") as process:
        assert 100 * MIB < memory_granted() < 400 * MIB
        assert len(list(folder.glob("*.json"))) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert memory_granted() == 0
        assert not list(folder.glob("*.json"))


def test_a_fork_that_ends_gives_nothing_back_and_counts_its_parent() -> None:
    with helm.LLM(**BIG):
        here = memory_granted()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, str(memory_granted()).encode())
                Grant.close(next(iter(helm.machine.grants._live)))  # as its interpreter's end does
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert near(int(os.read(read, 99)), here)
        assert near(memory_granted(), here)
        os.close(read)
        os.close(write)


def test_mapped_weights_count_once_per_file() -> None:
    size = (bundled_model() / "model.safetensors").stat().st_size
    with helm.LLM(weights="mapped", max_sequences=1), helm.LLM(weights="mapped", max_sequences=1):
        key = file_key(bundled_model() / "model.safetensors")
        found = claims()
        assert [list(claim.files) for claim in found] == [[key], [key]]
        assert 0 < found[0].files[key] <= size
        once = pending_bytes(found, ()) - pending_bytes(found, {key})
        assert once == found[0].files[key]


def test_simulated_accelerators_are_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "sim:vram=2GiB", "profile": fast_accelerator(), "batch": 128}
    with helm.LLM(**options) as llm:
        here, there = llm.plan.memory["cpu"], llm.plan.memory["accelerator"]
        assert there.kv_bytes > 50 * MIB
        total = here.total_bytes + there.total_bytes
        assert there.kv_bytes < memory_granted() <= total + SLACK
    needed = here.total_bytes + here.reserve_bytes + there.total_bytes
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("helm.session.here.memory_available", lambda shared, free=free: free)
        refused = pytest.raises(OutOfMemoryError, match="the simulated accelerator takes")
        with contextlib.nullcontext() if fits else refused:
            helm.LLM(**options).close()


_FILL = """
import helm
from helm.errors import OutOfMemoryError
llms = []
try:
    while len(llms) < 9:
        llms.append(helm.LLM(max_sequences=256, threads=1))
except OutOfMemoryError as error:
    print(error)
for llm in llms:
    llm.generate([[1 + i, 2] for i in range(256)], max_tokens=500)
print(len(llms), sum(llm.plan.memory["cpu"].total_bytes for llm in llms))
"""


@needs_cgroup
def test_models_of_a_container_all_get_what_they_were_granted() -> None:
    with memory_cgroup(700 << 20) as group:
        result = group.run([sys.executable, "-c", _FILL])
    assert result.returncode == 0, result.stderr
    refused, summary = result.stdout.splitlines()
    assert "are granted to models that are loaded" in refused
    count, granted = map(int, summary.split())
    assert count >= 2
    assert granted < 700 << 20


def test_two_that_ask_at_once_take_turns() -> None:
    program = """
        from helm.machine.grants import in_turn
        turn = in_turn()
        turn.__enter__()
    """
    with another(program) as process:
        os.kill(process.pid, signal.SIGSTOP)  # even one that never goes on keeps nobody for ever
        start = time.monotonic()
        with in_turn(0.2):
            assert 0.2 <= time.monotonic() - start < 5
        threading.Timer(0.3, process.kill).start()
        start = time.monotonic()
        with in_turn():
            assert 0.2 < time.monotonic() - start < 5


def fake(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def told(root: Path, monkeypatch: pytest.MonkeyPatch, **grants: dict[str, object]) -> Path:
    """Another machine on which processes 7 and 8 run, and files tell of grants by `name`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    fields = " ".join(["S", *map(str, range(4, 50))])
    stats = {f"proc/{pid}/stat": f"{pid} (a) b) {fields}" for pid in (7, 8)}
    fake(root, {**MEMINFO, **stats, "run/user/5/x": ""})
    (root / "run/user/5/helm").mkdir(mode=0o700)
    for name, content in grants.items():
        whole = {"bytes": 0, "lazy": [], "files": {}, **content}
        (root / f"run/user/5/helm/0-{name.replace('_', '-')}.json").write_text(json.dumps(whole))
    return root


def test_what_files_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = mmap.PAGESIZE
    root = told(tmp_path, monkeypatch, x7_22_0={"bytes": 1})
    assert memory_available(root) == 8192 * MIB  # that name is none of ours
    for name in ("7-22-0", "7-22-1", "8-22-0", "8-23-0", "9-22-0"):
        content = {"bytes": 100 * MIB, "lazy": [], "files": {"1:2": 10 * MIB}}
        (root / f"run/user/5/helm/0-{name}.json").write_text(json.dumps(content))
    assert memory_available(root) == (8192 - 3 * 100 - 10) * MIB
    assert memory_available(root, {"1:2"}) == (8192 - 3 * 100) * MIB
    left = {path.name for path in (root / "run/user/5/helm").glob("0-[789]*")}
    assert left == {"0-7-22-0.json", "0-7-22-1.json", "0-8-22-0.json"}  # those of the dead are gone
    # Pages that are in memory, or were swapped out, are no longer free.
    entries = np.array([0, 1 << 63, 0, 1 << 62, 1 << 63, 0, 1 << 55], np.uint64)
    (root / "proc/8/pagemap").write_bytes(entries.tobytes())
    content = {"bytes": 0, "lazy": [[page, 6 * page], [1 << 40, page]], "files": {}}
    (root / "run/user/5/helm/0-8-22-0.json").write_text(json.dumps(content))
    assert memory_available(root) == (8192 - 2 * 100 - 10) * MIB - 4 * page


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"bytes": 1}', '{"bytes": "x", "lazy": [], "files": {}}', "null"]
)
def test_damaged_files_tell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    root = told(tmp_path, monkeypatch)
    (root / "run/user/5/helm/0-7-22-0.json").write_text(content)
    assert memory_available(root) == 8192 * MIB


def test_each_cgroup_loses_what_was_granted_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = told(tmp_path, monkeypatch, **{"7_22_0": {"bytes": 100 * MIB}})
    limit = {"memory.max": 900 * MIB, "memory.current": 100 * MIB}
    fake(root, {f"sys/fs/cgroup/box/{name}": value for name, value in limit.items()})
    fake(root, {"proc/self/cgroup": "0::/box/inner", "proc/7/cgroup": "0::/box/other"})
    assert memory_available(root) == 700 * MIB
    fake(root, {"proc/7/cgroup": "0::/elsewhere"})
    assert memory_available(root) == 800 * MIB


def test_folders_of_others_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = told(tmp_path, monkeypatch, **{"7_22_0": {"bytes": 100 * MIB}})
    assert memory_available(root) == 8092 * MIB
    own = root / "run/user/5/helm"
    own.chmod(0o777)
    assert memory_available(root) == 8192 * MIB
    own.chmod(0o700)
    own.rename(own.with_name("moved"))
    own.symlink_to("moved")
    assert memory_available(root) == 8192 * MIB


def test_where_nothing_can_be_written_the_process_still_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("helm.machine.grants._folder", lambda _root: None)
    with helm.LLM(**BIG) as llm:
        assert near(memory_granted(), llm.plan.memory["cpu"].total_bytes)
        monkeypatch.setattr("helm.session.here.memory_available", lambda shared: MIB)
        with pytest.raises(OutOfMemoryError, match="are granted to models that are loaded"):
            helm.LLM()
        with pytest.raises(OutOfMemoryError, match=r"smaller model$"):
            helm.LLM(memory_bytes=MIB)  # to close one would not help
    assert memory_granted() == 0
