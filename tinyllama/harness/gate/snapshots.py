"""Trees of git, each unpacked into a folder: a commit, or a checkout as git would commit it now.

A snapshot is named by git's hash of its tree, so two of one name are equal. The checkout and its
``.git`` stay as they are: new objects and every index are in a folder of their own.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.machine.errors import UsageError

_SUBMODULE = "160000"  # git's mode of one
# A hook's variables may name another repository; the others change what a path or a commit means.
_KEPT_VARIABLES = ("GIT_CONFIG", "GIT_EXEC_PATH", "GIT_TRACE")
_SETTINGS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


@dataclass(frozen=True)
class Difference:
    """A file in which two trees differ. mode: whether it is another kind of file, or executable on
    one side alone. deleted: whether the second tree lacks it."""

    name: str
    mode: bool
    deleted: bool


class Repository:
    """A checkout. scratch: a folder for what git writes. reports: paths of files that a gate writes
    into the checkout, which are no part of what is compared."""

    def __init__(self, folder: Path, scratch: Path, reports: Sequence[Path] = ()) -> None:
        self.scratch, self._environment = scratch, dict[str, str]()
        self.root = Path(self.git("rev-parse", "--show-toplevel", at=folder).removesuffix("\n"))
        objects = self._path("objects")
        self._environment = {
            "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects),
        }
        (scratch / "objects").mkdir(parents=True, exist_ok=True)
        top = os.path.realpath(self.root)
        places = (os.path.relpath(os.path.realpath(path), top) for path in reports)
        self.reports = [place for place in places if not place.startswith(os.pardir)]

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a tag or a commit names. Raises UsageError."""
        try:
            named = f"{revision}^{{commit}}"
            return self.git("rev-parse", "--verify", "--end-of-options", named).strip()
        except ValueError as error:
            shallow = self.git("rev-parse", "--is-shallow-repository").strip() == "true"
            fix = "git fetch --unshallow (in CI: fetch-depth: 0)" if shallow else "git fetch"
            raise UsageError(
                f"no commit {revision!r} in {self.root}: {fix}, or correct the name"
            ) from error

    def of_commit(self, commit: str) -> str:
        return self.git("rev-parse", f"{commit}^{{tree}}").strip()

    def of_working_tree(self) -> str:
        """What ``git add --all`` would commit: tracked files as they are now, and others that git
        does not ignore. Raises UsageError for a submodule with changes of its own."""
        with self._index() as index:
            if (checkout := self._path("index")).exists():  # with its stat data, to be quick
                shutil.copy2(checkout, index)
            self.git("add", "--all", "--", ":/", index=index)
            if self.reports:
                forget = ("rm", "-fq", "--cached", "--ignore-unmatch", "--")
                self.git(*forget, *self._untracked_reports(), index=index)
            tree = self.git("write-tree", index=index).strip()
        for name, commit, submodule in self._submodules(tree):
            if submodule.of_working_tree() != submodule.of_commit(commit):
                raise UsageError(
                    f"the submodule {name} has changes that are not committed: commit them in it"
                )
        return tree

    def _untracked_reports(self) -> list[str]:
        for name in self.reports:
            if self.git("ls-files", "--", name):
                raise UsageError(f"{name}: git tracks that file: name another place")
        return [f":(top,literal){name}" for name in self.reports]

    def changed(self, base: str, candidate: str) -> list[Difference]:
        """The files that differ between two trees, sorted by name."""
        listed = self.git("diff-tree", "-r", "-z", "--raw", "--no-renames", base, candidate)
        fields = listed.split("\0")[:-1]
        differences = []
        for described, name in zip(fields[::2], fields[1::2], strict=True):
            before, after = described.removeprefix(":").split()[:2]
            mode = before != after and "000000" not in (before, after)
            differences.append(Difference(name, mode, deleted=after == "000000"))
        return differences

    def text(self, tree: str, name: str) -> str | None:
        """The text of a file of a tree; None where there is none."""
        if not self.has(tree, name):
            return None
        return self.git("cat-file", "blob", f"{tree}:{name}")

    def has(self, tree: str, path: str) -> bool:
        """Whether a tree has a file or a folder."""
        return bool(self.git("ls-tree", tree, "--", path))

    def replaced(self, tree: str, source: Path, paths: Sequence[str]) -> str:
        """A tree whose files at some paths, and in these folders, are those of another folder."""
        files = [path for name in paths for path in _python_files(source / name)]
        with self._index() as index:
            self.git("read-tree", tree, index=index)
            self.git("rm", "-rfq", "--cached", "--ignore-unmatch", "--", *paths, index=index)
            hashes = self.git("hash-object", "-w", "--stdin-paths", feed="\n".join(map(str, files)))
            lines = (
                f"100644 {digest}\t{file.relative_to(source).as_posix()}"
                for file, digest in zip(files, hashes.split(), strict=True)
            )
            self.git("update-index", "--index-info", feed="\n".join(lines), index=index)
            return self.git("write-tree", index=index).strip()

    def unpack(self, tree: str, folder: Path) -> None:
        """Write a tree into a fresh folder, with the submodules that the checkout has."""
        folder.mkdir(parents=True)
        with self._index() as index:
            self.git("read-tree", tree, index=index)
            self.git("checkout-index", "--all", "--quiet", index=index, at=folder)
        for name, commit, submodule in self._submodules(tree):
            if (folder / name).is_dir():
                (folder / name).rmdir()
            submodule.unpack(submodule.of_commit(commit), folder / name)

    def _submodules(self, tree: str) -> Iterator[tuple[str, str, "Repository"]]:
        for entry in filter(None, self.git("ls-tree", "-r", "-z", tree).split("\0")):
            described, _, name = entry.partition("\t")
            mode, _, commit = described.split()
            if mode == _SUBMODULE and (self.root / name / ".git").exists():
                folder = self.scratch / f"submodule-{re.sub(r'[^A-Za-z0-9]', '-', name)}"
                yield name, commit, Repository(self.root / name, folder)

    def _path(self, name: str) -> Path:
        command = ("rev-parse", "--path-format=absolute", "--git-path", name)
        return Path(self.git(*command).removesuffix("\n"))

    @contextmanager
    def _index(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            yield Path(folder) / "index"

    def git(
        self,
        *args: str,
        index: Path | None = None,
        at: Path | None = None,
        feed: str = "",
    ) -> str:
        """What git prints. index: in the place of the checkout's. at: the folder of the files.
        feed: what git reads. Raises UsageError."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith(_KEPT_VARIABLES)
        }
        environment = {**inherited, "LC_ALL": "C", **self._environment}
        where = at or self.root
        if index is not None:
            environment["GIT_INDEX_FILE"] = str(index)
            if at is not None:
                environment |= {"GIT_DIR": str(self._path(".")), "GIT_WORK_TREE": str(at)}
        try:
            done = subprocess.run(
                ["git", *_SETTINGS, *args],
                cwd=where,
                env=environment,
                input=os.fsencode(feed),
                capture_output=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise UsageError("git is not installed: a base is read with it") from error
        if done.returncode:
            said = " ".join(os.fsdecode(done.stderr).split()) or f"status {done.returncode}"
            raise UsageError(f"{where} cannot be read as a checkout of git: {said}")
        return os.fsdecode(done.stdout)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder of this process."""
    with tempfile.TemporaryDirectory(prefix="tinyllama-gate-") as name:
        yield Path(name)


@contextmanager
def opened(folder: Path, reports: Sequence[Path] = ()) -> Iterator[Repository]:
    """The checkout that a folder is in, for a `with` statement. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name that of a checkout")
    with scratch() as files:
        yield Repository(folder, files, reports)


def module_file(root: Path, module: str) -> Path | None:
    """The file of a module of a tree, or of a path ending in ``.py``; None if it is elsewhere."""
    if module.endswith(".py"):
        return root / module if (root / module).is_file() else None
    if not module.replace(".", "").isidentifier():
        return None
    for place in (above.joinpath(*module.split(".")) for above in roots(root)):
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


def roots(root: Path) -> list[Path]:
    """The folders of a tree in which modules are found."""
    return [root, *(path for path in [root / "src"] if path.is_dir())]


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]
