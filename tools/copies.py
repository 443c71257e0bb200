"""A copy of a tree, with a history of its own."""

import shutil
import subprocess
from pathlib import Path

BASE = "tried-base"


def files(root: Path) -> list[str]:
    """The files of a tree that git does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def copied(root: Path, copy: Path) -> None:
    """Copy the `files` of a tree, and commit them on the branch `BASE`."""
    for name in files(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, copy / name)
    git(copy, "init", "--quiet", "--initial-branch", BASE)
    commit(copy, "the tree as it is")


def commit(copy: Path, message: str) -> None:
    """Commit all that was changed."""
    git(copy, "add", "--all")
    who = ("-c", "user.name=copy", "-c", "user.email=copy@localhost")
    git(copy, *who, "commit", "--quiet", "--message", message)


def git(copy: Path, *args: str) -> None:
    subprocess.run(["git", *args], cwd=copy, check=True)
