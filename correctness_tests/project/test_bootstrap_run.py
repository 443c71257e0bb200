"""How tools/bootstrap.py carries out its plan, and how it knows when that is done.

Nothing here runs pip or makes a real environment. What is decided is in test_bootstrap.py.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools/bootstrap.py"


def load(name: str) -> ModuleType:
    """Load a script of tools/ under its own name, by which bootstrap.py imports bootstrap_plan."""
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


decide = load("bootstrap_plan")
bootstrap = load("bootstrap")

FROZEN = {"torch": "2.9.0+rocm6.4", "pytorch-triton-rocm": "3.5.0"}
ROCM_CONTAINER = decide.Facts(
    python=(3, 11),
    machine="x86_64",
    amd_gpu=True,
    torch_found=True,
    torch_is_rocm=True,
    frozen=FROZEN,
    spoken_for=frozenset(FROZEN),
)


class Machine:
    """A simulated ROCm container: what the effects would find, and the effects that happened."""

    def __init__(self) -> None:
        self.facts: Any = ROCM_CONTAINER
        self.after = FROZEN
        self.pip_error: Exception | None = None
        self.done: list[str] = []

    def create_venv(self, venv: Path, inherit: bool) -> None:
        self.done.append("create")
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").touch()

    def install(self, venv: Path, plan: Any) -> None:
        self.done.append("install")
        if self.pip_error:
            raise self.pip_error


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "pins.txt").write_text("pytest==9.2.0\n")
    monkeypatch.setattr(bootstrap, "gather_facts", lambda: machine.facts)
    monkeypatch.setattr(bootstrap, "check_torch_imports", lambda: machine.done.append("import"))
    monkeypatch.setattr(bootstrap, "create_venv", machine.create_venv)
    monkeypatch.setattr(bootstrap, "install", machine.install)
    monkeypatch.setattr(bootstrap, "versions_seen_by", lambda venv: machine.after)
    return machine


def prepare(tmp_path: Path) -> None:
    bootstrap.prepare(tmp_path / "venv", tmp_path / "pins.txt", ["test"])


def test_an_environment_that_is_up_to_date_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert machine.done == ["import", "create", "install"]
    prepare(tmp_path)
    assert machine.done == ["import", "create", "install"]


def change_pyproject(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[project] # changed")


def change_constraints(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pins.txt").write_text("pytest==9.3.0\n")


def change_python(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version", "3.12.0 (another)")


def change_interpreter(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/another")


def remove_interpreter(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv/bin/python").unlink()


def change_gpu(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.facts = machine.facts._replace(amd_gpu=False)


def change_torch(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.after = {**FROZEN, "torch": "2.9.1+rocm6.4"}
    machine.facts = machine.facts._replace(frozen=machine.after)


def move_checkout(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/pyproject.toml").write_text("[project]")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "moved")


@pytest.mark.parametrize(
    "change",
    [
        change_pyproject,
        change_constraints,
        change_python,
        change_interpreter,
        remove_interpreter,
        change_gpu,
        change_torch,
        move_checkout,
    ],
)
def test_any_change_of_what_went_in_makes_it_anew(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    prepare(tmp_path)
    change(machine, tmp_path, monkeypatch)
    prepare(tmp_path)
    assert machine.done == 2 * ["import", "create", "install"]


def test_a_half_made_environment_is_not_taken_as_done(machine: Machine, tmp_path: Path) -> None:
    machine.pip_error = decide.BootstrapError("no network", status=1)
    with pytest.raises(decide.BootstrapError, match="no network"):
        prepare(tmp_path)
    machine.pip_error = None
    prepare(tmp_path)
    assert machine.done == 2 * ["import", "create", "install"]


def test_an_environment_whose_torch_was_changed_is_not_taken_as_done(
    machine: Machine, tmp_path: Path
) -> None:
    machine.after = {**FROZEN, "torch": "2.13.0"}
    for _ in range(2):
        with pytest.raises(decide.BootstrapError, match=r"2\.13\.0"):
            prepare(tmp_path)
    assert machine.done == 2 * ["import", "create", "install"]


def test_the_old_stamp_goes_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / bootstrap.STAMP).touch()

    def interrupted(command: Iterable[str]) -> tuple[int, str]:
        assert not (tmp_path / bootstrap.STAMP).exists()
        return 1, "interrupted"

    monkeypatch.setattr(bootstrap, "run_quietly", interrupted)
    with pytest.raises(decide.BootstrapError, match="interrupted"):
        bootstrap.create_venv(tmp_path, inherit=False)


def test_a_directory_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(decide.BootstrapError, match="is no virtual environment"):
        bootstrap.create_venv(tmp_path, inherit=False)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("inherit", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_callers_packages_are_seen_if_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherit: bool, nested: bool
) -> None:
    commands: list[Any] = []

    def quietly(command: Iterable[str]) -> tuple[int, str]:
        commands.append(command)
        return 0, ""

    monkeypatch.setattr(bootstrap, "run_quietly", quietly)
    monkeypatch.setattr(sys, "prefix", "/opt/venv" if nested else sys.base_prefix)
    monkeypatch.setattr(bootstrap.site, "getsitepackages", lambda: ["/opt/venv/packages"])
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").touch()
    bootstrap.create_venv(tmp_path, inherit)
    assert ("--system-site-packages" in commands[0]) == (inherit and not nested)
    paths = [line for pth in packages.glob("*.pth") for line in pth.read_text().splitlines()]
    assert paths == (["/opt/venv/packages"] if inherit and nested else [])


@pytest.mark.parametrize("status", [0, 1])
def test_pip_runs_under_the_plans_constraints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    commands: list[Any] = []

    def quietly(command: Iterable[str]) -> tuple[int, str]:
        commands.append(command)
        return status, "pip's words"

    monkeypatch.setattr(bootstrap, "run_quietly", quietly)
    plan = decide.Plan(True, ("test", "peers"), "torch==2.9.0+rocm6.4\n")
    if status == 0:
        bootstrap.install(tmp_path, plan)
    else:
        with pytest.raises(decide.BootstrapError, match="pip's words") as stop:
            bootstrap.install(tmp_path, plan)
        assert stop.value.status == 1
    assert (tmp_path / "constraints.txt").read_text() == plan.constraints
    assert commands[0][-4:] == ["-e", ".[test,peers]", "-c", str(tmp_path / "constraints.txt")]


def test_inside_the_active_environment_its_own_maker_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: calls.append((path, argv)))
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--extras", "test"])
    bootstrap.step_outside(tmp_path)
    assert calls == []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(decide.BootstrapError, match="deactivate"):
        bootstrap.step_outside(tmp_path)
    (tmp_path / bootstrap.STAMP).write_text(json.dumps({"key": "", "python": "/usr/bin/python3"}))
    bootstrap.step_outside(tmp_path)
    assert calls == [("/usr/bin/python3", ["/usr/bin/python3", "bootstrap.py", "--extras", "test"])]


def run_script(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_a_missing_constraints_file_is_one_line_and_status_2(tmp_path: Path) -> None:
    run = run_script("--venv", tmp_path / "venv", "--constraints", tmp_path / "missing.txt")
    assert run.returncode == 2
    assert run.stderr == f"bootstrap: there is no constraints file {tmp_path / 'missing.txt'}\n"


def test_a_broken_torch_is_left_for_its_owner_to_repair(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libamdhip64.so: not found')")
    (tmp_path / "torch/version.py").write_text("hip = '6.4'")
    (tmp_path / "torch-2.9.0+rocm6.4.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+rocm6.4\n"
    (tmp_path / "torch-2.9.0+rocm6.4.dist-info/METADATA").write_text(metadata)
    run = run_script("--venv", tmp_path / "venv", PYTHONPATH=str(tmp_path))
    assert run.returncode == 2
    assert "is broken, repair it first: ImportError: libamdhip64.so: not found" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()
