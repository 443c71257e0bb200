"""Mutants of the Python code: does a test fail when the harness, the model or a step is changed?

    python -m tools.module_mutants [--only training.data] [--sample 300] [--seed 0] [--jobs 2]

A seeded sample of the changes of `tools.mutation` is drawn over the modules in `FOLDERS`. Each is
planted in a copy of the tree, and the tests that import its module run there, in the default lane.
A mutant is killed when one of them fails; one that only raises or does not end is counted apart:
that shows that the code runs, not that it is checked. `tools/mutants.toml` must explain each
survivor, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tools import mutant_record
from tools.mutant_record import ENDED, RAISED, ROOT, SURVIVED, Trial, Tried
from tools.mutation import Change, changes_of, defaults

FOLDERS = ("tinyllama/harness", "tinyllama/model", "tinyllama/training")
SECONDS = 1200.0  # that the tests of an unchanged module may take
TIMES = 3.0  # as long as those of the unchanged module the tests of a mutant may take
PROCESSES = 64  # that the tests of a mutant may run at a time
TAG = "TINYLLAMA_MUTANT"  # in the environment of every process of a trial
TESTED = """import json, sys
from tools.mutant_trials import tested
print()
print(json.dumps(tested(sys.argv[1:])))"""


# -- which tests import a module ------------------------------------------------------------------


@functools.cache
def imports(file: Path) -> frozenset[str]:
    """The modules that a file imports, and the names that it takes from them, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return frozenset(found)


def module_of(file: Path) -> str:
    """The dotted name of a file of the tree."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _importers(module: str) -> tuple[Path, ...]:
    every = (
        path for top in ("tinyllama", "correctness_tests") for path in (ROOT / top).rglob("*.py")
    )
    return tuple(sorted(path for path in every if module in imports(path)))


def tests_of(module: str) -> list[str]:
    """The test files that import a module, by themselves or through a module of
    `correctness_tests.support`; if there are none, those of the modules that import it."""
    seen, now = {module}, [module]
    while now:
        importers = [path for one in now for path in _importers(one)]
        helpers = [path for path in importers if "support" in path.parts]
        users = [*importers, *(user for path in helpers for user in _importers(module_of(path)))]
        tests = {str(path.relative_to(ROOT)) for path in users if path.name.startswith("test_")}
        if tests:
            return sorted(tests)
        now = [name for path in importers if (name := module_of(path)) not in seen]
        seen.update(now)
    return []


# -- one mutant -----------------------------------------------------------------------------------


def _tagged(tag: str) -> list[int]:
    """The processes of a trial: those that inherited its tag."""
    wanted, found = f"{TAG}={tag}".encode(), []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _end(tag: str) -> None:
    while found := _tagged(tag):
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> tuple[str, str]:
    """The outcome of these tests in a tree, and the first that fails or the first error."""
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, TAG: tag, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen(
            [sys.executable, "-c", TESTED, *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + seconds
        try:
            while process.poll() is None:
                if time.monotonic() > end or len(_tagged(tag)) > PROCESSES:
                    return ENDED, ""
                time.sleep(0.5)
        finally:
            _end(tag)
            process.wait()
        answer.seek(0)
        last = answer.read().strip().rpartition("\n")[2]
    try:
        outcome, check = json.loads(last)
    except (ValueError, TypeError):
        return RAISED, last
    return outcome, check


@dataclass(frozen=True)
class Mutant:
    """A change of a module. name: the module and the function or class that it is in."""

    module: str
    file: str
    change: Change

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.module, self.change.place)))

    def tried(self, tree: Path, tests: Sequence[str], seconds: float) -> Trial:
        """How these tests end with the change planted in a copy of the tree."""
        if not tests:
            return self._trial(SURVIVED, "no test imports the module")
        path = tree / self.file
        original = path.read_text(encoding="utf-8")
        path.write_text(self.change.source, encoding="utf-8")
        try:
            return self._trial(*run_tests(tree, tests, seconds))
        finally:
            path.write_text(original, encoding="utf-8")

    def _trial(self, outcome: str, check: str) -> Trial:
        return Trial(self.change.line, self.change.text, self.change.gives, outcome, check)


def mutants(part: str = "") -> list[Mutant]:
    """Every mutant of the modules whose name contains ``part``."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    settings = defaults(texts.values())
    return [
        Mutant(module_of(file), str(file.relative_to(ROOT)), change)
        for file, text in texts.items()
        if part in module_of(file)
        for change in changes_of(text, settings)
    ]


@contextlib.contextmanager
def copies(number: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of the tree's files in which mutants are planted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in range(number):
            tree = Path(folder) / str(copy)
            for name in files:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)
            for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "the tree"]):
                who = ("-c", "user.name=tree", "-c", "user.email=tree@localhost")
                subprocess.run(["git", *who, *words], cwd=tree, check=True)
            free.put(tree)
        yield free


def attempts(chosen: Sequence[Mutant], jobs: int) -> Iterator[Tried]:
    """The trials of these mutants, so many at a time. A test file that fails unchanged is left
    out: it would seem to kill all."""
    tests = sorted({test for one in chosen for test in tests_of(one.module)})
    with copies(jobs) as free, ThreadPoolExecutor(jobs) as pool:

        def unchanged(test: str) -> float:
            tree, start = free.get(), time.monotonic()
            try:
                outcome, check = run_tests(tree, [test], SECONDS)
            finally:
                free.put(tree)
            if outcome != SURVIVED:
                print(f"left out, since it fails unchanged: {test}: {outcome}, {check}", flush=True)
                return math.inf
            return time.monotonic() - start

        seconds = dict(zip(tests, pool.map(unchanged, tests), strict=True))

        def tried(one: Mutant) -> Tried:
            right = (test for test in tests_of(one.module) if seconds[test] < math.inf)
            own = sorted(right, key=lambda test: seconds[test])
            tree = free.get()
            try:
                trial = one.tried(tree, own, 20 + TIMES * sum(seconds[test] for test in own))
            finally:
                free.put(tree)
            return Tried(one.name, trial)

        yield from pool.map(tried, chosen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate the Python code and run its tests.")
    parser.add_argument("--only", default="", help="a part of the modules' names")
    parser.add_argument("--sample", type=int, default=300, help="mutants in all (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--json", type=Path, help="write the trials to this file")
    parser.add_argument("--again", action="store_true", help="try the file's survivors again")
    args = parser.parse_args(argv)
    # A shell that runs this in the background has it ignore Ctrl-C, and the tests with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    every = mutants(args.only)
    if args.again and not (args.json and args.json.is_file()):
        parser.error("--again tries the survivors of a file: add --json FILE")
    if not every or args.sample < 1 or args.jobs < 1:
        parser.error(
            f"--only {args.only!r} --sample {args.sample} --jobs {args.jobs}: use a part of a "
            "module's name, as in training.data, and numbers of at least 1"
        )
    chosen = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    before = mutant_record.read(args.json) if args.again else []
    if args.again:
        left = {(one.name, one.trial.gives) for one in before if one.trial.outcome == SURVIVED}
        chosen = [one for one in every if (one.name, one.change.gives) in left]
    known = mutant_record.explained()
    trials = [one for one in before if one.trial.outcome != SURVIVED]
    for ended in attempts(chosen, args.jobs):
        trials.append(ended)
        print(ended.text(known), flush=True)
        if args.json:  # hours lie between the first and the last
            rest = [one for one in before if one.key not in {other.key for other in trials}]
            mutant_record.write(args.json, args.seed, len(every), trials + rest)
    print(f"{mutant_record.rate([one.trial for one in trials])} of the mutants were killed")
    return 1 if any(one.unexplained(known) for one in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
