"""The commands on records: ``tinyllama compare``, ``tinyllama results list``.

torch is imported by the commands, not here, so that ``--help`` is quick.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import file_path
from tinyllama.model.config import ConfigError

if TYPE_CHECKING:
    from tinyllama.harness.records.results import Record
    from tinyllama.harness.records.verdict import Figure, Verdict


def add(subparsers: Any) -> None:
    """Add the commands; each sets ``run``, a function of the arguments that returns the status."""
    compare = subparsers.add_parser("compare", help="compare two records, metric by metric")
    compare.description = (
        "Compare record B with record A, its baseline. Exit status: 0 the same or faster, 10 "
        "slower or more memory, 11 inconclusive, 12 something new, 13 of another device or other "
        "versions (then without verdict), 15 something missing; the highest counts."
    )
    compare.add_argument("a", type=file_path, metavar="A.json", help="the baseline")
    compare.add_argument("b", type=file_path, metavar="B.json", help="what is judged")
    compare.set_defaults(run=_compare)

    commands = subparsers.add_parser("results", help="list the records")
    commands = commands.add_subparsers(metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="a table of the records")
    listing.set_defaults(run=_list)
    listing.add_argument("--device", metavar="NAME", help="only records of this device")
    listing.add_argument("--group", metavar="G", help="only records of this group")
    listing.add_argument(
        "--results-dir",
        type=file_path,
        default=Path("results"),
        metavar="DIR",
        help="folder of the records (default %(default)s)",
    )


def _compare(args: argparse.Namespace) -> int:
    from tinyllama.harness.records.verdict import Outcome, compare, unusable, worst

    if args.a.exists() and args.b.exists() and args.a.samefile(args.b):
        raise ConfigError(f"{args.a} and {args.b} are one file: name two records")
    a, b = _load(args.a), _load(args.b)
    comparable = a.same_setting(b)
    verdicts = compare(a, b) or unusable(b)
    _print_sources(a, b)
    _print_comparison(verdicts, judged=comparable)
    if comparable:
        outcome = worst(verdict.outcome for verdict in verdicts)
        print(f"verdict: {outcome.title}")
    else:
        outcome = Outcome.OTHER_DEVICE_OR_VERSION
        print(f"verdict: {outcome.title}: {_differences(a, b)}: none can be given")
    return outcome.status


def _load(path: Path) -> "Record":
    from tinyllama.harness.records import results

    try:
        return results.load(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: {error.strerror}: name a record") from error
    except ValueError as error:
        raise ConfigError(f"{error}: name a record") from error


def _differences(a: "Record", b: "Record") -> str:
    pairs = dict(sorted(a.other_versions(b).items()))
    if a.device != b.device:
        pairs = {"device": (a.device, b.device), **pairs}
    return ", ".join(f"{name} {x} and {y}" for name, (x, y) in pairs.items())


def _print_sources(a: "Record", b: "Record") -> None:
    from tinyllama.harness.report.tables import source

    for name, record in (("A", a), ("B", b)):
        note = "" if record.complete else "; not complete"
        print(f"{name}: {record.group}; {source(record)}{note}")
    if a.group != b.group:
        print(f"note: A is of group {a.group}, B of {b.group}")


def _print_comparison(verdicts: "list[Verdict]", *, judged: bool) -> None:
    from rich.table import Table

    from tinyllama.harness.report.terminal import console

    table = Table("entry", "metric", "A", "B", "B / A", *(["outcome"] if judged else []))
    for verdict in verdicts:
        for cells in _rows(verdict):
            table.add_row(*(cells if judged else cells[:-1]))
    console().print(table)


def _rows(verdict: "Verdict") -> list[tuple[str, ...]]:
    if not verdict.figures:
        return [(verdict.name, "", "", "", "", f"{verdict.outcome.title}: {verdict.text}")]
    return [
        (
            verdict.name,
            figure.metric,
            _figure_text(figure.metric, figure.before),
            _figure_text(figure.metric, figure.after),
            "" if figure.ratio is None else f"{figure.ratio:.3f}",
            _outcome(figure) if verdict.gated else "not gated",
        )
        for figure in verdict.figures
    ]


def _outcome(figure: "Figure") -> str:
    title = figure.outcome.title
    return title if figure.outcome.green else f"{title}: {figure.text}"


def _figure_text(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    if metric.endswith("seconds"):
        return f"{value * 1e3:.4g} ms"
    if metric.endswith("bytes"):
        return f"{value / 2**20:,.2f} MiB"
    return f"{value:g}"


def stored(root: Path, device: str | None = None) -> "list[tuple[Path, Record]]":
    """The records under a folder, of one device or of all. Raises ConfigError."""
    from tinyllama.harness.records import results

    if not root.is_dir():
        raise ConfigError(f"--results-dir {str(root)!r} is no folder: name one with records")
    try:
        return list(results.records(root, device))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}: repair or remove that file") from error


def _selected(args: argparse.Namespace) -> "list[tuple[Path, Record]]":
    """The records that the options select. Raises ConfigError if there are none."""
    from tinyllama.harness.machine.device import slug

    records = stored(args.results_dir)
    selected = [
        (path, record)
        for path, record in records
        if args.device is None or slug(args.device) == slug(record.device)
        if args.group in (None, record.group)
    ]
    if not selected:
        there = sorted({f"{record.device} {record.group}" for _, record in records})
        raise ConfigError(
            f"no record of --device {args.device or 'any'} --group {args.group or 'any'} in "
            f"{str(args.results_dir)!r}: there are {', '.join(there) or 'none'}"
        )
    return selected


def _list(args: argparse.Namespace) -> int:
    from rich.table import Table

    from tinyllama.harness.report.terminal import console

    table = Table("device", "group", "date", "commit", "complete", "entries")
    table.add_column("file", overflow="fold")
    for path, record in _selected(args):
        table.add_row(
            record.device,
            record.group,
            record.date,
            record.short_commit,
            "yes" if record.complete else "no",
            str(len(record.entries)),
            path.name,
        )
    console().print(table)
    return 0
