"""Small files of this user's own, in a place where others can write."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from helm.base import own_folder
from helm.measure import profile_cache
from helm.measure.profile_cache import cache_path, cached_file, keep

_STRANGER = 1234  # a user's number


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user: where only root can do that, this one becomes another."""
    if os.geteuid() == 0:
        os.chown(path, _STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: _STRANGER)


def test_what_is_written_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ours" / "file"
    before = os.stat(tmp_path).st_mtime
    own_folder.write(path, "first")
    own_folder.write(path, "second")
    content, written_s = own_folder.read(path)
    assert content == b"second"
    assert written_s >= before - 1
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["file"]


def test_a_folder_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    own_folder.write(path, "ours")
    give_away(tmp_path, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to others"):
        own_folder.read(path)
    with pytest.raises(PermissionError, match="belongs to others"):
        own_folder.write(path, "again")
    assert path.read_text() == "ours"


def test_a_file_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "file"
    own_folder.write(path, "planted")
    give_away(path, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to others"):
        own_folder.read(path)
    own_folder.write(path, "ours")
    assert own_folder.read(path)[0] == b"ours"


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("theirs")
    (tmp_path / "folder").symlink_to(target)
    for act in (own_folder.read, lambda path: own_folder.write(path, "ours")):
        with pytest.raises(OSError):  # noqa: PT011 - ELOOP or ENOTDIR
            act(tmp_path / "folder" / "file")
    assert (target / "file").read_text() == "theirs"
    link = tmp_path / "link"
    link.symlink_to(target / "file")
    with pytest.raises(OSError):  # noqa: PT011
        own_folder.read(link)
    own_folder.write(link, "ours")  # in place of the link
    assert (target / "file").read_text() == "theirs"


def test_what_is_no_small_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no small regular file"):
        own_folder.read(tmp_path / "pipe")


def test_a_folder_that_others_could_write_to_is_closed_first(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    own_folder.write(folder / "file", "ours")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without a home, files go to a shared folder: here that one."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_the_cache_is_of_this_user(homeless: Path) -> None:
    assert cache_path().parent == homeless / f"helm-{os.geteuid()}"
    keep(cached_file("threads"), "{}")
    assert stat.S_IMODE(cache_path().parent.stat().st_mode) == 0o700
    assert own_folder.read(cached_file("threads"))[0] == b"{}"


def test_a_cache_that_was_planted_is_not_used(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helm.machine.profile import load_profile

    folder = cache_path().parent
    keep(cache_path(), load_profile("cpu-laptop-16gb").to_json())
    assert profile_cache.cached_profile() is not None
    give_away(folder, monkeypatch)
    assert profile_cache.cached_profile() is None
    keep(cache_path(), "{}")
    assert cache_path().read_text() != "{}"


def test_a_plot_brings_its_own_place_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helm.commands import plots

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv("MPLCONFIGDIR", "")
    monkeypatch.delenv("MPLCONFIGDIR")
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with plots._place_to_write(tmp_path):
        assert Path(os.environ["MPLCONFIGDIR"]).parent == tmp_path
        assert Path(os.environ["MPLCONFIGDIR"]).is_dir()
    assert os.listdir(tmp_path) == []


def test_without_any_place_nothing_is_kept(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(Path, "mkdir", refuse)
    keep(cached_file("threads"), "{}")
    assert profile_cache.cached_profile() is None
