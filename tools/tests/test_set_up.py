"""How `make` sets up the environment of its targets; nothing is installed here."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyllama.harness.machine.parsed import tomllib
from tools import set_up

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Run `make` where the environments exist and are empty."""
    for name in ("Makefile", "pyproject.toml", "tools/set_up.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("constraints", ".venv", ".venv-floor"):
        (tmp_path / name).mkdir()

    # `make test` runs this too: what it tells its own children is not for a make of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MF"))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


def test_it_is_set_up_again_after_a_failure_or_a_change(make: Make, tmp_path: Path) -> None:
    assert make("PYTHON=false", "bootstrap").returncode
    assert make("-q", "PYTHON=false", "bootstrap").returncode
    assert make("PYTHON=true", "bootstrap").returncode == 0
    assert make("-q", "PYTHON=true", "bootstrap").returncode == 0
    assert make("-q", "PYTHON=python9", "bootstrap").returncode
    changed, later = tmp_path / "constraints/newest.txt", time.time() + 60
    changed.touch()
    os.utime(changed, (later, later))  # a file system's clock may tick more slowly than make works
    assert make("-q", "PYTHON=true", "bootstrap").returncode


def test_an_environment_of_another_checkout_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/thesis.tex").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "theirs")
    for name in ("theirs", "linked"):
        with pytest.raises(SystemExit, match="is not a virtual environment of this checkout"):
            set_up.main(str(tmp_path / name), "test")
        (tmp_path / "theirs/pyvenv.cfg").touch()
    assert (tmp_path / "theirs/thesis.tex").exists()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "theirs"))
    with pytest.raises(SystemExit, match="run `deactivate`"):
        set_up.main(sys.prefix, "test")


@pytest.mark.parametrize(
    ("hip", "triton", "extras"),
    [("6.4", "pytorch-triton-rocm", "test"), (None, "triton", "test"), (None, None, "test,triton")],
)
def test_the_torch_and_triton_of_a_container_are_kept(
    hip: str | None,
    triton: str | None,
    extras: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = tmp_path / "site-packages"
    modules = {"torch": "torch", "Typing_Extensions": "typing_extensions"}
    modules |= {triton: "triton"} if triton else {}
    for project, module in modules.items():
        (packages / module).mkdir(parents=True)
        (packages / module / "__init__.py").touch()
        info = packages / f"{project.replace('-', '_')}-2.9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {project}\nVersion: 2.9.0\n")
    (packages / "torch/version.py").write_text(f"hip = {hip!r}")
    commands: list[list[str]] = []

    def call(command: list[str] | str, shell: bool = False) -> int:
        if isinstance(command, str):
            return 1  # no AMD GPU
        commands.append(command)
        (tmp_path / "venv/lib/python3/site-packages").mkdir(parents=True, exist_ok=True)
        return 0

    library = [path for path in sys.path if "-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(packages), *library])
    for module in [name for name in sys.modules if name.partition(".")[0] in ("torch", "triton")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(set_up.subprocess, "call", call)
    monkeypatch.chdir(ROOT)
    set_up.main(str(tmp_path / "venv"), "test")
    pins = (tmp_path / "venv/constraints.txt").read_text().splitlines()
    stack = [pin for pin in pins if re.match(r"[\w-]*(torch|triton|typing_ext)", pin)]
    assert sorted(stack) == sorted(f"{name}==2.9.0" for name in ("torch", triton) if name)
    assert "pytest==9.2.0" in pins
    (paths,) = (tmp_path / "venv").glob("lib/*/site-packages/caller.pth")
    assert str(packages) in paths.read_text().splitlines()
    assert f".[{extras}]" in commands[1]
    removed = [command[-1] for command in commands if "uninstall" in command]
    assert removed == (["triton"] if hip else [])


@pytest.mark.parametrize(("name", "torch"), [("floor", "2.7.1"), ("newest", "2.13.0")])
def test_the_constraints_settle_every_dependency(name: str, torch: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = sum(project["optional-dependencies"].values(), project["dependencies"])
    lines = (ROOT / f"constraints/{name}.txt").read_text().splitlines()
    assert {set_up.project(requirement) for requirement in declared} <= {
        set_up.project(line) for line in lines
    }
    assert f"torch=={torch}" in lines
