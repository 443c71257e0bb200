"""A revision's tree, unpacked into a folder of its own; the checkout and its ``.git`` stay as they
are.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# A hook sets these for its own repository, which need not be the one that is named.
_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


class RevisionError(ValueError):
    """A revision, a checkout or a tree that cannot be used; the message names it and the fix."""


def tree_of(repo: Path) -> str:
    """The root folder of the checkout that a folder is in."""
    return _git(repo, "rev-parse", "--show-toplevel")[1].removesuffix("\n")


def resolve(rev: str, repo: Path) -> str:
    """The commit that a branch, a tag or a commit names; git never takes the name as an option.

    Raises RevisionError for none, and for a name of several, of which git would take one.
    """
    tree_of(repo)
    found = _commit(rev, repo)
    if _COMMIT.fullmatch(found):
        name = re.split(r"[~^]|@{", rev, maxsplit=1)[0]
        named = {ref: _commit(ref + rev.removeprefix(name), repo) for ref in _refs(name)}
        named = {ref: commit for ref, commit in named.items() if commit}
        if len(set(named.values())) > 1:
            each = ", ".join(f"{ref} is {commit[:10]}" for ref, commit in named.items())
            raise RevisionError(f"{name!r} names several in {repo} ({each}): use a long name")
        return found
    if _git(repo, "rev-parse", "--is-shallow-repository")[1].strip() == "true":
        fix = "this clone is shallow: git fetch --unshallow (in CI: fetch-depth: 0)"
    elif _git(repo, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", fails=(1, 128))[0]:
        fix = "nothing was committed yet"
    else:
        fix = "fetch it, or check its spelling (git before 2.30 finds none)"
    raise RevisionError(f"no commit {rev!r} in {repo}: {fix}")


def _commit(rev: str, repo: Path) -> str:
    """What git takes a name for; nothing where it knows none."""
    if "\0" in rev:
        return ""
    named = ("--end-of-options", f"{rev}^{{commit}}")
    return _git(repo, "rev-parse", "--verify", "--quiet", *named, fails=(1, 128))[1].strip()


def _refs(name: str) -> list[str]:
    """The long names that a short one may stand for, in git's order."""
    return [f"refs/{kind}{name}" for kind in ("", "tags/", "heads/", "remotes/")] if name else []


def same_tree(rev: str, repo: Path) -> bool:
    """Whether the working tree is exactly that revision, so that it would be compared with itself.

    Untracked files count where a benchmark could run them.
    """
    commit, top = resolve(rev, repo), Path(tree_of(repo))
    plainly = ("--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=none")
    index = top / _git(top, "rev-parse", "--git-path", "index")[1].removesuffix("\n")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "index"  # `diff` writes to it
        if index.exists():
            shutil.copy2(index, copy)  # with its time, by which it trusts those of files
        if _git(top, "diff", *plainly, commit, "--", fails=(1,), GIT_INDEX_FILE=str(copy))[0]:
            return False
    return not untracked_code(top)


def tracked_files(repo: Path) -> list[Path]:
    """The files that git tracks of the checkout that a folder is in."""
    return _listed(repo, "--cached")


def untracked_code(repo: Path) -> list[Path]:
    """The files that git neither tracks nor ignores, and that a benchmark could run."""
    return _listed(repo, "--others", "--exclude-standard", "--", "*.py", "*.json", "*.toml")


def _listed(repo: Path, *args: str) -> list[Path]:
    top = Path(tree_of(repo))
    names = _git(top, "ls-files", "-z", *args)[1].split("\0")
    return sorted({top / name for name in names if name})


def check_out(commit: str, repo: Path, folder: Path) -> Path:
    """Write a commit's tree into a fresh folder, whole or not at all; returns the folder."""
    commit, top = resolve(commit, repo), Path(tree_of(repo))
    folder.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory() as own:
            index = str(Path(own) / "index")  # the checkout's own stays as it is
            _git(top, "read-tree", commit, GIT_INDEX_FILE=index)
            write = ("checkout-index", "--all", "--quiet")
            _git(top, *write, GIT_INDEX_FILE=index, GIT_WORK_TREE=str(folder))
        for path in folder.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
                raise RevisionError(f"{path.relative_to(folder)} of {commit} links out of its tree")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def overlay(source: Path, target: Path, files: Sequence[str]) -> None:
    """Replace files of the target with those of the source, so that both sides have one clock."""
    for name in files:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link's target is another file
        path.write_bytes((source / name).read_bytes())


def _git(folder: Path, *args: str, fails: tuple[int, ...] = (), **places: str) -> tuple[int, str]:
    """Status and output. Raises RevisionError for a status that is neither 0 nor in ``fails``."""
    try:
        kept = {name: value for name, value in os.environ.items() if name not in _PLACES}
        done = subprocess.run(
            ["git", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *args],
            env={**kept, "LC_ALL": "C", **places},
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise RevisionError("git is not installed: a base revision is read with it") from error
    if done.returncode not in (0, *fails):
        said = " ".join(os.fsdecode(done.stderr).split()) or f"status {done.returncode}"
        raise RevisionError(f"{folder} cannot be read as a git checkout: {said}")
    return done.returncode, os.fsdecode(done.stdout)
