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

from tinyllama.harness.machine.files import real

# git's variables that are kept. The others are set by a hook, perhaps for another repository, or
# they change what a path or a commit means: GIT_LITERAL_PATHSPECS, GIT_REPLACE_REF_BASE.
_KEPT = ("GIT_CONFIG", "GIT_EXEC_PATH", "GIT_TRACE")
# A commit is what its name says, whatever `git replace` and a file of grafts put in its place.
_PLAINLY = {"LC_ALL": "C", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_GRAFT_FILE": os.devnull}
_SETTINGS = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")
RESULTS = "results"  # the usual folder of records
_LINK = "160000"  # mode of a submodule
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
    found = _commit(rev, repo)
    if _COMMIT.fullmatch(found):
        name = re.split(r"[~^]|@{", rev, maxsplit=1)[0]
        named = {ref: _commit(ref + rev.removeprefix(name), repo) for ref in _refs(name, repo)}
        named = {ref: commit for ref, commit in named.items() if commit}
        if len(set(named.values())) > 1:
            each = ", ".join(f"{ref} is {commit[:10]}" for ref, commit in named.items())
            raise RevisionError(f"{name!r} names several in {repo} ({each}): use a long name")
        return found
    tree_of(repo)
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


def _refs(name: str, repo: Path) -> list[str]:
    """The long names that a short one stands for, in git's order."""
    every = [f"refs/{kind}{name}" for kind in ("", "tags/", "heads/", "remotes/")] if name else []
    listed = _git(repo, "for-each-ref", "--format=%(refname)", *every)[1] if every else ""
    return [ref for ref in every if ref in listed.splitlines()]


def has(rev: str, path: str, repo: Path) -> bool:
    """Whether a revision has a file or a folder of that name."""
    named = f"{resolve(rev, repo)}:{path}"
    return _git(repo, "cat-file", "-e", named, fails=(1, 128))[0] == 0


def texts(rev: str, word: str, pattern: str, repo: Path) -> dict[str, str]:
    """The files of a revision that have a word, by name; of those that a pattern of git names."""
    commit, top = resolve(rev, repo), Path(tree_of(repo))
    asked = ("grep", "-z", "-l", "-F", "-e", word, commit, "--", pattern)
    names = [name for name in _git(top, *asked, fails=(1,))[1].split("\0") if name]
    return {name.partition(":")[2]: _git(top, "show", name)[1] for name in names}


def same_tree(rev: str, repo: Path) -> bool:
    """Whether the working tree is exactly that revision, so that it would be compared with itself.

    Untracked files count where a benchmark could run them; records, which `pytest --record` writes
    to `RESULTS`, do not. Every file is read: an index of one's
    own has none of the marks by which git leaves some out, as `update-index --assume-unchanged`.
    """
    commit, top = resolve(rev, repo), Path(tree_of(repo))
    plainly = ("--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=none")
    with tempfile.TemporaryDirectory() as folder:
        own = str(Path(folder) / "index")
        _git(top, "read-tree", commit, GIT_INDEX_FILE=own)
        if _git(top, "diff", *plainly, "--", fails=(1,), GIT_INDEX_FILE=own)[0]:
            return False
        names = _git(top, "ls-files", "-z", GIT_INDEX_FILE=own)[1]
    records = set((top / RESULTS).rglob("*.json"))
    return names == _git(top, "ls-files", "-z")[1] and records.issuperset(untracked_code(top))


def tracked_files(repo: Path) -> list[Path]:
    """The files that git tracks of the checkout that a folder is in, and of its submodules."""
    return _listed(repo, "--cached", "--recurse-submodules")


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
        _unpack(commit, top, folder)
        for path in folder.rglob("*"):
            if path.is_symlink() and not real(path).is_relative_to(real(folder)):
                raise RevisionError(f"{path.relative_to(folder)} of {commit} links out of its tree")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _unpack(commit: str, top: Path, folder: Path) -> None:
    """Write a commit's files into a folder, and those of the submodules that the checkout has."""
    with tempfile.TemporaryDirectory() as own:
        index = str(Path(own) / "index")  # the checkout's own stays as it is
        _git(top, "read-tree", commit, GIT_INDEX_FILE=index)
        write = ("checkout-index", "--all", "--quiet")
        _git(top, *write, GIT_INDEX_FILE=index, GIT_WORK_TREE=str(folder))
    for entry in filter(None, _git(top, "ls-tree", "-r", "-z", commit)[1].split("\0")):
        (mode, _, named), name = entry.partition("\t")[0].split(), entry.partition("\t")[2]
        if mode != _LINK or not (top / name / ".git").exists():
            continue  # no submodule, or one that this checkout does not have
        if not _commit(named, top / name):
            raise RevisionError(
                f"submodule {name} of {commit} is at {named}, which this checkout lacks: git -C "
                f"{name} fetch"
            )
        _unpack(named, top / name, folder / name)


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
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith(_KEPT)
        }
        done = subprocess.run(
            ["git", *_SETTINGS, "-C", str(folder), *args],
            env={**kept, **_PLAINLY, **places},
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise RevisionError("git is not installed: a base revision is read with it") from error
    if done.returncode not in (0, *fails):
        said = " ".join(os.fsdecode(done.stderr).split()) or f"status {done.returncode}"
        raise RevisionError(f"{folder} cannot be read as a git checkout: {said}")
    return done.returncode, os.fsdecode(done.stdout)
