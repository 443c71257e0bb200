"""What pytest-benchmark saved, beside the verdict: ``--benchmark-compare=NUMBER`` and thresholds.

``--benchmark-save``, ``--benchmark-autosave``, ``--benchmark-compare`` and its table are
pytest-benchmark's. It passes where it compared nothing, so here a run that was asked for and does
not exist is an error before anything is measured, and the summary says what the saved run has not.
"""

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

MISSES = (
    "--benchmark-compare-fail compares one figure of this run with one of a saved run: it does not "
    "see benchmarks that are new or missing, nor slowdowns smaller than the shift between two "
    "sessions; the verdicts above and --against do"
)
FAIL = "--benchmark-compare-fail"


class SavedRuns:
    """The saved runs that this session is compared with.

    Raises pytest.UsageError for options that can compare nothing.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.option = getattr(config.option, "benchmark_compare", [])  # True, or what names a run
        self.thresholds = getattr(config.option, "benchmark_compare_fail", None) or []
        self.loaded: list[dict[str, Any]] = []
        self.session: Any = None  # pytest-benchmark's, which its hook hands over
        if isinstance(self.option, str) and not _may_name_a_run(self.option):
            raise pytest.UsageError(
                f"--benchmark-compare {self.option!r} names no saved run: give a number such as "
                "0001, or no value, after the paths"
            )
        if self.thresholds and not self.option:
            raise pytest.UsageError(f"{FAIL} goes with --benchmark-compare: add it")
        options = [arg for arg in config.invocation_params.args if str(arg).startswith(FAIL)]
        if len(options) > 1:  # pytest-benchmark would hold the last one alone
            raise pytest.UsageError(
                f"{FAIL} is given {len(options)} times: give it all expressions"
            )
        warned = ExitStack()  # pytest-benchmark warns while it is configured
        warned.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Can't compare. No benchmark files")  # said here instead
        warnings.filterwarnings("default", "Benchmark machine_info is different")
        config.add_cleanup(warned.close)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(
        self, benchmarksession: Any, compared_benchmark: dict[str, Any]
    ) -> None:
        """pytest-benchmark loaded a saved run."""
        self.session = benchmarksession
        self.loaded.append(compared_benchmark)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Refuse what would compare nothing, after pytest-benchmark looked for its saved runs."""
        if not self.loaded and (isinstance(self.option, str) or self.thresholds):
            option = FAIL if self.thresholds else f"--benchmark-compare {self.option!r}"
            raise pytest.UsageError(
                f"{option}: no saved run is found in {session.config.option.benchmark_storage}: "
                "save one with --benchmark-autosave"
            )

    def lines(self) -> list[str]:
        """What the table of pytest-benchmark does not say."""
        if not self.option:
            return []
        if not self.loaded:
            return ["no run that pytest-benchmark saved is shown beside this one"]
        here = {benchmark.fullname for benchmark in self.session.benchmarks}
        saved = {benchmark["fullname"] for run in self.loaded for benchmark in run["benchmarks"]}
        text = f"{len(here & saved)} benchmarks compared with saved runs"
        for names, what in ((here - saved, "not saved"), (saved - here, "saved and not measured")):
            if names:
                first = min(names)
                text += f"; {len(names)} {what}, such as {first}"
        return [text, *([MISSES] if self.thresholds else [])]


def _may_name_a_run(value: str) -> bool:
    """Whether pytest-benchmark would take a value as a run: a file, or a pattern of its names."""
    path = Path(value)
    if path.is_file():
        return path.suffix != ".py"  # a test that the option took as its value
    return bool(value) and not path.is_dir() and len(path.parts) <= 2
