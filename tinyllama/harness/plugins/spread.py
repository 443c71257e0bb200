"""Groups of timings spread over the GPUs of a host: ``pytest perf_tests --record -n 2``.

Workers of xdist run the tests, each worker on its own GPU. A group is measured whole by one worker,
which judges and saves it. The session that started the workers makes one report of all groups.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyllama.harness.machine.files import write_json
from tinyllama.harness.plugins.recording import Recording
from tinyllama.harness.records import results
from tinyllama.harness.records.verdict import Outcome, Verdict

GROUPS = "tinyllama_groups"  # in a worker's input: the file that tells the group of each test
MEASURED = "tinyllama_measured"  # in a worker's output


class Spread:
    """In the session that starts the workers."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._file: Path | None = None
        self._groups: dict[str, str] = {}  # by node id

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self._file is None:
            self._file = node.config._tmp_path_factory.mktemp("groups") / "groups.json"
        node.workerinput[GROUPS] = str(self._file)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

        class ByGroup(LoadScopeScheduling):
            """Gives a worker all tests of a group."""

            def _split_scope(_, nodeid: str) -> str:  # noqa: N805
                return self._group_of(nodeid)

        return ByGroup(config, log)

    def _group_of(self, nodeid: str) -> str:
        if not self._groups:
            assert self._file is not None, "no worker has started"
            self._groups = json.loads(self._file.read_text())
        return self._groups.get(nodeid, nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker measured. All of them expect the same groups."""
        given = getattr(node, "workeroutput", {}).get(MEASURED)
        if given is None:
            return
        found, recording = json.loads(given), self._recording
        recording.declared, recording.expected = found["declared"], found["expected"]
        recording.assigned.update(found["assigned"])
        recording.verdicts += [(g, Verdict(n, Outcome[o], t)) for g, n, o, t in found["verdicts"]]
        recording.lines += found["lines"]
        recording.elsewhere += map(results.from_json, found["records"])


def tell_groups(recording: Recording) -> None:
    """In a worker, after the collection: write the group of each test."""
    path = getattr(recording.config, "workerinput", {}).get(GROUPS)
    if path is not None:
        write_json(Path(path), recording.group_of)


def to_controller(recording: Recording) -> None:
    """In a worker, at its end: give what it measured to the session that started it."""
    output = getattr(recording.config, "workeroutput", None)
    if output is None:
        return
    output[MEASURED] = json.dumps(
        {
            "declared": recording.declared,
            "expected": recording.expected,
            "assigned": [name for name, group in recording.groups.items() if group.reports],
            "verdicts": [(g, v.name, v.outcome.name, v.text) for g, v in recording.verdicts],
            "lines": recording.lines[len(recording.team.lines()) :],
            "records": [results.as_json(record) for record in recording.finished()],
        }
    )
