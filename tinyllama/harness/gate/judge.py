"""Which harness judges, and how it is started: never the candidate's.

Whatever a user starts, the verdict is that of a process of its own, which loads another harness:

    of this repository      that of the base, unpacked for it; or of --judge REV or FOLDER
    of another repository   the installed one, which starts; or of --judge FOLDER

Another repository is one whose base has no harness. A candidate that adds one is judged as others.

That process has the candidate's tree as an option, ``--tree``. It loads neither a conftest nor a
configuration of it. A base from before a harness could judge another tree cannot be the judge: the
candidate's then judges itself, which is JUDGE CHANGED and never green.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tinyllama
from tinyllama.harness.gate import stages
from tinyllama.harness.gate.revision import (
    RevisionError,
    check_out,
    has,
    resolve,
    tracked_files,
)
from tinyllama.harness.machine.files import real, replace_text
from tinyllama.harness.machine.interrupts import sigterm_as_interrupt
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records.outcome import Outcome

HARNESS = Path(tinyllama.__file__).resolve().parent.parent  # of this process
PACKAGE = "tinyllama"  # a base without it is another repository's, whatever its candidate adds
GATE = f"{PACKAGE}/harness/gate"
ABLE = f"{GATE}/judge.py"  # what a harness has that can judge another tree
REPORTED = 60.0  # seconds for the report of a judge that was interrupted
INTERRUPTED = 2  # pytest's status
UNPROVEN = 15  # as MISSING
_LEFT_OUT = ("PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONSTARTUP", "PYTHONBREAKPOINT")
# The current folder is the candidate's: nothing is imported from it.
_PYTEST = (
    "import sys; here, tree = sys.argv[1:3]; del sys.argv[1:3]; "
    "sys.path[:] = [p for p in sys.path if p and (p != tree or here == tree)]; "
    "import pytest; sys.exit(pytest.main())"
)


@dataclass(frozen=True)
class Judge:
    """label: whose harness it is. folder: where. own: the tree has no harness, but ops alone."""

    label: str
    folder: Path
    own: bool


def is_own(root: Path, against: Sequence[str]) -> bool:
    """Whether a tree is another repository's, which has no harness but ops alone."""
    return not (root / GATE).is_dir() or (bool(against) and not has(against[0], PACKAGE, root))


@contextmanager
def chosen(root: Path, against: Sequence[str], judge: str | None) -> Iterator[Judge]:
    """The judge of a tree; what was unpacked for it is removed at the end.

    judge: a folder or a revision that the user names. Raises RevisionError.
    """
    own = is_own(root, against)
    with tempfile.TemporaryDirectory(prefix="judge-") as name:
        if judge is not None and Path(judge).is_dir():
            folder = Path(judge).resolve()
            inside = folder != root.resolve() and _inside(folder, root)
            if inside and any(_inside(path, folder) for path in tracked_files(root)):
                raise RevisionError(
                    f"--judge {judge}: git tracks that folder in the judged tree: name another "
                    f"folder, or, for the revision of that name, refs/heads/{judge}"
                )
            if not (folder / ABLE).is_file():
                raise RevisionError(f"--judge {judge}: that folder has no {ABLE}: name another")
            yield Judge(judge, folder, own)
        elif own and judge is not None:
            raise RevisionError(f"--judge {judge}: no such folder; name one that has {ABLE}")
        elif own:
            yield Judge(_installed(), HARNESS, own)
        elif judge is None and not against:  # two interpreters run one tree
            yield Judge("this tree", root, own)
        else:
            rev = judge or against[0]
            able = has(rev, ABLE, root)
            if judge is not None and not able:
                raise RevisionError(f"--judge {judge}: {rev} has no {ABLE}: name a newer one")
            folder = check_out(resolve(rev, root), root, Path(name) / "judge") if able else root
            yield Judge(rev if able else "this tree", folder, own)


def labels(root: Path, toolchains: bool) -> list[str]:
    """The labels of judges that `verify` accepts unnamed: the harness of this process, unless it
    is the tree's own; and for two interpreters, which run one tree, that tree's."""
    own = [] if root.resolve() == HARNESS else [str(HARNESS), _installed()]
    return [*own, *(["this tree"] if toolchains else [])]


def _installed() -> str:
    return f"tinyllama {tinyllama.__version__}"


def run(
    root: Path,
    arguments: Sequence[str],
    paths: Sequence[str],
    against: Sequence[str],
    judge: str | None,
    report: Path | None,
    plugins: Sequence[str] = (),
) -> int:
    """The exit status of a judge's gate.

    arguments: pytest's, without paths. paths: of folders of timings, relative to the root. report:
    the file that the arguments name. plugins: with which an installed harness judges other trees.
    Raises RevisionError.
    """
    with tempfile.TemporaryDirectory(prefix="gate-") as name, chosen(root, against, judge) as by:
        given = [*arguments]
        if report is None:
            report = Path(name) / "gate.json"
            given.append(f"--gate-json={report}")
        given += [f"-p{name}" for name in plugins] if by.own else []
        given += [f"-pno:{one}" for one in _plugins_of(root, by.folder)]
        status = _ended(by, root, given, paths, Path(name))
        if status == 0 and (said := _status(report)) != 0:
            print(
                "tinyllama: the judge ended with status 0, but wrote no green report "
                f"(status {said}): gate again",
                file=sys.stderr,
            )
            status = UNPROVEN
        if _unreadable(report) and by.folder != root:
            print("What the candidate's own harness says, which decides nothing:", flush=True)
            second = Path(name) / "second.json"
            candidate = Judge("this tree", root, by.own)
            aside = ("--gate-json", "--junitxml", "--junit-xml")
            kept = _without(given, aside)
            _ended(candidate, root, [*kept, f"--gate-json={second}"], paths, Path(name))
            _add(report, second)
        return status


def _ended(
    by: Judge, root: Path, arguments: Sequence[str], paths: Sequence[str], folder: Path
) -> int:
    """The status of a judge, which is interrupted by Ctrl-C and SIGTERM here too."""
    if by.own:
        ini = folder / "pytest.ini"
        ini.write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        where = ["--noconftest", str(folder)]
    else:
        ini = by.folder / "pytest.ini"
        # Without a path pytest would read the conftests of the current folder, the candidate's.
        where = [str(by.folder / path) for path in paths or [""]]
    outside = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and not _inside(Path(path), root)
    ]
    installed = by.own and by.folder == HARNESS
    path = os.pathsep.join(outside if installed else [str(by.folder), *outside])
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _PYTEST, str(by.folder), str(root), "-c", str(ini)),
            *(f"--rootdir={ini.parent}", f"--tree={root}", f"--judge={by.label}"),
            *where,  # before options that take several values
            *arguments,
        ],
        env={**_environment(), **stages.handed_on(), "PYTHONPATH": path},
    )
    try:
        with sigterm_as_interrupt():
            return process.wait()
    except KeyboardInterrupt:
        return _interrupted(process)


def _environment() -> dict[str, str]:
    """Of this process, without what makes Python lose a status, or leave out its assertions."""
    return {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}


def _plugins_of(root: Path, judge: Path) -> list[str]:
    """The names of pytest's plugins that a tree has: one that is installed as a link to it would be
    loaded by its judge, and could say anything."""
    found = []
    for point in metadata.entry_points(group="pytest11"):
        top = point.value.partition(":")[0].partition(".")[0]
        places = () if (judge / top).exists() or (judge / f"{top}.py").exists() else _places(top)
        if any(_inside(Path(place), root) for place in places):
            found.append(point.name)
    return found


def _places(module: str) -> list[str]:
    """Where a module at the top is, which is not imported for that."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return []
    return [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]


def _status(report: Path) -> Any:
    """What a report says; None where there is none."""
    try:
        return json_of(report.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _interrupted(process: subprocess.Popen[bytes]) -> int:
    """The status of a judge that is to end: first it reports what it measured. Never 0."""
    process.send_signal(signal.SIGINT)  # Ctrl-C reached it too; it takes the first one only
    try:
        return process.wait(REPORTED) or INTERRUPTED
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        return process.wait() or INTERRUPTED


def _inside(path: Path, root: Path) -> bool:
    return real(path).is_relative_to(real(root))


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Arguments without some options and their values."""
    kept, skip = [], False
    for one in arguments:
        if skip:
            skip = False
        elif one in options:
            skip = True
        elif not one.startswith(tuple(f"{option}=" for option in options)):
            kept.append(one)
    return kept


def _unreadable(report: Path) -> bool:
    """Whether the judge could not read the candidate's tree."""
    try:
        verdicts = json_of(report.read_text(encoding="utf-8"))["verdicts"]
    except (OSError, ValueError, KeyError):
        return False
    changed = Outcome.JUDGE_CHANGED.title
    return any((one["name"], one["outcome"]) == ("candidate", changed) for one in verdicts)


def _add(report: Path, second: Path) -> None:
    """Put what the candidate's harness says into the report of the judge."""
    content = json_of(report.read_text(encoding="utf-8"))
    try:
        said = json_of(second.read_text(encoding="utf-8"))["verdicts"]
    except (OSError, ValueError, KeyError):
        said = []  # it did not end
    content["by_the_candidate"] = said
    replace_text(report, json.dumps(content, indent=1) + "\n")
