"""Trees of git: what is compared is what git would commit, and the checkout stays as it is."""

from pathlib import Path

import pytest

from correctness_tests.support.own_repository import committed, git
from tinyllama.harness.gate import snapshots
from tinyllama.harness.gate.snapshots import Repository
from tinyllama.harness.machine.errors import UsageError


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two commits; the current folder."""
    files = {".gitignore": "ignored\n", "op.py": "x = 1\n"}
    folder = committed(tmp_path / "checkout", files, monkeypatch)
    git("tag", "v1")
    (folder / "op.py").write_text("x = 2\n")
    git("commit", "--quiet", "--all", "--message=two")
    return folder


@pytest.fixture
def repository(checkout: Path, tmp_path: Path) -> Repository:
    return Repository(checkout, tmp_path / "scratch")


def test_a_checkout_without_changes_is_its_commit(repository: Repository) -> None:
    assert repository.of_working_tree() == repository.of_commit(repository.resolve("main"))


def test_a_snapshot_has_the_tracked_files_as_they_are_and_untracked_ones(
    repository: Repository, checkout: Path, tmp_path: Path
) -> None:
    (checkout / "op.py").write_text("x = 3\n")
    (checkout / "new.json").write_text("{}")
    (checkout / "ignored").write_text("")
    git("rm", "--quiet", "--cached", ".gitignore")
    before = git("status", "--porcelain")
    root = tmp_path / "candidate"
    repository.unpack(repository.of_working_tree(), root)
    files = {path.name for path in root.iterdir()}
    assert files == {"op.py", "new.json", ".gitignore"}
    assert (root / "op.py").read_text() == "x = 3\n"
    assert git("status", "--porcelain") == before
    assert "dangling" not in git("fsck"), "no object was written into the checkout"


def test_differences_name_files_modes_and_what_is_gone(
    repository: Repository, checkout: Path
) -> None:
    (checkout / ".gitignore").unlink()
    (checkout / "op.py").chmod(0o755)
    base = repository.of_commit(repository.resolve("main"))
    changed = repository.changed(base, repository.of_working_tree())
    assert [(difference.name, difference.mode, difference.deleted) for difference in changed] == [
        (".gitignore", False, True),
        ("op.py", True, False),
    ]


def test_reports_of_the_gate_are_no_part_of_a_tree(checkout: Path, tmp_path: Path) -> None:
    reports = [checkout / "gate.json", checkout / "ignored", tmp_path / "elsewhere.json"]
    repository = Repository(checkout, tmp_path / "scratch", reports)
    before = repository.of_working_tree()
    (checkout / "gate.json").write_text("{}")
    assert repository.of_working_tree() == before
    git("add", "gate.json")
    with pytest.raises(UsageError, match="git tracks that file"):
        repository.of_working_tree()


def test_submodules_are_unpacked_and_must_be_committed(
    repository: Repository, checkout: Path, tmp_path: Path
) -> None:
    allow = ("-c", "protocol.file.allow=always")
    git("init", "--quiet", str(tmp_path / "inner"))
    (tmp_path / "inner/header.h").write_text("1")
    git("-C", str(tmp_path / "inner"), "add", "--all")
    git("-C", str(tmp_path / "inner"), "commit", "--quiet", "--message=inner")
    git(*allow, "submodule", "--quiet", "add", str(tmp_path / "inner"), "inner")
    root = tmp_path / "candidate"
    repository.unpack(repository.of_working_tree(), root)
    assert (root / "inner/header.h").read_text() == "1"
    (checkout / "inner/header.h").write_text("2")
    with pytest.raises(UsageError, match="submodule inner has changes"):
        repository.of_working_tree()


def test_a_revision_that_is_not_there_says_how_to_fetch_it(
    repository: Repository, checkout: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"no commit 'v2'.*git fetch"):
        repository.resolve("v2")
    git("clone", "--quiet", "--depth=1", f"file://{checkout}", str(tmp_path / "shallow"))
    shallow = Repository(tmp_path / "shallow", tmp_path / "of shallow")
    with pytest.raises(UsageError, match="fetch-depth: 0"):
        shallow.resolve("v1")
    with (
        pytest.raises(UsageError, match="cannot be read as a checkout"),
        snapshots.opened(tmp_path),
    ):
        pass
