"""How the mutants of each kernel ended: the record in results/mutants.json, the survivors that are
explained, and the table of docs/CHECK.md.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import tinyllama.harness.kernels
import tinyllama.ops
from tinyllama.harness.kernels.launch import Kernel, identity
from tinyllama.harness.machine.files import write_whole
from tinyllama.harness.machine.toml import tomllib
from tools.mutation import mutants_of
from tools.tested import ENDED, KILLED, RAISED, ROOT, SURVIVED

RECORD = ROOT / "results/mutants.json"
OF_MODULES = ROOT / "results/module_mutants.json"
EXPLAINED = ROOT / "tools/mutants.toml"

FOLDER = re.compile(r"(?<![\w.~<-])/(?:[^\s/:'\"]+/)+")  # of an absolute path

Names = Collection[tuple[str, str]]  # of mutants: the function, and its changed line


@dataclass(frozen=True)
class Trial:
    """How a mutant ended. check: the one that failed, or the error; the rest as in `Mutant`."""

    line: int
    text: str
    gives: str
    outcome: str
    check: str = ""


@dataclass(frozen=True)
class KernelTrials:
    """The trials of one function. source: its `digest`; by: the providers that it was tried with;
    mutants: how many it has; seed: of the sample of those that were tried."""

    kernel: str
    source: str
    by: list[str]
    mutants: int
    seed: int
    trials: list[Trial]

    def unexplained(self, explained: Names) -> list[Trial]:
        return [
            trial
            for trial in self.trials
            if trial.outcome == SURVIVED and (self.kernel, trial.gives) not in explained
        ]

    def text(self, explained: Names) -> str:
        """For people: counts, and each survivor."""
        counts = Counter(trial.outcome for trial in self.trials)
        said = ", ".join(f"{counts[o]} {o}" for o in (KILLED, SURVIVED, RAISED, ENDED) if counts[o])
        tried = f"{len(self.trials)} of {self.mutants} mutants"
        lines = [f"{self.kernel} by {', '.join(self.by)}: {said}; {tried}"]
        left = self.unexplained(explained)
        for trial in (trial for trial in self.trials if trial.outcome == SURVIVED):
            note = "" if trial in left else " (explained)"
            lines.append(f"    line {trial.line}: {trial.text}  gives  {trial.gives}{note}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Tried:
    """The trial of one mutant of a module. name: the module, and the function in it."""

    name: str
    trial: Trial

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.trial.gives

    def unexplained(self, explained: Names) -> bool:
        return self.trial.outcome == SURVIVED and self.key not in explained

    def open(self, explained: Names) -> bool:
        """Whether another try may end otherwise: with more tests, or where processors are idle."""
        return self.unexplained(explained) or self.trial.outcome == ENDED

    def text(self, explained: Names) -> str:
        """For people: a line."""
        one, survived = self.trial, self.trial.outcome == SURVIVED
        note = " (explained)" if survived and not self.unexplained(explained) else ""
        by = f" by {one.check}" if one.check else ""
        return f"{self.name} line {one.line}: {one.text}: {one.outcome}{by}{note}"


def explained() -> set[tuple[str, str]]:
    """The mutants that compute the same as the kernel, for a reason in `tools/mutants.toml`."""
    return {(one["kernel"], one["gives"]) for one in _declared()["equivalent"]}


def tests() -> dict[str, list[str]]:
    """By function, the tests that are run where all checks pass."""
    return _declared()["tests"]


def on_a_gpu() -> dict[str, str]:
    """The functions that a GPU alone runs, and what for."""
    found: dict[str, str] = _declared()["on_a_gpu"]
    return found


def _declared() -> dict[str, Any]:
    return tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))


def rate(trials: Sequence[Trial], equivalent: int = 0) -> str:
    """The share killed of those that ran to an end and are not equivalent."""
    killed, survived = (sum(t.outcome == one for t in trials) for one in (KILLED, SURVIVED))
    of = killed + survived - equivalent
    return f"{killed / of:.1%}" if of else "none"


# -- the record -----------------------------------------------------------------------------------


def relative(text: str, tree: Path = ROOT) -> str:
    """A message without folders of this machine: files of a tree by their path in it, others by
    their name."""
    return FOLDER.sub("", text.replace(f"{tree}/", "").replace(f"{ROOT}/", ""))


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def load(path: Path) -> list[KernelTrials]:
    """The recorded trials, function by function."""
    if not path.exists():
        return []
    return [
        KernelTrials(**{**one, "trials": [Trial(**trial) for trial in one["trials"]]})
        for one in json.loads(path.read_text(encoding="utf-8"))
    ]


def add(path: Path, made: Sequence[KernelTrials]) -> None:
    """Write the trials of functions; they replace earlier ones of the same functions."""
    own = {one.kernel: one for one in made if one.trials}
    record = {**{one.kernel: one for one in load(path)}, **own}
    some = [replace(record[name], trials=_portable(record[name].trials)) for name in sorted(record)]
    _write(path, [asdict(one) for one in some])


def _portable(trials: Sequence[Trial]) -> list[Trial]:
    return [replace(one, check=relative(one.check)) for one in trials]


def _write(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write(path: Path, seed: int, mutants: int, tried: Sequence[Tried]) -> None:
    """Write the trials of the first of all mutants of the modules, in the order of a seed."""
    trials = _portable([one.trial for one in tried])
    found = [{"name": one.name, **asdict(t)} for one, t in zip(tried, trials, strict=True)]
    _write(path, {"seed": seed, "mutants": mutants, "trials": found})


def read(path: Path) -> list[Tried]:
    """The trials that `write` wrote; none where nothing is."""
    if not path.exists():
        return []
    trials = json.loads(path.read_text(encoding="utf-8"))["trials"]
    return [Tried(one.pop("name"), Trial(**one)) for one in trials]


# -- tables ---------------------------------------------------------------------------------------


def functions() -> dict[str, Kernel]:
    """The functions under `jit` that have mutants, by name; not those in Gluon, which no CPU
    runs."""
    packages = (tinyllama.ops, tinyllama.harness.kernels)
    named = [one.name for of in packages for one in walk_packages(of.__path__, f"{of.__name__}.")]
    values = [value for name in named for value in vars(import_module(name)).values()]
    found = {identity(one): one for one in values if type(one) is Kernel}
    return {name: one for name, one in sorted(found.items()) if mutants_of(one)}


def table(record: Path = RECORD) -> str:
    """Markdown: how the recorded mutants ended, by function and in all; and the functions that have
    changed since."""
    known = explained()
    rows = _head("function")
    every: list[Trial] = []
    same = 0
    stale = []
    sources = {name: digest(kernel.src) for name, kernel in functions().items()}
    for one in load(record):
        if sources.get(one.kernel) != one.source:
            stale.append(f"`{one.kernel}`")
            continue
        survived = sum(trial.outcome == SURVIVED for trial in one.trials)
        equivalent = survived - len(one.unexplained(known))
        every, same = every + one.trials, same + equivalent
        tried = f"{len(one.trials)} of {one.mutants}"
        rows.append(_row(f"`{one.kernel}`", tried, one.trials, equivalent))
    rows.append(_row("all", str(len(every)), every, same))
    if stale:
        rows += ["", f"Changed since they were tried: {', '.join(stale)}."]
    return "\n".join(rows)


def table_of_modules() -> str:
    """Markdown: how the recorded mutants of the Python code ended, by folder and in all."""
    known = explained()
    folders: dict[str, list[Tried]] = {}
    tried = read(OF_MODULES)
    for one in tried:
        words = one.name.split(".")
        folder = ".".join(words[1 : 3 if words[1] == "harness" else 2])
        folders.setdefault(folder, []).append(one)
    rows = _head("folder")
    for name, some in [*((f"`{name}`", folders[name]) for name in sorted(folders)), ("all", tried)]:
        same = sum(one.trial.outcome == SURVIVED and not one.unexplained(known) for one in some)
        rows.append(_row(name, str(len(some)), [one.trial for one in some], same))
    return "\n".join(rows)


def _head(first: str) -> list[str]:
    return [
        f"| {first} | tried | killed | survived | equivalent | raised or no end | rate |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]


def _row(name: str, tried: str, trials: Sequence[Trial], equivalent: int) -> str:
    """survived: those that are not equivalent."""
    counts = Counter(trial.outcome for trial in trials)
    return (
        f"| {name} | {tried} | {counts[KILLED]} | {counts[SURVIVED] - equivalent} | {equivalent} "
        f"| {counts[RAISED] + counts[ENDED]} | {rate(trials, equivalent)} |"
    )
