"""What decides on a candidate, and is the base's while it is judged.

The instrument replaces these files of both trees, so that one clock and one rule measure both. What
a candidate changes of it, or of what else could let a change pass, is shown and decides nothing.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from tinyllama.harness.gate.snapshots import Difference, module_file

PACKAGE = "tinyllama"  # a tree without it is another repository's
GATE = f"{PACKAGE}/harness/gate"
_INSTRUMENT = (
    *(f"{PACKAGE}/harness/{name}" for name in ("check", "gate", "measure", "records")),
    *(f"{PACKAGE}/harness/machine/{name}.py" for name in ("worker", "wire", "parsed")),
)
_SHOWN = (
    *(f"{PACKAGE}/harness/{name}/*" for name in ("check", "gate", "measure", "records", "plugins")),
    *(f"{PACKAGE}/{name}/*" for name in ("suites", "cli")),
    *("pyproject.toml", "accepted_slowdowns.toml", ".github/*", ".ci/*", "*conftest.py"),
    *("pytest.ini", "tox.ini", "setup.cfg", *_INSTRUMENT),
)
_TESTS = ("test_*.py", "*/test_*.py", "*_test.py")


def instrument(judge: Path, modules: Iterable[str]) -> list[str]:
    """The files and folders of a harness that measure, by name. modules: that time further
    benchmarks."""
    files = (module_file(judge, name) for name in modules)
    timing = [str(file.relative_to(judge)) for file in files if file is not None]
    return [*_INSTRUMENT, *timing]


def judging_files(differences: Iterable[Difference], timing: Iterable[str]) -> list[str]:
    """The files that differ and would judge. timing: names of further ones."""
    patterns = (*_SHOWN, *timing)
    return [
        d.name for d in differences if any(fnmatchcase(d.name, pattern) for pattern in patterns)
    ]


def deleted_tests(differences: Iterable[Difference]) -> list[str]:
    """The files of tests that the candidate lacks."""
    gone = (difference.name for difference in differences if difference.deleted)
    return [name for name in gone if any(fnmatchcase(name, pattern) for pattern in _TESTS)]
