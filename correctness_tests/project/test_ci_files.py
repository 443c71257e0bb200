"""What no linter sees of the workflows and of docs/CI.md: no failure passes, no lane is lost, and
the statuses are those of the gate. `make lint` runs zizmor on the workflows."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import ran
from tinyllama.harness.machine.toml import tomllib
from tinyllama.harness.records.verdict import Outcome

yaml = pytest.importorskip("yaml", reason="extra 'test' is not installed: it brings PyYAML")

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = ROOT / ".ci" / "summary"
PAGE = (ROOT / "docs" / "CI.md").read_text(encoding="utf-8")
TEXTS = {path.name: path.read_text() for path in sorted((ROOT / ".github" / "workflows").iterdir())}
JOBS: dict[str, dict[str, Any]] = {name: yaml.safe_load(TEXTS[name])["jobs"] for name in TEXTS}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
ROW = re.compile(r"^\| (\d+) \| ([A-Z ]+) \|", re.M)
PASSES = r"\|\|\s*(?:true|:|exit 0)(?!\w)|set \+e|^\s*exit 0|continue-on-error: true"


def faults(text: str) -> list[str]:
    """What would let a failure pass, or hand out a right, in a workflow."""
    data = yaml.safe_load(text)
    found = re.findall(rf"{PASSES}|: write\b|actions/cache|shell: sh", text, re.M)
    if data.get("defaults", {}).get("run", {}).get("shell") != "bash":
        found.append("the default shell has no pipefail")
    for name, job in data["jobs"].items():
        if "steps" in job and "timeout-minutes" not in job:
            found.append(f"{name} has no time limit")
        if "merge-base" in str(job) and "'fetch-depth': 0" not in str(job):
            found.append(f"{name} has no merge base in a shallow clone")
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_a_workflow_lets_nothing_pass(name: str) -> None:
    assert not faults(TEXTS[name])


EXAMPLE = ROOT / "docs/examples/repository/.github/workflows/ci.yml"
WRITES = re.compile(r"(?:--gate-json[ =]|--json[ =]|--junitxml=|> |tee )\"?(?:\$here/)?build/")
SCRIPTS = [text for kind, text in BLOCK.findall(PAGE) if kind == "bash"]


@pytest.mark.parametrize("text", [*TEXTS.values(), EXAMPLE.read_text(), *SCRIPTS])
def test_a_folder_that_is_written_to_is_made_before(text: str) -> None:
    """No command makes the folder of a file that it writes, and a fresh clone has no ``build``."""
    if written := WRITES.search(text):
        assert re.search(r"mkdir -p .*\bbuild\b", text[: written.start()])


def test_some_scripts_write_to_a_folder() -> None:
    writing = [text for text in (*TEXTS.values(), EXAMPLE.read_text()) if WRITES.search(text)]
    assert len(writing) == 3
    assert len(list(filter(WRITES.search, SCRIPTS))) == 2


@pytest.mark.parametrize(
    ("text", "worse"),
    [
        ("gate.txt\n", "gate.txt || true\n"),
        ("gate.txt\n", "gate.txt || :; ls\n"),
        ("gate.txt\n", "gate.txt\n          exit 0\n"),
        ("mkdir", "set +e; mkdir"),
        ("- run: make", "- continue-on-error: true\n        run: make"),
        ("    shell: bash", "    shell: sh"),
        ("timeout-minutes: 120", "name: cpu"),
        ("fetch-depth: 0", "fetch-depth: 1"),
        ("contents: read", "contents: write"),
    ],
)
def test_each_fault_is_found(text: str, worse: str) -> None:
    changed = TEXTS["gate.yml"].replace(text, worse)
    assert changed != TEXTS["gate.yml"]
    assert faults(changed)


@pytest.mark.parametrize("target", ["lint", "test-all", "bench", "floor", "test-checks"])
def test_a_lane_of_the_makefile_is_run(target: str) -> None:
    run = TEXTS["ci.yml"] + (ROOT / ".ci" / "run").read_text()
    assert ".ci/run" in TEXTS["ci.yml"]
    assert re.search(rf"^.*make {target}$", run, re.M)


@pytest.mark.parametrize("lane", ["nvidia", "amd"])
def test_a_gpu_lane_needs_a_runner_and_no_fork_reaches_it(lane: str) -> None:
    called = JOBS["gate.yml"][lane]
    assert called["with"]["lane"] == lane
    assert called["with"]["runner"] == f"${{{{ vars.{lane.upper()}_RUNNER }}}}"
    assert called["if"].startswith(f"vars.{lane.upper()}_RUNNER != '' && (")
    assert "github.event.pull_request.head.repo.full_name == github.repository" in called["if"]
    assert JOBS["gate-gpu.yml"]["gate"]["concurrency"]["cancel-in-progress"] is False


def test_a_gpu_lane_asserts_the_targets_of_the_short_set_and_lists_them() -> None:
    steps = {one.get("name"): one for one in JOBS["gate-gpu.yml"]["gate"]["steps"]}
    targets = steps["Targets of this device"]
    called = " ".join(targets["run"].replace("\\\n", " ").split())
    assert "-m pytest perf_tests --device cuda -m target --groups short " in called
    assert called.endswith("| tee build/targets.txt")
    assert targets["if"] == "success() || failure()", "a gate that is not green hides no bar"
    assert "build/targets.txt >>" in steps["Summary"]["run"]
    assert steps["Summary"]["if"] == "always()"


def test_make_bench_times_the_short_set_and_bench_full_everything() -> None:
    for target, short in (("bench", True), ("bench-full", False)):
        (timed,) = (
            line
            for line in ran("make", "-n", target, cwd=ROOT).stdout.splitlines()
            if "pytest perf_tests" in line
        )
        assert ("--groups short" in timed) is short
        assert " -k " not in timed
        assert " -m " not in timed.partition("pytest")[2]


STEP = ("--noprofile", "--norc", "-eo", "pipefail")  # a workflow's step with `shell: bash`


def run_script(
    script: str, folder: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "script.sh"
    path.write_text(script)
    env = {**os.environ, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), **variables}
    return ran("bash", *options, str(path), cwd=folder, env=env)


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, 0, "AMD: passed"),
        ({"CPU": "failure"}, 1, "CPU: stops the merge: failure"),
        ({"RESOURCES": "cancelled"}, 1, "RESOURCES: stops the merge: cancelled"),
        ({"RESOURCES": "skipped"}, 1, "RESOURCES: stops the merge: skipped"),
        ({"AMD": "failure"}, 1, "AMD: stops the merge: failure"),
        ({"AMD": "skipped"}, 1, "AMD: stops the merge: not run for a fork"),
        ({"AMD": "skipped", "AMD_RUNNER": ""}, 0, "AMD: nothing was gated: the variable AMD_R"),
        ({"NVIDIA": "", "NVIDIA_RUNNER": ""}, 1, "NVIDIA: stops the merge: "),
    ],
)
def test_the_required_check_counts_what_was_left_out(
    changed: dict[str, str], status: int, said: str, tmp_path: Path
) -> None:
    last = JOBS["gate.yml"]["gate"]
    assert last["if"] == "always()"
    assert set(last["needs"]) == set(JOBS["gate.yml"]) - {"gate"}
    (step,) = last["steps"]
    passed = dict.fromkeys(map(str.upper, last["needs"]), "success")
    passed |= {"NVIDIA_RUNNER": '["a"]', "AMD_RUNNER": '["b"]'}
    assert set(step["env"]) == set(passed)
    done = run_script(step["run"], tmp_path, *STEP, **{**passed, **changed})
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


def test_every_shell_script_parses_and_lets_nothing_pass() -> None:
    steps = [
        step for jobs in JOBS.values() for job in jobs.values() for step in job.get("steps", ())
    ]
    scripts = [*blocks("bash"), SUMMARY.read_text(), *(s["run"] for s in steps if "run" in s)]
    assert len(blocks("bash")) >= 4
    for text in scripts:
        done = ran("bash", "-n", input=text)
        assert not done.stderr, text
        assert not re.search(PASSES, text, re.M), text


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
    *--verify*) exit "${VERIFY:-0}" ;;
    *report*) exit "${REPORT:-0}" ;;
esac
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done; exec "$@"
"""
Shell = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run a script in a repository, with commands in the place of python and srun: its status, and
    the arguments of each call of python."""
    for name, text in {"python": STUB, "srun": SRUN, "gate.sh": block("# gate.sh")}.items():
        path = tmp_path / ("bin" if name != "gate.sh" else "") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
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
    base = (tmp_path / ".git/refs/remotes/origin/main").read_text().strip()

    def run(script: str, *options: str, **variables: str) -> tuple[int, list[str]]:
        calls = tmp_path / "calls"
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept = {"PATH": path, "CALLS": str(calls), "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
        done = run_script(script, tmp_path, *options, **kept)
        return done.returncode, calls.read_text().replace(base, "BASE").splitlines()

    return run


@pytest.mark.parametrize("script", ["# gate.sh", "#SBATCH"])
@pytest.mark.parametrize(
    ("variables", "status", "calls"),
    [
        ({}, 0, 4),
        ({"CORRECTNESS": "1"}, 1, 1),
        ({"GATE": "10"}, 10, 3),
        ({"GATE": "17", "REPORT": "2"}, 17, 3),
        ({"VERIFY": "2"}, 2, 4),
        ({"REPORT": "2"}, 2, 4),
    ],
)
def test_the_scripts_of_the_page_hand_the_status_on(
    shell: Shell, script: str, variables: dict[str, str], status: int, calls: int, tmp_path: Path
) -> None:
    ended, called = shell(block(script), **variables)
    assert (ended, len(called)) == (status, calls)
    assert all(" --device cuda " in call for call in called[:2]), "the CPU must not stand in"
    if calls > 1:
        assert "--against BASE " in called[1]
        assert (tmp_path / "build/gate.txt").read_text() == "verdicts\n"


@pytest.mark.parametrize(
    ("workflow", "job", "tagged", "expected"),
    [
        ("gate.yml", "cpu", None, ["BASE"]),
        ("gate-gpu.yml", "gate", None, ["BASE"]),
        ("gate-gpu.yml", "gate", "refs/released", ["BASE", "v0.1.0"]),
        ("gate-gpu.yml", "gate", "origin/main", ["BASE"]),
    ],
)
def test_a_lane_is_held_to_the_merge_base_and_a_gpu_to_an_earlier_release(
    workflow: str, job: str, tagged: str | None, expected: list[str], shell: Shell, tmp_path: Path
) -> None:
    if tagged:
        subprocess.run(["git", "tag", "v0.1.0", tagged], cwd=tmp_path, check=True)
    (tmp_path / "build").mkdir(exist_ok=True)
    (step,) = (s for s in JOBS[workflow][job]["steps"] if "--benchmark-compare" in s.get("run", ""))
    status, called = shell(step["run"], *STEP, AGAINST="origin/main", LANE="amd", GATE="10")
    assert status == 10
    assert re.findall(r"--against (\S+)", called[0]) == expected
    assert f"--device {'cpu' if job == 'cpu' else 'cuda'} " in called[0]
    status, called = shell(step["run"], *STEP, AGAINST="origin/main", LANE="amd", VERIFY="2")
    assert status == 2
    assert re.findall(r"--against (\S+)", called[-1]) == expected
    summary = tmp_path / "summary.md"
    said = "no release" in summary.read_text() if summary.exists() else False
    assert said == (job == "gate" and not tagged)


def test_the_summary_shows_the_gates_section_or_says_that_there_is_none(tmp_path: Path) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "tables: $*"\n')
    python.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "summary"
    script.write_text(SUMMARY.read_text())

    def summary(*targets: str) -> str:
        called = ["bash", str(script), "gate.txt", "page.html", *targets]
        return subprocess.check_output(called, text=True)

    assert "came to no verdict" in summary()
    output = "collecting\n===== gate =====\nSLOWER rope\n===== 1 failed =====\n"
    (tmp_path / "gate.txt").write_text(output)
    assert "```\n===== gate =====\nSLOWER rope\n" in summary()
    assert "collecting" not in summary()
    assert "tables: -m tinyllama report --html page.html --markdown -" in summary()
    assert "Targets" not in summary()
    assert "No bar was looked at" in summary("targets.txt")
    bars = ["MET a: one", "MISSED a: two", "NOT APPLICABLE a: three"]
    (tmp_path / "targets.txt").write_text("\n".join(["collecting", *bars, "1 passed"]))
    listed = "### Targets of this device\n\n- " + "\n- ".join(bars) + "\n\n"
    assert listed in summary("targets.txt")
