"""That a gate was green is said by the file that it wrote last, and not by an exit status.

A process can end with status 0 before anything was compared: an op or a conftest may call
`os._exit(0)` when it is imported. So the file names what was judged, and is held to the tree. It
does not prove anything against code that writes the file itself.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from tinyllama.harness.gate.revision import resolve, tracked_files, untracked_code
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import read_regular, real
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records.outcome import Outcome

GREEN = {outcome.title for outcome in Outcome if outcome.green}


def tree_digest(root: Path, report: Path | None) -> str:
    """Of the files of a checkout that git tracks, and of untracked ones that a benchmark could run;
    without the report itself."""
    found = hashlib.sha256()
    for path in sorted({*tracked_files(root), *untracked_code(root)}):
        if report is not None and real(path) == real(report):
            continue
        if path.is_symlink():
            kind, content = "link", os.fsencode(os.readlink(path))
        elif path.is_file():
            kind, content = "file", path.read_bytes()
        else:
            kind, content = "nothing", b""  # not an empty file: a package needs its __init__
        name = os.fsencode(path.relative_to(root))
        found.update(
            b"%s\0%s %s\0" % (name, kind.encode(), hashlib.sha256(content).hexdigest().encode())
        )
    return found.hexdigest()


def check_report(report: Path | None, root: Path, option: str = "--gate-json") -> None:
    """Raise UsageError for a place of a report that is a file of the tree: it would be removed, and
    is not in the digest. option: which names the place."""
    if report is not None and real(report) in {*map(real, tracked_files(root))}:
        raise UsageError(f"{option} {report}: git tracks that file: name another place")


def verify(
    report: Path,
    root: Path,
    against: Sequence[str] = (),
    ops: Sequence[str] = (),
    device: str | None = None,
    judges: Sequence[str] = (),
) -> str:
    """What a green report says, in one line. against: revisions that must have been bases. ops: a
    report of these alone will do. device: the kind of device, as "cuda", that it must be of.
    judges: whose harness may have judged, beside those of the bases.

    Raises UsageError for a report that is not green, of another tree, base or device, or by another
    judge.
    """
    check_report(report, root, "--verify")
    try:
        content = json_of(read_regular(report).decode())
        verdicts, status = content["verdicts"], content["status"]
        outcomes = [one["outcome"] for one in verdicts]
        judged, bases = content["candidate"], dict(content["bases"])
        on, by = str(content["device"]), str(content["judge"])
        only = sorted(map(str, content.get("only", [])))
        ended = {one["against"] for one in content["comparisons"] if one["ended"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{report} is no report of a gate that ended ({type(error).__name__}: {error}): gate "
            "again"
        ) from error
    bad = sorted({str(outcome) for outcome in outcomes} - GREEN)
    if status != 0 or bad or not outcomes or not bases or ended != set(bases):
        said = ", ".join(bad) or "a comparison did not end"
        raise UsageError(f"{report} is not green: status {status}, {said}")
    if judged != tree_digest(root, report):
        raise UsageError(f"{report} is of another tree than {root}: gate this one")
    if device is not None and on.partition(" ")[0] != device.partition(":")[0]:
        raise UsageError(f"{report} is of {on}, not of {device}: gate there")
    if by not in (*bases, *judges):
        raise UsageError(f"{report} is by another judge, {by}: name it with --judge, or gate again")
    if only and not (ops and {*ops} <= {*only}):
        raise UsageError(f"{report} compares {', '.join(only)} alone (--op): gate all of it")
    for rev in against:
        if (commit := resolve(rev, root)) not in bases.values():
            compared = ", ".join(map(str, bases.values()))
            raise UsageError(f"{report} compares with {compared}, not with {rev} ({commit})")
    return f"{len(outcomes)} verdicts against {', '.join(bases)}, all green, of this tree, on {on}"
