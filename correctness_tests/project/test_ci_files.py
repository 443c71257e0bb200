"""The workflows and docs/CI.md: nothing in them lets a failure pass, runs text from outside as
code, or differs from the statuses that the gate has."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyllama.harness.records.verdict import Outcome

yaml = pytest.importorskip("yaml", reason="extra 'test' is not installed: it brings PyYAML")
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
PAGE = (ROOT / "docs" / "CI.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
ROW = re.compile(r"^\| (\d+) \| ([A-Z ]+) \|", re.M)
PINNED = re.compile(r"[\w-]+/[\w-]+@v\d+")
PASSES = re.compile(r"\|\|\s*(?:true|:|exit 0)(?!\w)|set \+e|^\s*exit 0", re.M)
GATES = re.compile(r"merge-base|--against\b")

Data = dict[Any, Any]


def workflows() -> dict[str, Data]:
    found = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.iterdir())}
    return {name: {"on": data.pop(True), **data} for name, data in found.items()}  # YAML 1.1's on


def steps(data: Data) -> Iterator[tuple[str, Data, Data]]:
    """Of each step: where it is, its job, itself."""
    for name, job in data["jobs"].items():
        for number, step in enumerate(job.get("steps", ()), 1):
            yield f"{name}, step {number}", job, step


def faults(data: Data) -> list[str]:
    """What is wrong with a workflow, each with the place."""
    found = []
    if data.get("permissions") != {"contents": "read"}:
        found.append("permissions: reading the contents is enough")
    if "pull_request_target" in data["on"]:
        found.append("pull_request_target: it runs a fork's code with the repository's rights")
    if data.get("defaults", {}).get("run", {}).get("shell") != "bash":
        found.append("shell: the default has no pipefail")
    for name, job in data["jobs"].items():
        found += [f"{name}: {fault}" for fault in job_faults(job)]
    for where, job, step in steps(data):
        found += [f"{where}: {fault}" for fault in step_faults(job, step)]
    return found


def job_faults(job: Data) -> list[str]:
    found = []
    if "steps" in job and not 0 < job.get("timeout-minutes", 0) <= 360:
        found.append("no time limit")
    if "permissions" in job:
        found.append("permissions of its own")
    if "continue-on-error" in job:
        found.append("continue-on-error")
    checkouts = [s for s in job.get("steps", ()) if "checkout" in s.get("uses", "")]
    depths = {step.get("with", {}).get("fetch-depth") for step in checkouts}
    scripts = "".join(step.get("run", "") for step in job.get("steps", ()))
    if GATES.search(scripts) and depths != {0}:
        found.append("fetch-depth: a shallow clone has no merge base")
    ours = re.search("self-hosted|inputs", str(job.get("runs-on")))
    if ours and job.get("concurrency", {}).get("cancel-in-progress") is not False:
        found.append("no concurrency group for its GPU")
    return found


def step_faults(job: Data, step: Data) -> list[str]:
    found = []
    script, uses = step.get("run", ""), step.get("uses")
    if "continue-on-error" in step:
        found.append("continue-on-error")
    if "${{" in script:
        found.append("an expression in a script is code: hand it over by env")
    if PASSES.search(script):
        found.append("a failure passes")
    if step.get("shell", "bash") != "bash":
        found.append("another shell")
    if uses and not PINNED.fullmatch(uses):
        found.append(f"{uses} is not pinned to a major version")
    if uses and "cache" in uses.partition("@")[0]:
        found.append("a cache")
    if uses and "upload-artifact" in uses and step.get("if") != "always()":
        found.append("what a failed job leaves is not kept")
    return found


@pytest.mark.parametrize("name", workflows())
def test_a_workflow_lets_nothing_pass(name: str) -> None:
    assert not faults(workflows()[name])


def job(data: Data, name: str) -> Data:
    found: Data = data["jobs"][name]
    return found


def gating(data: Data) -> Data:
    """The step that gates."""
    (found,) = (s for s in job(data, "cpu")["steps"] if "--against" in s.get("run", ""))
    return found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda d: d.pop("permissions"), "permissions"),
        (lambda d: d["permissions"].update(contents="write"), "permissions"),
        (lambda d: job(d, "cpu").update(permissions={"contents": "write"}), "of its own"),
        (lambda d: d["on"].update(pull_request_target=None), "pull_request_target"),
        (lambda d: d.pop("defaults"), "pipefail"),
        (lambda d: job(d, "cpu").pop("timeout-minutes"), "no time limit"),
        (lambda d: job(d, "cpu").update({"continue-on-error": True}), "continue-on-error"),
        (lambda d: gating(d).update({"continue-on-error": True}), "continue-on-error"),
        (lambda d: gating(d).update(run="git merge-base ${{ github.head_ref }} HEAD"), "is code"),
        (lambda d: gating(d).update(run="echo ${{ github.event.pull_request.title }}"), "is code"),
        (lambda d: gating(d).update(run=gating(d)["run"].strip() + " || true"), "passes"),
        (lambda d: gating(d).update(run="pytest || :\n"), "passes"),
        (lambda d: gating(d).update(run="pytest || true; ls"), "passes"),
        (lambda d: gating(d).update(run="pytest || exit 0"), "passes"),
        (lambda d: gating(d).update(run="set +e\npytest\n"), "passes"),
        (lambda d: gating(d).update(run="pytest\nexit 0"), "passes"),
        (lambda d: gating(d).update(shell="sh"), "another shell"),
        (lambda d: job(d, "cpu")["steps"][0].pop("with"), "fetch-depth"),
        (lambda d: job(d, "cpu")["steps"][0]["with"].update({"fetch-depth": 1}), "fetch-depth"),
        (lambda d: job(d, "cpu")["steps"][-1].pop("if"), "not kept"),
        (lambda d: job(d, "cpu")["steps"][0].update(uses="a/checkout@main"), "not pinned"),
        (lambda d: gating(d).update(uses="actions/cache@v4"), "a cache"),
        (lambda d: job(d, "cpu").update({"runs-on": ["self-hosted"]}), "concurrency"),
    ],
)
def test_each_fault_is_found(change: Callable[[Data], object], fault: str) -> None:
    data = copy.deepcopy(workflows()["gate.yml"])
    change(data)
    assert any(fault in each for each in faults(data))


def test_gpu_lanes_need_a_runner_and_no_fork_reaches_it() -> None:
    jobs = workflows()["gate.yml"]["jobs"]
    for lane in ("nvidia", "amd"):
        variable = f"vars.{lane.upper()}_RUNNER"
        called = jobs[lane]
        assert called["uses"] == "./.github/workflows/gate-gpu.yml"
        assert called["if"].startswith(f"{variable} != '' && (")
        assert "github.event.pull_request.head.repo.full_name == github.repository" in called["if"]
        assert called["with"]["runner"] == f"${{{{ {variable} }}}}"
        assert called["with"]["lane"] == lane


def test_gates_have_junit_json_and_every_base() -> None:
    found = workflows()
    scripts = [s["run"] for d in found.values() for _, _, s in steps(d) if "run" in s]
    gates = [script for script in scripts if "pytest perf_tests" in script and "against" in script]
    assert len(gates) == 2
    for script in gates:
        for part in ("--junitxml=build/gate.xml", "--gate-json build/gate.json", "merge-base"):
            assert part in script
    assert "git describe --tags" in gates[1 - ["cpu" in s for s in gates].index(True)]
    assert all("--device" in script for script in gates), "a lane must not fall back to the CPU"
    runs = re.findall(r"-m pytest .*", PAGE)
    assert [" --device cuda " in run for run in runs] == [True] * 3, "nor what the page shows"


STEP = ("--noprofile", "--norc", "-eo", "pipefail")  # a workflow's step with `shell: bash`


def run_script(
    script: str, folder: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "script.sh"
    path.write_text(script)
    return subprocess.run(
        ["bash", *options, str(path)],
        cwd=folder,
        env={**os.environ, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


LANES = {"RESOURCES": "success", "CPU": "success", "NVIDIA": "success", "AMD": "success"}
RUNNERS = {"NVIDIA_RUNNER": '["a"]', "AMD_RUNNER": '["b"]'}


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, 0, "AMD: passed"),
        ({"CPU": "failure"}, 1, "CPU: stops the merge: failure"),
        ({"RESOURCES": "cancelled"}, 1, "RESOURCES: stops the merge: cancelled"),
        ({"RESOURCES": "skipped"}, 1, "RESOURCES: stops the merge: skipped"),
        ({"AMD": "failure"}, 1, "AMD: stops the merge: failure"),
        ({"AMD": "skipped"}, 1, "AMD: stops the merge: not run for a fork"),
        (
            {"AMD": "skipped", "AMD_RUNNER": ""},
            0,
            "AMD: nothing was gated: the variable AMD_RUNNER",
        ),
        ({"NVIDIA": "", "NVIDIA_RUNNER": ""}, 1, "NVIDIA: stops the merge: "),
    ],
)
def test_the_required_check_counts_what_was_left_out(
    changed: dict[str, str], status: int, said: str, tmp_path: Path
) -> None:
    last = workflows()["gate.yml"]["jobs"]["gate"]
    assert last["if"] == "always()"
    assert set(last["needs"]) == set(workflows()["gate.yml"]["jobs"]) - {"gate"}
    (step,) = last["steps"]
    assert set(step["env"]) == {*LANES, *RUNNERS}
    done = run_script(step["run"], tmp_path, *STEP, **{**LANES, **RUNNERS, **changed})
    assert done.returncode == status, done.stderr
    assert said in (tmp_path / "summary.md").read_text()
    assert ("::warning" in done.stdout) == ("nothing was gated" in said)


# docs/CI.md


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(PAGE) if found == language]


def block(start: str) -> str:
    (found,) = (text for text in blocks("bash") if start in text)
    return found


def test_the_table_of_statuses_is_that_of_the_gate() -> None:
    shown = {int(status): title.strip() for status, title in ROW.findall(PAGE)}
    assert shown == {o.status: o.title for o in Outcome if o.status}
    green = next(line for line in PAGE.splitlines() if line.startswith("| 0 |"))
    assert all(outcome.title in green for outcome in Outcome if outcome.green)


def test_the_shell_blocks_parse_and_so_does_what_is_seen_to_fail() -> None:
    found = [*blocks("bash"), (ROOT / ".ci" / "summary").read_text()]
    found += [s["run"] for d in workflows().values() for _, _, s in steps(d) if "run" in s]
    assert len(blocks("bash")) >= 4
    for text in found:
        checked = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, check=False
        )
        assert not checked.stderr, text
        assert not PASSES.search(text), text
    broken = subprocess.run(["bash", "-n"], input="if x", capture_output=True, text=True)
    assert broken.returncode


def test_the_accepted_slowdown_of_the_page_is_one(tmp_path: Path) -> None:
    from tinyllama.harness.gate import accepted

    (text,) = blocks("toml")
    assert tomllib.loads(text)
    (tmp_path / accepted.FILE).write_text(text)
    (entry,) = accepted.load(tmp_path / accepted.FILE, "0.1.0", device="gpu").entries
    assert entry.amount == 0.03
    assert not accepted.load(tmp_path / accepted.FILE, "0.1.0", device="cpu").entries


STUB = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
case "$*" in
    *correctness_tests*) exit "${CORRECTNESS:-0}" ;;
    *perf_tests*) echo verdicts; exit "${GATE:-0}" ;;
    *report*) exit "${REPORT:-0}" ;;
esac
"""


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run a script of the page in a repository, with commands in the place of python and srun."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    bodies = {"python": STUB, "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"\n'}
    for name, text in bodies.items():
        (stubs / name).write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}")
        (stubs / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(tmp_path)  # a workflow calls .venv/bin/python
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (
        ["init", "-q", "-b", "main"],
        [*identity, "commit", "-q", "--allow-empty", "-m", "release"],
        ["update-ref", "refs/released", "HEAD"],
        [*identity, "commit", "-q", "--allow-empty", "-m", "base"],
        ["update-ref", "refs/remotes/origin/main", "HEAD"],
        [*identity, "commit", "-q", "--allow-empty", "-m", "candidate"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)

    def run(script: str, *options: str, **variables: str) -> tuple[int, list[str]]:
        calls = tmp_path / "calls"
        path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
        kept = {"PATH": path, "CALLS": str(calls), "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
        (tmp_path / "gate.sh").write_text(block("# gate.sh"))
        (tmp_path / "gate.sh").chmod(0o755)
        done = run_script(script, tmp_path, *options, **kept)
        return done.returncode, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.parametrize("script", ["# gate.sh", "#SBATCH"])
@pytest.mark.parametrize(
    ("variables", "status", "calls"),
    [
        ({}, 0, 3),
        ({"CORRECTNESS": "1"}, 1, 1),
        ({"GATE": "10"}, 10, 3),
        ({"GATE": "17", "REPORT": "2"}, 17, 3),
        ({"REPORT": "2"}, 2, 3),
    ],
)
def test_the_scripts_of_the_page_hand_the_status_on(
    shell: Callable[..., tuple[int, list[str]]],
    script: str,
    variables: dict[str, str],
    status: int,
    calls: int,
    tmp_path: Path,
) -> None:
    ended, called = shell(block(script), **variables)
    assert (ended, len(called)) == (status, calls)
    if calls == 3:
        base = (tmp_path / ".git/refs/remotes/origin/main").read_text().strip()
        assert f"--against {base} " in called[1]
        assert (tmp_path / "build/gate.txt").read_text() == "verdicts\n"


def test_a_script_that_swallows_the_status_would_be_seen(
    shell: Callable[..., tuple[int, list[str]]],
) -> None:
    text = block("# gate.sh")
    for worse in (text.replace("-euo pipefail", "-eu"), text.replace("gate=$?", "true")):
        assert worse != text
        assert shell(worse, GATE="10")[0] == 0


@pytest.mark.parametrize(
    ("tagged", "expected"),
    [(None, ["BASE"]), ("refs/released", ["BASE", "v0.1.0"]), ("origin/main", ["BASE"])],
)
def test_a_gpu_lane_is_held_to_the_merge_base_and_to_an_earlier_release(
    tagged: str | None,
    expected: list[str],
    shell: Callable[..., tuple[int, list[str]]],
    tmp_path: Path,
) -> None:
    if tagged:
        subprocess.run(["git", "tag", "v0.1.0", tagged], cwd=tmp_path, check=True)
    (tmp_path / "build").mkdir()
    base = (tmp_path / ".git/refs/remotes/origin/main").read_text().strip()
    gate = workflows()["gate-gpu.yml"]["jobs"]["gate"]
    (step,) = (s for s in gate["steps"] if "perf_tests" in s.get("run", ""))
    status, called = shell(step["run"], *STEP, AGAINST="origin/main", LANE="amd", GATE="10")
    assert status == 10
    assert re.findall(r"--against (\S+)", called[0].replace(base, "BASE")) == expected
    summary = tmp_path / "summary.md"
    assert ("no release" in summary.read_text() if summary.exists() else False) == (not tagged)


def test_the_summary_shows_the_gates_section_or_says_that_there_is_none(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text('#!/bin/sh\necho "tables: $*"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    script = tmp_path / ".ci" / "summary"
    script.write_text((ROOT / ".ci" / "summary").read_text())
    output = tmp_path / "gate.txt"

    def summary() -> str:
        return subprocess.check_output(["bash", str(script), "gate.txt", "page.html"], text=True)

    assert "came to no verdict" in summary()
    output.write_text("collecting\n===== gate =====\nSLOWER rope\n===== 1 failed =====\n")
    assert "```\n===== gate =====\nSLOWER rope\n" in summary()
    assert "collecting" not in summary()
    assert "tables: -m tinyllama report --html page.html --markdown -" in summary()
