"""``tinyllama check``: every check on an op or a provider, of a file or by its name.

Only the processes that make the checks load torch.
"""

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tinyllama.cli import like
from tinyllama.cli.argument_types import check_known, file_path, whole_within
from tinyllama.harness.check.finding import Finding, Outcome, Provided, Rank, fails, undecided
from tinyllama.harness.check.names import ALL, APART, DEFAULT, PLAIN, TRIED
from tinyllama.harness.check.remote import Request, check, place_in
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_apart, check_writable, write_json
from tinyllama.harness.machine.worker import WorkerError

FAILED = 1  # exit status when a check found something, or nothing could be compared
# By what stopped the command where nothing had failed; the first is Ctrl-C, which has no text.
STOPPED = {"": 130, "SIGTERM": 143, "--time-limit": 124}
Findings = Mapping[Provided, list[Finding]]


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("check", help="check an op or a provider")
    parser.description = (
        "Run correctness, gradient, layout, memory and determinism checks on what a Python file "
        "declares (an op with its providers, or a provider for an op of the tree), or on an op of "
        "the tree or of an installed package. A fault is printed when it is found, with its rank "
        "(wrong result, unsafe, refused, warning) and the smallest case. Exit status 1 for a "
        "wrong result, for what is unsafe, where a declared case is refused, where nothing could "
        "be compared, or where no declared kernel is launched. Stopped before that: 124 by "
        "--time-limit, 130 by Ctrl-C, 143 by SIGTERM."
    )
    option = parser.add_argument
    option(
        "file",
        type=file_path,
        nargs="?",
        metavar="FILE",
        help="a Python file with an op, or FILE:FUNCTION with --like",
    )
    option("--op", metavar="NAME", help="only this op of FILE; or, without FILE, one of a package")
    option("--provider", metavar="NAME", help="only the provider of this name")
    option(
        "--candidate",
        metavar="FILE:FUNCTION",
        help="with --op: check this function, by the op's own reference and cases",
    )
    option("--only", metavar="A,B", help="only these checks")
    option(
        "--thorough",
        action="store_true",
        help="every check: also each configuration, torch.compile, and a compilation for each chip",
    )
    option(
        "--fail-on",
        choices=("unsafe", "refused", "warning"),
        default="unsafe",
        help="the least rank of a fault that ends with status 1 (default: unsafe)",
    )
    option("--fail-fast", action="store_true", help="stop at the first fault that fails")
    option(
        "--time-limit",
        type=whole_within(1, 10**6),
        metavar="SECONDS",
        help="for all checks together; what is found until then is shown (default: none)",
    )
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    option("--seed", type=whole_within(0, 2**63 - 1), default=0, help="of the inputs (default 0)")
    option("--json", type=file_path, metavar="PATH", help="write the findings as JSON")
    option("--verbose", action="store_true", help="name what is not possible here, and who decides")
    like.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print; the exit status."""
    draft = like.draft_of(args)
    if draft is not None:
        if args.show_declaration:
            print(like.declaration(draft), end="")
            return 0
        args.file, args.provider = Path(draft["file"]), args.provider or "candidate"
    names = _validated(args)
    findings: dict[Provided, list[Finding]] = {}
    stopped: str | None = None
    try:
        with (
            _limited(args.time_limit),
            _progress() as progress,
            contextlib.closing(_checked(args, draft, names, progress)) as answers,
        ):
            for provided, finding in answers:
                of_provider = findings.setdefault(provided, [])
                if finding is not None:
                    _show(provided, finding, of_provider)
                    of_provider.append(finding)
                    if args.fail_fast and fails(finding, provided, args.fail_on):
                        stopped = "--fail-fast"
                        break
    except KeyboardInterrupt as error:
        stopped = str(error)
    if not findings and stopped is None:
        text = f"{str(args.file)!r} declares no op and no provider"
        raise UsageError(f"{text}: declare one, or run {like.proposal(args.file)}")
    status = _status(findings, args.fail_on, stopped)
    if stopped is not None:
        text = f"stopped by {stopped}" if stopped.startswith("--") else "interrupted"
        for of_provider in findings.values():
            tried = {finding.check for finding in of_provider}
            missing = (name for name in names if name not in tried)
            of_provider += [Finding(name, Outcome.BLOCKED, message=text) for name in missing]
        print(f"{text}: exit status {status}", file=sys.stderr)
    for provided, of_provider in findings.items():
        _summarize(provided, of_provider, args.verbose)
    if draft is not None and findings:
        _print(f"{draft['function']} was compared with {args.like}: --show-declaration prints how")
    if args.json:
        data = {
            provided.name: [finding.as_dict() for finding in of_provider]
            for provided, of_provider in findings.items()
        }
        write_json(args.json, data)
    if args.verbose and findings:
        text = f"undefended, since the candidate ran in the same process: all but {APART!r}"
        _print(f"{text} (docs/gate.md)", style="dim")
    return status


def _validated(args: argparse.Namespace) -> Sequence[str]:
    """The checks that are asked for. Raises UsageError for what cannot be used, before torch is
    loaded."""
    if args.file is None and args.op is None:
        raise UsageError("name a file or an op: FILE, or --op NAME")
    if args.candidate is not None and (args.file or not args.op or ":" not in args.candidate):
        raise UsageError(f"--candidate {args.candidate!r}: use FILE:FUNCTION, with --op NAME alone")
    if args.device and not re.fullmatch(r"cpu(:0)?|cuda(:\d+)?", args.device):
        raise UsageError(f"device {args.device!r} is unknown: use cpu, cuda or cuda:N")
    if args.thorough and args.only:
        raise UsageError("--thorough and --only both say which checks: use one of them")
    only = args.only.split(",") if args.only else None
    check_known("--only", only, ALL)
    check_writable(args.json, "--json")
    if args.file is not None:
        check_apart(("FILE", args.file), ("--json", args.json))
        _check_python(args.file)
    if only is None and not args.thorough:
        return (*DEFAULT, APART) if args.candidate else DEFAULT
    return [name for name in ALL if only is None or name in only]


def _check_python(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r}: name a Python file with an op declaration")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f"{error.lineno}: " if isinstance(error, SyntaxError) else " "
        raise UsageError(f"{path}:{line}{type(error).__name__}: {error}: mend it") from error


def _checked(
    args: argparse.Namespace,
    draft: dict[str, Any] | None,
    names: Sequence[str],
    progress: Callable[[str], None],
) -> Generator[tuple[Provided, Finding | None], None, None]:
    """What `tinyllama.harness.check.remote.check` yields. Raises UsageError for a file that cannot
    be loaded."""
    file = None if args.file is None else str(args.file)
    device = "cpu" if args.device == "cpu:0" else args.device
    request = Request(file, args.op, args.provider, device, args.seed, args.candidate)
    if draft is not None:
        made_by = "tinyllama.cli.declared:DeclaredChecks"
        request = replace(request, made_by=made_by, options={"draft": draft})
    try:
        yield from check(request, names, progress)
    except WorkerError as error:
        if error.raised(UsageError):
            raise UsageError(str(error).partition(": ")[2]) from error
        place = "" if file is None else place_in(error.details, str(Path(file).resolve()))
        raise UsageError(f"{place}{error}") from error


@contextlib.contextmanager
def _limited(seconds: int | None) -> Iterator[None]:
    """Raise KeyboardInterrupt after so many seconds."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt("--time-limit")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # such as pytest-timeout's
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what is tried now: in one line of a terminal, elsewhere a line for each."""
    from tinyllama.harness.report.terminal import console

    err = console(sys.stderr)
    if not err.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with err.status("loading") as status:
        yield status.update


def _status(findings: Findings, least: str, stopped: str | None) -> int:
    """FAILED where a finding fails, else how the command was stopped, else FAILED where there is no
    verdict."""
    for provided, of_provider in findings.items():
        if any(fails(finding, provided, least) for finding in of_provider):
            return FAILED
    if stopped is not None:
        return STOPPED[stopped]
    return FAILED if any(map(undecided, findings.values())) else 0


def _print(text: Any, style: str | None = None) -> None:
    from tinyllama.harness.report.terminal import console

    if isinstance(text, str):
        text = text.replace(f"{Path.cwd()}/", "")
    console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()


def _show(provided: Provided, finding: Finding, earlier: Sequence[Finding]) -> None:
    """Print a fault as soon as it is found; of one with the cause of an earlier one, a line."""
    if finding.rank is None:
        return
    where = f" in {finding.case}" if finding.case else ""
    title = f"{provided.name}: {finding.check}: {finding.verdict}{where}"
    style = "yellow" if finding.rank is Rank.WARNING else "bold red"
    if first := _first_of_cause(finding, earlier):
        seen = finding.message.partition("; ")[0]
        _print(f"{title}, as {first.check}: {seen}", style=style)
        return
    _print(title, style=style)
    _print(f"    tried: {TRIED[finding.check]}", style="dim")
    _print(f"    {finding.message}")


def _first_of_cause(finding: Finding, earlier: Iterable[Finding]) -> Finding | None:
    """The first fault that has the same cause."""
    return next((f for f in earlier if f.rank and finding.has_cause_of(f)), None)


def _summarize(provided: Provided, findings: Sequence[Finding], verbose: bool) -> None:
    """Print the table of a provider, what was not tried, and the faults by rank."""
    name = provided.name
    passed, blocked, unsupported = (
        [finding for finding in findings if finding.outcome is outcome]
        for outcome in (Outcome.PASSED, Outcome.BLOCKED, Outcome.UNSUPPORTED)
    )
    faults = [finding for finding in findings if finding.rank]
    for note in provided.notes:
        _print(note)
    if len(blocked) == len(findings):
        _print("\n".join(_reasons(f"{name}: not tried", blocked)))
        return
    if provided.with_reference and name.endswith("-eager") and not (faults or blocked):
        _print(f"{name}: the reference passes {len(passed)} checks")
        return
    _print(_table(name, [finding for finding in findings if finding in passed or finding.rank]))
    lines = _reasons("not tried", blocked)
    lines += _reasons("in part", [f for f in passed if f.check in PLAIN and f.message])
    if verbose:
        lines += _reasons("not possible here", unsupported)
        lines += [f"{f.check}: {f.message}" for f in passed if f.message and f.check not in PLAIN]
        if provided.with_reference:
            lines.append(f"{name}: self-declared, its reference is of the same file")
    for line in lines:
        _print(line, style="dim")
    if len(unsupported) == len(findings):
        parts = [undecided(findings), *_reasons("not possible here", unsupported)]
    else:
        parts = [*filter(None, [*_by_rank(faults), undecided(findings)])] or ["no fault"]
        counts = {"passed": passed, "not tried": blocked, "do not apply here": unsupported}
        words = ", ".join(f"{len(several)} {what}" for what, several in counts.items() if several)
        parts.append(f"of {len(findings)} checks {words or 'none passed'}")
    _print(f"{name}: {'; '.join(parts)}")


def _by_rank(faults: Sequence[Finding]) -> Iterator[str]:
    """The checks that found something, the worst first; beside the first of a cause the others."""
    for rank in Rank:
        causes: dict[Finding, list[str]] = {}
        for finding in (finding for finding in faults if finding.rank is rank):
            if first := _first_of_cause(finding, causes):
                causes[first].append(finding.check)
            else:
                causes[finding] = []
        checks = [
            f"{first.check} (also {', '.join(others)})" if others else first.check
            for first, others in causes.items()
        ]
        if checks:
            yield f"{rank.value}: {', '.join(checks)}"


def _table(name: str, findings: Sequence[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {None: "green", Rank.WARNING: "yellow"}
    table = Table(title=name, title_justify="left", expand=False)
    for column in ("check", "verdict", "smallest case"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, styles.get(finding.rank, "bold red"))
        table.add_row(finding.check, verdict, Text(finding.case))
    return table


def _reasons(what: str, findings: Sequence[Finding]) -> list[str]:
    """A line for each reason, with the checks that have it."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        reasons.setdefault(finding.message, []).append(finding.check)
    return [f"{what}: {', '.join(names)} ({why})" for why, names in reasons.items()]
