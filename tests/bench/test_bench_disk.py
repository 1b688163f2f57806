"""The benchmark of models that memory does not hold, with a small one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import disk

from helm.machine.profile import load_profile
from synthetic import make_checkpoint
from synthetic_folder import config_file


def test_a_model_of_twice_the_memory_allowed(tmp_path: Path) -> None:
    shape = config_file(tmp_path, num_hidden_layers=12)
    profile = dataclasses.replace(load_profile("cpu-desktop-64gb-ddr5"), disk_bytes_per_s=1e9)
    (tmp_path / "profile.json").write_text(profile.to_json())
    copy = tmp_path / "copy"
    shutil.copytree(make_checkpoint(str(shape), "f32", tmp_path), copy)
    found = disk.main(
        ["--shape", str(shape), "--dtype", "f32", "--share", "0.6", "--copy", str(copy),
         "--tokens", "4", "--rounds", "1", "--seconds", "0.2",
         "--profile", str(tmp_path / "profile.json"), "--root", str(tmp_path),
         "--json", str(tmp_path / "out.json")]
    )  # fmt: skip
    assert found["tokens_equal"]
    assert found["bytes_planned"]
    assert found["read_ahead"]
    assert found["within_plan"]
    assert found["step_bytes"] > 0
    assert found["mapped_s"] is None or found["over_mapped"] > 0  # None: no control group
    assert json.loads((tmp_path / "out.json").read_text())["summary"] == found
