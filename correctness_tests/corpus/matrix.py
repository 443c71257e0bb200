"""Checks on the variants of the corpus, and the table of what they found.

    python -m correctness_tests.corpus.matrix [--only A,B] [--checks A,B] [--jobs 2]
        [--seconds 600] [--all] [--device cuda] [--record]

A right variant runs the default checks, a wrong one every check, those about the class of its fault
first, until one finds it; with --all both run every check. Prints a line for each variant: which
checks accuse it, after how many seconds. --only: variants whose name begins with one of these.
--record: writes results to results/corpus.json, where rows of other variants stay, and from it
TABLE.md. A variant runs in a process of its own, which is ended after --seconds; what was found
until then counts. Exit status: 1
if a wrong variant is not found, or a right one is accused or does not end, that is not open.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from correctness_tests.corpus.variants import (
    CLASSES,
    Loaded,
    Variant,
    accuses,
    checks_for,
    findings,
    finds,
    variants,
)
from tinyllama.cli.argument_types import whole_within
from tinyllama.harness.check.names import DEFAULT
from tinyllama.harness.check.run import CHECKS
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.files import replace_text
from tinyllama.harness.records.results import current_commit, now, versions
from tinyllama.harness.report.tables import markdown_table

RECORD = Path(__file__).parents[2] / "results/corpus.json"
TABLE = Path(__file__).parent / "TABLE.md"
STARTING = threading.Lock()  # a fork in another thread would keep this one's pipe open
FORK = multiprocessing.get_context("fork")  # a fresh process imports torch and Triton for 4 s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="variants whose name begins so: A,B")
    parser.add_argument("--all", action="store_true", help="every check on every variant")
    parser.add_argument("--checks", help="only these checks: A,B")
    parser.add_argument("--jobs", type=whole_within(1, 512), default=2)
    parser.add_argument("--seconds", type=whole_within(1, 10**6), default=600, help="for a variant")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args(arguments)
    chosen = [
        each
        for each in variants()
        if str(each).startswith(tuple(args.only.split(",")))
        and (args.device != "cpu" or not each.gpu)
    ]
    checks = args.checks.split(",") if args.checks else list(CHECKS)
    if not chosen:
        parser.error(f"--only {args.only!r}: no variant begins so: use names of files in ops/")
    if unknown := set(checks) - set(CHECKS):
        parser.error(f"--checks {', '.join(sorted(unknown))}: use some of {', '.join(CHECKS)}")
    if args.record and args.checks:
        parser.error("--record writes what all checks find: leave --checks out")
    with ProcessPoolExecutor(1, FORK) as other_process:  # what asks a GPU cannot be forked
        name = other_process.submit(device_name, torch.device(args.device)).result()
    made_by = {
        "device": name,
        "versions": versions(),
        "seconds": args.seconds,
    }
    if args.record and args.only and (other := differing(made_by)):
        parser.error(f"the record is of another {other}: leave --only out")
    torch.set_num_threads(1)
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        limits = args.device, args.seconds, args.all
        by_default = checks if args.checks or args.all else [c for c in checks if c in DEFAULT]
        for row in pool.map(
            lambda variant: judged(variant, checks if variant.fault else by_default, *limits),
            chosen,
        ):
            rows.append(row)
            print(line_of(row), flush=True)
    if args.record:
        merged = with_others(rows) if args.only else rows
        record = {**made_by, "commit": current_commit(), "date": now(), "rows": merged}
        replace_text(RECORD, as_json(record))
        replace_text(TABLE, table(record))
    return int(any(unexpected(row) for row in rows))


def differing(made_by: dict[str, Any]) -> str:
    """What the record has another value of: "device", "versions" or "seconds"; "" if nothing."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return next((name for name, value in made_by.items() if record[name] != value), "")


def with_others(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and those that the record has of other variants that there still are."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    by_name = {row["variant"]: row for row in (*record["rows"], *rows)}
    return [by_name[name] for each in variants() if (name := str(each)) in by_name]


def judged(
    variant: Variant, checks: Sequence[str], device: str, seconds: float, every: bool
) -> dict[str, Any]:
    """What the checks find in a variant, as plain data."""
    start, seen, end, trying = time.monotonic(), [], "", "loading"
    with STARTING:
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_judge, args=(variant, checks, device, every, sender))
        process.start()
        sender.close()
    while not end:
        left = start + seconds - time.monotonic()
        try:
            if not receiver.poll(max(left, 0)):
                end = f"ended in {trying}"
            elif (message := receiver.recv()) is None:
                break
            elif "trying" in message:
                trying = message["trying"]
            elif "error" in message:
                end = message["error"]
            else:
                seen.append(message)
        except EOFError:
            process.join()
            end = f"its process ended with {process.exitcode} in {trying}"
    process.kill()
    process.join()
    found = [each for each in seen if each["finds"]]
    return {
        "variant": str(variant),
        "class": variant.fault,
        "rank": variant.rank,
        "open": variant.open,
        "found_by": [each["check"] for each in found],
        "accused_by": [each["check"] for each in seen if each["accuses"]],
        "said": next((each["said"] for each in seen if each["accuses"]), ""),
        "first_seconds": round(min((each["at"] for each in found), default=0.0), 1),
        "seconds": round(time.monotonic() - start, 1),
        "slowest": max(seen, key=lambda each: each["seconds"])["check"] if seen else "",
        "ended": end,
    }


def _judge(
    variant: Variant, checks: Sequence[str], device: str, every: bool, sender: Connection
) -> None:
    start = time.perf_counter()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Loaded(variant, Path(folder), device) as candidate,
        ):
            in_order = sorted(checks, key=checks_for(variant).index)
            answers = findings(candidate, in_order)
            for check in in_order:
                sender.send({"trying": check})
                before = time.perf_counter()
                finding = next(answers)
                now = time.perf_counter()
                found = bool(variant.fault) and finds(variant, candidate, finding)
                sender.send(
                    {
                        "check": finding.check,
                        "seconds": now - before,
                        "at": now - start,
                        "accuses": accuses(candidate, finding),
                        "finds": found,
                        "said": finding.message[:200],
                    }
                )
                if found and not every:
                    break
        sender.send(None)
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {error}"})


def unexpected(row: dict[str, Any]) -> bool:
    if row["open"]:
        return False
    return not row["found_by"] if row["class"] else bool(row["accused_by"] or row["ended"])


def line_of(row: dict[str, Any]) -> str:
    """A variant in a line: its name and class, what was found, and after how long."""
    wrong = bool(row["class"])
    names = ", ".join(row["found_by" if wrong else "accused_by"]) or "nothing"
    text = f"{row['variant']} ({row['class'] or 'right'}): "
    if wrong:
        text += f"found by {names}, first after {row['first_seconds']} s"
    else:
        text += f"accused by {names}"
    text += f"; {row['seconds']} s, longest: {row['slowest']}"
    marks = [row["ended"], f"open: {row['open']}" if row["open"] else ""]
    marks.append("UNEXPECTED" if unexpected(row) else "")
    return "; ".join([text, *filter(None, marks)])


def as_json(record: dict[str, Any]) -> str:
    """The record with a line for each variant."""
    head = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n'


def table(record: dict[str, Any]) -> str:
    """The page of a record: how many are found by class, and a row for each file."""
    rows: list[dict[str, Any]] = record["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    right = [row for row in rows if not row["class"]]
    accused = sum(bool(row["accused_by"]) for row in right)
    by_file: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_file.setdefault(row["variant"].partition("-")[0], []).append(row)
    by_class = [["class", "wrong", "found", "of them unsafe", "found"], *_by_class(rows)]
    of_files = [f"| {file} | {'<br>'.join(map(_cell, each))} |" for file, each in by_file.items()]
    return f"""# The corpus: what each check finds

Written by `make corpus` from `results/corpus.json`. On {record["device"]}; {versions};
the newest row: commit {record["commit"]}, {record["date"]}.
A variant is ended after {record["seconds"]} s.
Of {len(right)} right variants the default checks accuse {accused}. *open*: what the checks say is
not the truth.

{markdown_table(by_class)}

| file | variants: class, found by, seconds; of a right one: accused by |
|---|---|
{chr(10).join(of_files)}
"""


def _by_class(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for name in (*CLASSES, "all"):
        wrong = [row for row in rows if row["class"] and name in (row["class"], "all")]
        unsafe = [row for row in wrong if row["rank"] == "unsafe"]
        yield [name, *map(str, (len(wrong), _found(wrong), len(unsafe), _found(unsafe)))]


def _found(rows: Sequence[dict[str, Any]]) -> int:
    return sum(bool(row["found_by"]) for row in rows)


def _cell(row: dict[str, Any]) -> str:
    """A variant in a line of its file's row."""
    name = row["variant"].partition("-")[2] or "the file"
    if row["class"]:
        found = ", ".join(row["found_by"]) or f"**nothing** {row['ended']}"
        text = f"{name}: {row['class']}, {found}, {row['first_seconds']} s"
    else:
        accused = ", ".join(row["accused_by"])
        text = f"{name}: right, {f'**{accused}**' if accused else 'nothing'}, {row['seconds']} s"
        text += f" ({row['ended']})" if row["ended"] else ""
    return f"{text} (*open*: {row['open']})" if row["open"] else text


if __name__ == "__main__":
    sys.exit(main())
