"""Files are written whole or not at all; those that are no files are not read."""

import os
import shutil
from pathlib import Path

import pytest

from tinyllama.harness.machine import files
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import NotWrittenError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_disk_without_the_space_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: there)
    files.check_writable(tmp_path / "x", "--save", 1000)
    with pytest.raises(UsageError, match=r"--save '.*x' takes 1001 bytes, and folder .* has 1000"):
        files.check_writable(tmp_path / "x", "--save", 1001)
    with pytest.raises(UsageError, match="free some space"):
        files.check_writable(tmp_path / "x", "--json")
    assert names(tmp_path) == []


def test_what_cannot_be_written_is_kept_elsewhere_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "name").write_text("before")
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(NotWrittenError, match="No space left on device; what was there before"):
        files.replace_text(folder / "name", "text")
    with pytest.raises(NotWrittenError, match="No space left on device"):
        files.write_new(folder / "new", b"text")
    assert names(folder) == ["name"]
    assert (folder / "name").read_text() == "before"
    kept = [path.read_text() for path in tmp_path.glob("tinyllama-kept-*/*")]
    assert kept == ["text", "text"]


def test_a_new_file_is_never_written_over_another(tmp_path: Path) -> None:
    files.write_new(tmp_path / "x", b"first")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"


def test_only_a_file_of_some_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert files.read_regular(path, 4) == b"1234"
    with pytest.raises(ValueError, match="has more than 3 bytes"):
        files.read_regular(path, 3)
    with pytest.raises(IsADirectoryError):
        files.read_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.read_regular(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe' is a pipe or a device, not a file"):
        files.read_regular(tmp_path / "pipe")


def test_a_file_has_the_mode_of_any_new_one(tmp_path: Path) -> None:
    def write(part: Path) -> None:
        part.write_bytes(b"1")
        part.chmod(0o600)  # as safetensors leaves it

    before = os.umask(0o027)
    try:
        files.write_whole(tmp_path / "x", write)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("way", ["x", "folder/../x", "link", "linked/x"])
def test_two_options_that_name_one_file_are_refused(tmp_path: Path, way: str) -> None:
    path, same = tmp_path / "x", tmp_path / way
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "linked").symlink_to(tmp_path)
    files.check_apart(("--a", path), ("--b", None), ("--c", None), ("--d", tmp_path / "y"))
    files.check_apart(("--a", path), ("--a", path))
    with pytest.raises(UsageError, match=f"--a and --c are both '{same}': name two files"):
        files.check_apart(("--a", path), ("--b", None), ("--c", same))


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """A tree that somebody else made may hold one to any place."""
    target, link = tmp_path / "other", tmp_path / "link"
    target.write_text("theirs")
    link.symlink_to(target)
    files.replace_text(link, "ours")
    assert (link.is_symlink(), link.read_text(), target.read_text()) == (False, "ours", "theirs")
