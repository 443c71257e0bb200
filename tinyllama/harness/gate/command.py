"""A gate, as a user starts it: it chooses the judge, starts it, and believes its written report.

    of this repository      the harness of the base judges, unpacked
    of another repository   the installed harness judges
    with --tree             the harness that runs here judges

The judge runs in a process of its own, which may end with any status at any time: a green status
counts only with the report that it writes last.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinyllama
from tinyllama.harness.gate import report, snapshots
from tinyllama.harness.gate.options import Options
from tinyllama.harness.gate.protected_files import GATE
from tinyllama.harness.gate.snapshots import Repository
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import real
from tinyllama.harness.machine.interrupts import sigterm_as_interrupt
from tinyllama.harness.records.outcome import Outcome

HARNESS = Path(tinyllama.__file__).resolve().parent.parent  # of this process
MODULE = "tinyllama.harness.gate.judge_process"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPORTED = 60.0  # seconds for the report of a judge that is interrupted
INTERRUPTED = 2  # as of pytest
NOT_JUDGED = Outcome.NOT_JUDGED.status
# With these Python would lose a status, or leave out its assertions.
_LEFT_OUT = ("PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONSTARTUP", "PYTHONBREAKPOINT", "PYTHONPATH")


@dataclass(frozen=True)
class Judge:
    """label: whose harness it is. folder: where."""

    label: str
    folder: Path


def run(options: Options) -> int:
    """The exit status of a gate. Raises UsageError for options that cannot be used."""
    began = time.monotonic()
    with _opened(options) as repository, snapshots.scratch() as folder:
        options.check(repository.root)
        _check_trees(options, repository)
        for path in options.reports:
            path.unlink(missing_ok=True)  # else one could be taken for this run's
        path = Path(options.gate_json or folder / "gate.json").absolute()
        judge = _chosen(options, repository, folder)
        of_judge = _absolute(options, repository.root)
        task = {"options": of_judge, "judge": judge.label, "report": str(path), "began": began}
        status = _ended(judge, task, repository.root, folder)
        return _believed(status, of_judge, repository, path)


def verified(options: Options, path: Path) -> str:
    """What a report that was written before says, if it is green and of this checkout. Raises
    UsageError."""
    with _opened(options) as repository:
        return report.verify(path, repository, _absolute(options, repository.root))


def _opened(options: Options) -> AbstractContextManager[Repository]:
    return snapshots.opened(Path(options.tree or "."), options.reports)


def _check_trees(options: Options, repository: Repository) -> None:
    """Refuse a base that is the candidate itself."""
    candidate = repository.of_working_tree()
    for revision, python in options.comparisons:
        if revision is None or python != sys.executable:
            continue
        if repository.of_commit(repository.resolve(revision)) == candidate:
            raise UsageError(
                f"--against {revision!r}: this tree is that revision, byte for byte: check out "
                "the candidate"
            )


def _chosen(options: Options, repository: Repository, folder: Path) -> Judge:
    """The judge of a checkout. Raises UsageError for a base from before there was a judge."""
    against = options.against[:1]
    ours = all(repository.has(repository.resolve(revision), GATE) for revision in against)
    if options.tree is not None:
        return Judge(str(HARNESS), HARNESS)
    if not (ours and (repository.root / GATE).is_dir()):
        return Judge(f"tinyllama {tinyllama.__version__}", HARNESS)
    if not against:  # two interpreters run one tree
        return Judge("this tree", repository.root)
    (revision,) = against
    tree = repository.of_commit(repository.resolve(revision))
    if not repository.has(tree, f"{GATE}/judge_process.py"):
        raise UsageError(
            f"--against {revision}: its harness is too old to judge this tree; start the gate of a "
            f"harness that you trust, with --tree {repository.root}"
        )
    repository.unpack(tree, folder / "judge")
    return Judge(revision, folder / "judge")


def _ended(judge: Judge, task: Mapping[str, Any], root: Path, folder: Path) -> int:
    """The status of a judge, which is interrupted by Ctrl-C and SIGTERM here too."""
    import msgspec

    here = folder / "here"
    here.mkdir()
    (folder / "task.json").write_bytes(msgspec.json.encode(task))
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    outside = (
        folder
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder and not real(Path(folder)).is_relative_to(real(root))
    )
    search = os.pathsep.join([str(judge.folder), *outside])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # in the judge, while it imports
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(folder / "task.json")],
        env={**environment, "PYTHONPATH": search},
        cwd=here,
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        with sigterm_as_interrupt():
            return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # Ctrl-C reached it too; it takes the first one only
        try:
            process.wait(REPORTED)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        return INTERRUPTED


def _believed(status: int, options: Options, repository: Repository, path: Path) -> int:
    """The status of a gate, by its report, whose summary is printed."""
    try:
        written = report.read(path)
    except UsageError as error:
        if status == INTERRUPTED:
            return status
        why = f"the judge ended with status {status}, and wrote no report ({error})"
        return _not_judged(options, repository, path, why)
    for line in written.lines():
        print(line, flush=True)
    report.write_summary(written, options)
    if written.status != 0:
        return written.status
    try:
        print(f"verified: {report.verify(path, repository, options)}")
    except UsageError as error:
        return _not_judged(options, repository, path, f"the report proves nothing: {error}")
    return status if status in (0, INTERRUPTED) else NOT_JUDGED


def _not_judged(options: Options, repository: Repository, path: Path, why: str) -> int:
    """Say why nothing was judged, also in the report."""
    verdict = report.line(", ".join(options.against), "gate", Outcome.NOT_JUDGED, why)
    written = report.Report(repository.of_working_tree(), "nobody", "no device", verdicts=[verdict])
    written.conclude()
    written.write(path)
    report.write_summary(written, options)
    print(*written.lines(), sep="\n", flush=True)
    return NOT_JUDGED


def _absolute(options: Options, root: Path) -> Options:
    """The options for a process with another current folder; files of ops by their place in the
    tree."""
    places = ("results_dir", "gate_json", "summary_markdown")
    absolute = {
        name: os.path.abspath(value) for name in places if (value := getattr(options, name))
    }
    here = os.path.realpath(os.curdir)
    ops = tuple(
        os.path.relpath(os.path.join(here, pattern), os.path.realpath(root))
        for pattern in options.ops
    )
    return replace(options, tree=str(root), ops=ops, **absolute)
