"""A revision is found whatever its name is, unpacked whole, and the repository stays as it was."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from correctness_tests.support.gated_suite import plain_git
from tinyllama.harness.gate.proof import tree_digest
from tinyllama.harness.gate.revision import (
    RevisionError,
    check_out,
    overlay,
    resolve,
    same_tree,
    tracked_files,
    tree_of,
    untracked_code,
)

NAMES = [
    "main",
    "feature/with-dashes--and=signs",
    "quote'd",
    'dou"ble',
    "$(touch${IFS}touched)",
    "`touch`;touch&touched",
    "README.md",
    "umlaut-ä",
]
LIKE_OPTIONS = ["-x", "--all", "--upload-pack=touch", "--output=touched"]
NOWHERE = ["nope", "", " ", "-", "--", "--all", "--git-dir", "--upload-pack=touch touched"]
NOWHERE += ["^main", "main..main", "main\0x", "main\nmain", "main main", "HEAD:README.md"]
NOWHERE += ["$(touch touched)"]


settings = pytest.fixture(autouse=True)(plain_git)


def git(folder: Path, *args: str) -> str:
    run = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, check=True)
    return os.fsdecode(run.stdout).strip()


def commit(folder: Path, message: str = "a change") -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", f"--message={message}")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Two commits on ``main``, in a folder whose name takes quoting."""
    folder = tmp_path / "a 'repo' with $(touch x)"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "README.md").write_text("one\n")
    (folder / ".gitignore").write_text("ignored.py\n")
    commit(folder, "first")
    (folder / "a package").mkdir()
    (folder / "a package" / 'it\'s "one".py').write_text("x = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("README.md")
    commit(folder, "second")
    return folder


def state(repo: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in (repo / ".git").rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "~1", "^"])
@pytest.mark.parametrize("kind", ["tags", "remotes"])
def test_a_name_of_two_commits_is_refused_and_both_are_named(
    repo: Path, kind: str, end: str
) -> None:
    """git would take the tag, and say so where nobody looks."""
    first, second = git(repo, "rev-parse", "main~1"), git(repo, "rev-parse", "main")
    third = commit(repo, "third")
    git(repo, "branch", "u@s/twice", third)
    git(repo, "update-ref", f"refs/{kind}/u@s/twice", second)
    both = rf"'u@s/twice' names several .*refs/{kind}/u@s/twice is .*: use a long name"
    with pytest.raises(RevisionError, match=both):
        resolve(f"u@s/twice{end}", repo)
    assert resolve("refs/heads/u@s/twice", repo) == third
    assert resolve(f"refs/{kind}/u@s/twice~1", repo) == first
    git(repo, "update-ref", f"refs/{kind}/u@s/twice", third)
    assert resolve("u@s/twice", repo) == third, "two names of one commit are no question"


@pytest.mark.parametrize("name", [*NAMES, *LIKE_OPTIONS])
def test_a_branch_of_any_name_is_its_commit(repo: Path, name: str) -> None:
    first = git(repo, "rev-parse", "HEAD~1")
    git(repo, "update-ref", f"refs/heads/{name}", first)
    assert resolve(name, repo) == first
    assert not list(repo.parent.rglob("touched"))


def test_a_tag_a_short_hash_and_an_ancestor_are_commits(repo: Path) -> None:
    head = git(repo, "rev-parse", "HEAD")
    git(repo, "tag", "--annotate", "v1.0", "--message=a release")
    assert git(repo, "rev-parse", "v1.0") != head, "an object of its own"
    assert resolve("v1.0", repo) == resolve(head[:10], repo) == resolve("HEAD", repo) == head
    assert resolve("v1.0~1", repo / "a package") == git(repo, "rev-parse", "HEAD~1")


@pytest.mark.parametrize("name", NOWHERE)
def test_what_names_no_commit_is_refused(repo: Path, name: str) -> None:
    with pytest.raises(RevisionError, match=r"^no commit .* in .*: fetch it"):
        resolve(name, repo)
    with pytest.raises(RevisionError, match="no commit"):
        check_out(name, repo, repo.parent / "out")
    assert not (repo.parent / "out").exists()
    assert not list(repo.parent.rglob("touched"))


def test_a_shallow_clone_says_how_to_fetch_the_rest(repo: Path) -> None:
    clone = repo.parent / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", repo.resolve().as_uri(), clone], check=True
    )
    assert resolve("HEAD", clone) == git(repo, "rev-parse", "HEAD")
    with pytest.raises(RevisionError, match=r"git fetch --unshallow \(in CI: fetch-depth: 0\)"):
        resolve(git(repo, "rev-parse", "HEAD~1"), clone)


def test_where_nothing_can_be_asked_the_reason_is_said(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RevisionError, match="not a git repository"):
        resolve("main", tmp_path)
    with pytest.raises(RevisionError, match="No such file"):
        resolve("main", tmp_path / "gone")
    git(tmp_path, "init", "--quiet", "--bare", "bare")
    with pytest.raises(RevisionError, match="must be run in a work tree"):
        tree_of(tmp_path / "bare")
    git(tmp_path, "init", "--quiet", "new")
    with pytest.raises(RevisionError, match="nothing was committed yet"):
        resolve("main", tmp_path / "new")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RevisionError, match="git is not installed"):
        resolve("main", repo)


def test_a_hook_of_another_repository_does_not_mislead(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other/index"))
    assert tree_of(repo / "a package") == str(repo)
    assert same_tree("main", repo)


# -- the working tree and a revision ----------------------------------------------------------

CHANGES: dict[str, tuple[bool, Callable[[Path], object]]] = {
    "nothing": (True, lambda repo: None),
    "a new time": (True, lambda repo: os.utime(repo / "run.sh", (0, 0))),
    "an ignored file": (True, lambda repo: (repo / "ignored.py").touch()),
    "notes": (True, lambda repo: (repo / "notes.txt").touch()),
    "a record": (True, lambda repo: in_results(repo, "card/one.json")),
    "a module beside records": (False, lambda repo: in_results(repo, "card/one.py")),
    "a tracked file": (False, lambda repo: (repo / "README.md").write_text("two\n")),
    "a staged file": (False, lambda repo: stage(repo, "README.md")),
    "a deleted file": (False, lambda repo: (repo / "run.sh").unlink()),
    "a new module": (False, lambda repo: (repo / "a package" / "new.py").touch()),
    "a new table": (False, lambda repo: (repo / "a package" / "new.json").touch()),
    "new settings": (False, lambda repo: (repo / "new.toml").touch()),
}


def in_results(repo: Path, name: str) -> None:
    path = repo / "results" / name
    path.parent.mkdir(parents=True)
    path.touch()


def stage(repo: Path, name: str) -> None:
    (repo / name).write_text("staged\n")
    git(repo, "add", name)


@pytest.mark.parametrize("change", CHANGES)
def test_the_tree_is_that_revision_or_was_changed(repo: Path, change: str) -> None:
    same, make = CHANGES[change]
    make(repo)
    before = state(repo)
    assert same_tree("main", repo / "a package") is same
    assert not same_tree("main~1", repo)
    assert state(repo) == before


def test_whether_the_tree_is_an_unknown_revision_is_not_answered(repo: Path) -> None:
    with pytest.raises(RevisionError):
        same_tree("nope", repo)


# -- unpacking --------------------------------------------------------------------------------


def test_a_commit_is_unpacked_and_the_repository_left_alone(repo: Path, tmp_path: Path) -> None:
    (repo / "README.md").write_text("changed since\n")
    (repo / "new.py").touch()
    before = state(repo)
    folder = tmp_path / "out of 'it'" / "--base"
    assert check_out("main", repo / "a package", folder) == folder
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert found == {"README.md", ".gitignore", 'a package/it\'s "one".py', "run.sh", "link"}
    assert (folder / "README.md").read_text() == "one\n"
    assert (folder / "link").readlink() == Path("README.md")
    assert os.access(folder / "run.sh", os.X_OK)
    assert state(repo) == before
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("target", ["../../outside", "/etc/passwd", "a package/../../outside"])
def test_a_link_out_of_the_tree_is_not_unpacked(repo: Path, tmp_path: Path, target: str) -> None:
    (repo / "bad").symlink_to(target)
    commit(repo)
    with pytest.raises(RevisionError, match=r"bad of .* links out of its tree"):
        check_out("HEAD", repo, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_out_of_the_tree_is_found_where_there_is_nothing_else(
    repo: Path, tmp_path: Path
) -> None:
    for path in repo.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (repo / "bad").symlink_to("../../outside")
    commit(repo)
    with pytest.raises(RevisionError, match=r"bad of .* links out of its tree"):
        check_out("HEAD", repo, tmp_path / "out")


def test_what_an_archive_or_a_sparse_checkout_would_leave_out_is_there(
    repo: Path, tmp_path: Path
) -> None:
    (repo / ".gitattributes").write_text("*.sh export-ignore\n")
    commit(repo)
    git(repo, "config", "core.sparseCheckout", "true")
    (repo / ".git/info/sparse-checkout").write_text("/README.md\n")
    assert (check_out("HEAD", repo, tmp_path / "out") / "run.sh").is_file()


@pytest.mark.parametrize("command", ["read-tree", "checkout-index"])
def test_a_tree_that_is_not_written_whole_leaves_nothing(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\n"{shutil.which("git")}" "$@" || exit\n'
        f'case "$*" in *{command}*) echo lost >&2; exit 1;; esac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(RevisionError, match="lost"):
        check_out("main", repo, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- one measuring instrument for both sides --------------------------------------------------


def test_files_are_laid_over_and_others_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source / "harness", target):
        folder.mkdir(parents=True)
    for name in ("same.py", "changed.py", "harness/new.py", "linked.py"):
        (source / name).write_text(f"of the candidate: {name}")
    (target / "same.py").write_text("of the candidate: same.py")
    (target / "changed.py").write_text("of the base")
    (target / "kept.py").write_text("of the base")
    (target / "linked.py").symlink_to("kept.py")
    names = ["same.py", "changed.py", "harness/new.py", "linked.py"]
    overlay(source, target, names)
    assert all((target / n).read_bytes() == (source / n).read_bytes() for n in names)
    assert (target / "kept.py").read_text() == "of the base"


# -- what git shows in another way than it is ---------------------------------------------------


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_is_told_not_to_look_at_is_a_difference(repo: Path, mark: str) -> None:
    git(repo, "update-index", mark, "README.md")
    assert same_tree("main", repo)
    (repo / "README.md").write_text("two\n")
    assert not same_tree("main", repo)
    git(repo, "update-index", f"--no-{mark.removeprefix('--')}", "README.md")
    git(repo, "config", "core.ignoreStat", "true")
    assert not same_tree("main", repo)


def test_a_file_that_keeps_its_size_and_time_is_read(repo: Path) -> None:
    path = repo / "README.md"
    os.utime(path, (10**9, 10**9))
    git(repo, "config", "core.trustctime", "false")
    git(repo, "update-index", "--refresh")
    path.write_text("two\n")  # as long as it was
    os.utime(path, (10**9, 10**9))
    assert not same_tree("main", repo)


def test_a_commit_is_not_what_was_put_in_its_place(repo: Path, tmp_path: Path) -> None:
    first, second = git(repo, "rev-parse", "HEAD~1"), git(repo, "rev-parse", "HEAD")
    git(repo, "replace", second, first)
    assert (check_out("main", repo, tmp_path / "out") / "run.sh").exists()
    git(repo, "replace", "--delete", second)
    (repo / "README.md").write_text("three\n")
    third = commit(repo)
    (repo / ".git/info/grafts").write_text(f"{third} {first}\n")
    assert resolve("main~1", repo) == second


@pytest.mark.parametrize("name", ["GIT_LITERAL_PATHSPECS", "GIT_NOGLOB_PATHSPECS"])
def test_a_variable_does_not_hide_untracked_code(
    repo: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (repo / "new.py").touch()
    monkeypatch.setenv(name, "1")
    assert untracked_code(repo) == [repo / "new.py"]
    assert not same_tree("main", repo)


@pytest.fixture
def outer(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of which ``kernels`` is a submodule."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")
    folder = tmp_path / "outer"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "submodule", "--quiet", "add", str(repo), "kernels")
    commit(folder)
    return folder


@pytest.mark.long
def test_a_submodule_is_unpacked_as_its_commit_says(outer: Path, tmp_path: Path) -> None:
    git(outer / "kernels", "checkout", "--quiet", "HEAD~1")
    commit(outer)
    assert (check_out("main~1", outer, tmp_path / "out") / "kernels/run.sh").is_file()
    after = check_out("main", outer, tmp_path / "after") / "kernels"
    assert not (after / "run.sh").exists()
    assert (after / "README.md").is_file()
    git(outer, "submodule", "--quiet", "deinit", "--force", "kernels")
    assert not list((check_out("main", outer, tmp_path / "without") / "kernels").iterdir())


def test_a_commit_of_a_submodule_that_is_not_here_is_refused(outer: Path, tmp_path: Path) -> None:
    git(outer, "update-index", "--cacheinfo", f"160000,{'1' * 40},kernels")
    git(outer, "commit", "--quiet", "--message=another")
    with pytest.raises(RevisionError, match=r"submodule kernels of .* git -C kernels fetch"):
        check_out("main", outer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_files_of_a_submodule_are_the_trees(outer: Path) -> None:
    assert outer / "kernels/run.sh" in tracked_files(outer)
    before = tree_digest(outer, None)
    (outer / "kernels/README.md").write_text("three\n")
    assert tree_digest(outer, None) != before


# -- the digest of a tree -----------------------------------------------------------------------


def test_a_digest_tells_a_file_that_is_gone_from_an_empty_one_and_from_a_link(repo: Path) -> None:
    path = repo / "README.md"
    path.write_text("")
    found = [tree_digest(repo, None)]
    path.unlink()
    found.append(tree_digest(repo, None))
    path.symlink_to("run.sh")
    found.append(tree_digest(repo, None))
    path.unlink()
    path.write_text("run.sh")
    found.append(tree_digest(repo, None))
    assert len(set(found)) == 4


def test_names_of_any_bytes_have_a_digest_and_end_where_they_end(repo: Path) -> None:
    (repo / os.fsdecode(b"latin-\xe4.py")).write_text("")
    before = tree_digest(repo, None)
    (repo / "b.py").write_text("x = 1\n")
    one = tree_digest(repo, None)
    assert one != before
    (repo / "b.py").rename(repo / "b.py\nc.py")
    assert tree_digest(repo, None) != one
