"""Files are written whole or not at all, and what a killed writer leaves goes with the next."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from correctness_tests.support.commands import ENVIRONMENT
from tinyllama.harness.machine import files
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import NotWrittenError

WRITER = """
import sys, time
from pathlib import Path
from tinyllama.harness.machine import files
def write(part):
    (part.parent / "of-a-library").write_text("half")
    part.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
files.write_whole(Path(sys.argv[1]), write)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / ".other.part").mkdir()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "old")],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
        writers[0].send_signal(signal.SIGKILL)
        writers[0].wait()
        assert len(names(tmp_path)) == 4
        files.write_new(tmp_path / "new", b"new")
        found = names(tmp_path)
        assert len(found) == 4, "one writer lives, and its file with it"
        (part,) = (name for name in found if name.startswith(".tinyllama-"))
        assert names(tmp_path / part) == ["content", "of-a-library"]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    files.check_writable(tmp_path / "x", "--save")
    assert names(tmp_path) == [".other.part", "new", "old"]
    assert (tmp_path / "old").read_text() == "old"


def test_writers_of_one_folder_do_not_remove_each_others_files(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for number in range(40):
                files.write_whole(tmp_path / name, lambda part: part.write_text(f"{name}"))
                files.write_new(tmp_path / f"{name}-{number}", b"new")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(names(tmp_path)) == 4 * 41


def test_a_name_as_long_as_a_name_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    files.check_writable(path, "--save")
    files.replace_text(path, "new")
    assert path.read_text() == "new"
    longer = tmp_path / ("x" * 256)
    with pytest.raises(UsageError, match=r"--save .*x' cannot be written: File name too long"):
        files.check_writable(longer, "--save")


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


@pytest.mark.parametrize("write", [files.replace_text, partial(files.write_new, keep=True)])
def test_what_cannot_be_written_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    for put in ("replace", "link"):
        monkeypatch.setattr(files.os, put, full)
    folder = tmp_path / "there"
    folder.mkdir()
    content = "text" if write is files.replace_text else b"text"
    with pytest.raises(
        NotWrittenError, match=r"No space left on device.* content is in '"
    ) as error:
        write(folder / "name", content)  # type: ignore[operator]
    (kept,) = tmp_path.glob("tinyllama-kept-*/name")
    assert repr(str(kept)) in str(error.value)
    assert kept.read_text() == "text"
    assert names(folder) == []


def test_a_text_of_any_name_can_be_written(tmp_path: Path) -> None:
    files.replace_text(tmp_path / "x", "name " + os.fsdecode(b"\xff"))
    assert (tmp_path / "x").read_text() == "name \\udcff"


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


def test_what_is_written_whole_is_read_by_all_and_what_is_not_ours_as_it_was(
    tmp_path: Path,
) -> None:
    files.write_json(tmp_path / "x.json", {"a": [1]})
    assert (tmp_path / "x.json").read_text() == '{\n "a": [\n  1\n ]\n}\n'
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644
    before = os.umask(0o027)
    try:
        files.write_whole(tmp_path / "own", lambda part: part.write_bytes(b"1"))
    finally:
        os.umask(before)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o640


def test_content_that_is_kept_has_the_end_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    files._kept(Path("x" * 50 + ".json"), lambda place: place.write_text("text"))
    (kept,) = tmp_path.glob("tinyllama-kept-*/*")
    assert kept.name == "x" * 35 + ".json"


def test_no_more_of_a_file_is_read_than_tells_that_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that grows meanwhile."""
    path, asked = tmp_path / "x", list[int]()
    path.write_bytes(b"1234")

    def read(most: int) -> bytes:
        asked.append(most)
        return b"12345"

    file = contextlib.nullcontext(SimpleNamespace(read=read))
    monkeypatch.setattr("builtins.open", lambda *given, **more: file)
    with pytest.raises(ValueError, match="has more than 4 bytes"):
        files.read_regular(path, 4)
    assert asked == [5]


def test_the_only_writer_has_a_lock_that_all_users_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        with files.only_writer(tmp_path / "x"):
            (lock,) = tmp_path.glob("tinyllama-file-*.lock")
            assert lock.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


@pytest.mark.parametrize("way", ["x", "folder/../x", "link", "linked/x"])
def test_two_options_that_name_one_file_are_refused(tmp_path: Path, way: str) -> None:
    one, same = tmp_path / "x", tmp_path / way
    (tmp_path / "link").symlink_to(one)
    (tmp_path / "linked").symlink_to(tmp_path)
    files.check_apart(("--a", one), ("--b", None), ("--c", None), ("--d", tmp_path / "y"))
    files.check_apart(("--a", one), ("--a", one))
    with pytest.raises(UsageError, match=f"--a and --c are both '{same}': name two files"):
        files.check_apart(("--a", one), ("--b", None), ("--c", same))


def test_a_folder_is_locked_until_its_writer_ends(tmp_path: Path) -> None:
    with files._locked(tmp_path), pytest.raises(OSError), files._locked(tmp_path, wait=False):  # noqa: PT011
        pytest.fail("it was free")
    with files._locked(tmp_path, wait=False):
        pass


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """A tree that somebody else made may hold one to any place."""
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_text("theirs")
    link.symlink_to(other)
    files.replace_text(link, "ours")
    assert (link.is_symlink(), link.read_text(), other.read_text()) == (False, "ours", "theirs")
