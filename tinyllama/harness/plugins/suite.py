"""The pytest plugin: a device for each worker, seeds, and a summary of the cases left out.

A green run says little unless it says what it did not run. So cases marked ``slow`` are deselected
with a reason, skips have one, and the summary counts both by reason.
"""

import os
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama.harness.machine.device import default_device, device_name, lost, usable_device
from tinyllama.harness.machine.errors import UsageError

LEFT_OUT = pytest.StashKey[Counter[str]]()
LOST = pytest.StashKey[str]()  # why no further test can use the device in this process
OWN = pytest.StashKey[Path]()  # the folder of the only tests that are ours to change; else: all


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tinyllama")
    group.addoption("--device", help="device of the tests (default: a GPU if there is one)")
    group.addoption("--case-seed", type=int, default=0, help="the seed of the random cases")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    if config.option.device or hasattr(config, "workerinput"):
        # Refused here: tests may use no device, and -q prints no header.
        chosen = worker_device(config)
        if chosen.type != "cpu":
            torch.cuda.set_device(chosen)  # what names no number means this one, too


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Let xdist's workers, and the processes that their tests start, share the cores: threads of
    torch and of numpy, which read this when they are loaded, must not fight over them."""
    for spec in specs:
        spec.env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(specs)))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; with several GPUs each xdist worker takes its own."""
    return worker_device(request.config)


def worker_device(config: pytest.Config) -> torch.device:
    """The device that this process tests; also callable during collection."""
    if config.option.device:
        try:
            return torch.empty(0, device=usable_device(config.option.device)).device
        except (UsageError, RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise pytest.UsageError(f"--device {config.option.device}: {reason}") from error
    chosen = default_device()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if chosen.type != "cpu" and worker.startswith("gw"):
        return torch.device(chosen.type, int(worker[2:]) % torch.cuda.device_count())
    return chosen


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the random cases."""
    value: int = request.config.option.case_seed
    return value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow cases, each with its reason."""
    reasons = {}
    for item in items if not asks_for_slow(config) else ():
        if covers(config, item) and (slow := item.get_closest_marker("slow")):
            if not slow.args:
                raise pytest.UsageError(f"{item.nodeid}: pytest.mark.slow needs a reason")
            reasons[item] = f"slow, run with -m slow: {slow.args[0]}"
    if reasons:
        config.stash[LEFT_OUT].update(reasons.values())
        items[:] = [item for item in items if item not in reasons]
        config.hook.pytest_deselected(items=list(reasons))


def covers(config: pytest.Config, node: pytest.Item) -> bool:
    """Whether a test is of a suite of the harness; in a repository of another's own not all are."""
    return OWN not in config.stash or config.stash[OWN] == node.path.parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note in the report of a failed test that this process cannot use the GPU any more, because of
    this test or an earlier one."""
    report = yield
    if report.failed and LOST not in item.config.stash and (error := lost()):
        why = (
            f"no call on the GPU works in this process any more (seen after {item.nodeid}): {error}"
        )
        item.config.stash[LOST] = why
        report.sections.append(("GPU lost", why))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run nothing more in a process that has lost its GPU: every test would fail. A worker of xdist
    ends and is replaced; without xdist the session ends."""
    result = yield
    if why := item.config.stash.get(LOST, None):
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        item.session.shouldfail = why
    return result


def asks_for_slow(config: pytest.Config) -> bool:
    """Whether slow tests are run: where they are not, their many cases need not be made."""
    return "slow" in (config.option.markexpr or "").replace("not slow", "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of one xdist worker: all of them collect, and leave out, the same tests."""
    counts = getattr(node, "workeroutput", {}).get("left_out")
    if counts is not None:
        node.config.stash[LEFT_OUT] = Counter(counts)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        counts = session.config.stash[LEFT_OUT]
        output["left_out"] = dict(counts)


def pytest_report_header(config: pytest.Config) -> list[str]:
    chosen = worker_device(config)
    return [f"device: {chosen} ({device_name(chosen)}), torch {torch.__version__}"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash[LEFT_OUT].copy()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts[text.removeprefix("Skipped: ")] += 1
    terminalreporter.section("left out")
    terminalreporter.line(f"{sum(counts.values())} cases left out")
    for reason, count in counts.most_common():
        terminalreporter.line(f"{count:6d}  {reason}")
