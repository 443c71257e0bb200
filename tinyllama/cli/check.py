"""``tinyllama check``: every check on an op or a provider, of a file or by its name.

torch is imported by the command, not here, so that ``--help`` is quick.
"""

import argparse
import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from tinyllama.cli import like
from tinyllama.cli.argument_types import check_known, file_path, whole_within
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_apart, check_writable, replace_text, write_json

if TYPE_CHECKING:
    from tinyllama.harness.check.run import Finding

PACKAGE = "tinyllama.ops"
WRONG = 1  # exit status when a check found something
FAILING = {"unsafe": 2, "refused": 3, "warning": 4}  # number of ranks that fail, from the worst
JUNIT = {"failed": "failure", "crashed": "error", "blocked": "skipped", "unsupported": "skipped"}
LEFT_OUT = {"blocked": "not tried", "unsupported": "not possible here"}  # not in the table
RAN = ("passed", "failed")
Found = dict[str, list["Finding"]]  # findings by provider


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    check = subparsers.add_parser("check", help="check an op or a provider")
    check.description = (
        "Run every correctness, gradient, layout, memory, determinism and resource check on what "
        "a Python file declares (an op with its providers, or a provider for an op of the tree), "
        "or on an op of the tree or of an installed package. Each check has a verdict, with the "
        "smallest case that fails, and each fault a rank: wrong result, unsafe, refused, warning. "
        "Exit status 1 for a fault of the first two ranks, or where nothing could be checked."
    )
    option = check.add_argument
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
        "--fail-on",
        choices=FAILING,
        default="unsafe",
        help="the least rank of a fault that ends with status 1 (default: unsafe)",
    )
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    option("--seed", type=whole_within(0, 2**63 - 1), default=0, help="of the inputs (default 0)")
    option("--json", type=file_path, metavar="PATH", help="write the findings as JSON")
    option("--junit", type=file_path, metavar="PATH", help="write them as JUnit XML")
    like.add_options(check)
    check.set_defaults(run=like.with_declaration(run))


def run(args: argparse.Namespace) -> int:
    """Check and print; the exit status."""
    from tinyllama.harness.check.remote import ALL, APART, Asked, check
    from tinyllama.harness.machine.device import usable_device
    from tinyllama.harness.machine.worker import WorkerError
    from tinyllama.harness.records.report import console

    if args.file is None and args.op is None:
        raise UsageError("name a file or an op: FILE, or --op NAME")
    if args.candidate is not None and (args.file or not args.op or ":" not in args.candidate):
        raise UsageError(f"--candidate {args.candidate!r}: use FILE:FUNCTION, with --op NAME alone")
    only = args.only.split(",") if args.only else list(ALL)
    check_known("--only", only, ALL)
    check_writable(args.json, "--json")
    check_writable(args.junit, "--junit")
    files = [] if args.file is None else [("FILE", args.file)]
    check_apart(*files, ("--json", args.json), ("--junit", args.junit))
    device = usable_device(args.device)
    out = console()
    found: Found = {}
    file = None if args.file is None else str(args.file)
    declaration = None if args.declaration is None else str(args.declaration)
    asked = Asked(
        *(PACKAGE, file, args.op, args.provider, str(device), args.seed, args.candidate),
        declaration=declaration,
    )
    try:
        with _progress() as progress:
            for provider, findings, own in check(asked, only, progress):
                found[provider] = findings
                if own and provider.endswith("-eager") and not any(one.rank for one in findings):
                    made = [one.check for one in findings if one.outcome.value == "passed"]
                    out.print(f"{provider}: the reference passes {len(made)} checks")
                    continue
                out.print(_table(provider, findings))
                for line in _seen(findings):
                    out.print(line, soft_wrap=True)
                for line in _not_run(findings):
                    out.print(line, style="dim")
                if own:
                    out.print(f"{provider}: self-declared, its reference is of the same file")
    except WorkerError as error:
        if error.raised(UsageError):
            raise UsageError(str(error).partition(": ")[2]) from error
        where = "" if file is None else place(file, error.details)
        raise UsageError(f"{where}{error}") from error
    if not found:
        text = f"{str(args.file)!r} declares no op and no provider"
        raise UsageError(f"{text}: {like.proposal(args.file)}")
    data = {name: [one.as_dict() for one in findings] for name, findings in found.items()}
    if args.json:
        write_json(args.json, data)
    if args.junit:
        replace_text(args.junit, _as_junit(found) + "\n")
    for provider, findings in found.items():
        if text := _faults(findings):
            out.print(f"{provider}: {text}", highlight=False)
    if any(one.outcome.value in RAN for each in found.values() for one in each):
        text = f"undefended, since the candidate ran in the same process: all but {APART!r}"
        out.print(f"{text} (docs/TRUST.md)", style="dim", highlight=False)
    held = [_held(findings, args.fail_on) for findings in found.values()]
    return 0 if all(held) else WRONG


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what is tried now: in one line of a terminal, elsewhere a line for each."""
    from tinyllama.harness.records.report import console

    err = console(sys.stderr)
    if not err.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with err.status("loading") as status:
        yield status.update


def place(file: str | Path, details: str) -> str:
    """``FILE:LINE: `` of the last line of a file in a traceback; nothing where it has none."""
    name = re.escape(str(Path(file).resolve()))
    lines = re.findall(rf'^ *File "{name}", line (\d+)', details, re.MULTILINE)
    return f"{file}:{lines[-1]}: " if lines else ""


def _held(findings: "list[Finding]", least: str) -> bool:
    """Whether there is no fault of this rank or a worse one, and some check could be made."""
    from tinyllama.harness.check.run import Rank

    failing = list(Rank)[: FAILING[least]]
    good = not any(one.rank in failing for one in findings)
    return good and any(one.outcome.value != "unsupported" for one in findings)


def _faults(findings: "list[Finding]") -> str:
    """The failed checks by rank, the worst first; then the checks that another fault blocked."""
    from tinyllama.harness.check.run import Rank

    if all(one.outcome.value == "unsupported" for one in findings):
        return "nothing could be checked here"
    own = [one for one in findings if one.outcome.value != "blocked" and not one.cause]
    named = {rank.value: [one.check for one in own if one.rank is rank] for rank in Rank}
    named["what follows"] = [one.check for one in findings if one.cause]
    named["not tried"] = [one.check for one in findings if one.outcome.value == "blocked"]
    return "; ".join(f"{rank}: {', '.join(names)}" for rank, names in named.items() if names)


def _not_run(findings: "list[Finding]") -> list[str]:
    """A line for each reason why checks were not tried, or cannot be made here."""
    named: dict[tuple[str, str], list[str]] = {}
    for one in findings:
        if one.outcome.value in LEFT_OUT:
            why = one.message.replace(f"{Path.cwd()}/", "")
            named.setdefault((LEFT_OUT[one.outcome.value], why), []).append(one.check)
    return [f"{what}: {', '.join(names)} ({why})" for (what, why), names in named.items()]


def _table(provider: str, findings: "list[Finding]") -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=provider, title_justify="left", expand=False)
    for column in ("check", "verdict", "smallest case", "rank"):
        table.add_column(column, overflow="fold")
    for one in (one for one in findings if one.outcome.value not in LEFT_OUT and not one.cause):
        verdict = one.outcome.value
        style = "green" if verdict == "passed" else "bold red"
        table.add_row(one.check, Text(verdict, style), one.case, one.rank.value if one.rank else "")
    return table


def _seen(findings: "list[Finding]") -> list[str]:
    """What was seen, the worst first; with each fault the checks that fail by it alone."""
    from tinyllama.harness.check.run import Rank

    told = [one for one in findings if one.outcome.value not in LEFT_OUT]
    lines, ranks = [], [*Rank, None]
    own = [one for one in told if one.rank and not one.cause]
    for one in sorted(own, key=lambda one: ranks.index(one.rank)):
        follows = [other.check for other in told if one.check in other.cause.split(" and ")]
        lines.append(f"{one.check}: {one.message}".replace(f"{Path.cwd()}/", ""))
        lines += [f"    what follows: {', '.join(follows)}"] if follows else []
    return lines + [f"{one.check}: {one.message}" for one in told if not one.rank and one.message]


def _as_junit(found: Found) -> str:
    """A suite for each provider, a test case for each check."""
    suites = ElementTree.Element("testsuites")
    for provider, findings in found.items():
        counts = Counter(JUNIT.get(one.outcome.value) for one in findings)
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name=provider,
            tests=str(len(findings)),
            failures=str(counts["failure"]),
            errors=str(counts["error"]),
            skipped=str(counts["skipped"]),
        )
        for one in findings:
            case = ElementTree.SubElement(suite, "testcase", classname=provider, name=one.check)
            if kind := JUNIT.get(one.outcome.value):
                said = ElementTree.SubElement(case, kind, message=one.message)
                said.text = f"{one.case}: {one.message}" if one.case else one.message
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)
