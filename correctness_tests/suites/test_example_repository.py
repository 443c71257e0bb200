"""The example repository with an installed wheel: every command that its README names."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from correctness_tests.support.commands import ROOT, ran
from correctness_tests.support.own_repository import QUIET, Checkout, committed

EXAMPLE = ROOT / "docs/examples/repository"
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
README = re.compile(r"`((?:pytest|tinyllama)(?: [^`]+)?)`")

pytestmark = pytest.mark.slow("it builds a wheel, and gates on the CPU for minutes")


class Installed:
    """A copy of the example, committed on ``main``, and an environment with the wheel."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.bin = folder / "repository", folder / "venv/bin"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        source = folder / "source"
        source.mkdir()
        shutil.copytree(ROOT / "tinyllama", source / "tinyllama", ignore=ignored)
        for name in SOURCES:
            shutil.copy(ROOT / name, source / name)
        pip = [sys.executable, "-m", "pip"]
        offline = ["--no-deps", "--no-index", "--quiet"]
        build = ["wheel", *offline, "--no-build-isolation", "-w", str(folder), str(source)]
        subprocess.run([*pip, *build], check=True)
        (wheel,) = folder.glob("tinyllama_harness-*.whl")
        venv.create(folder / "venv", symlinks=True)
        python = str(self.bin / "python")
        # A checkout that is on PYTHONPATH looks installed to pip.
        install = ["--python", python, "install", "--force-reinstall", *offline]
        subprocess.run([*pip, *install, str(wheel)], check=True)
        (packages,) = (folder / "venv/lib").glob("python*/site-packages")
        packages_here = [path for path in sys.path if path.endswith("-packages")]
        # torch and pytest are not copied
        (packages / "others.pth").write_text("\n".join(packages_here))
        (packages / "sitecustomize.py").write_text(QUIET)
        shutil.copytree(EXAMPLE, self.root, ignore=ignored)
        committed(self.root, {}, monkeypatch)

    def run(self, command: str) -> tuple[int, str]:
        name, *args = command.split()
        argv = ["tinyllama"] if name == "tinyllama" else ["python", "-m", name]
        environment = {
            n: v for n, v in os.environ.items() if not n.startswith(("PYTEST", "PYTHONPATH"))
        }
        environment["TMPDIR"] = str(self.temporary)  # where devices are locked
        environment |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
        done = ran(str(self.bin / argv[0]), *argv[1:], *args, cwd=self.root, env=environment)
        return done.returncode, done.stdout + done.stderr

    def edit(self, before: str, after: str) -> None:
        Checkout(self.root).edit("my_kernels/squared_relu.py", before, after)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Installed(tmp_path_factory.mktemp("installed"), monkeypatch)


def test_every_command_of_the_readme_runs(installed: Installed) -> None:
    """In the order of the README; the gate has a test of its own."""
    commands = README.findall((EXAMPLE / "README.md").read_text(encoding="utf-8"))
    expected = {"pytest", "pytest --record", "pytest --benchmark-compare", "tinyllama report"}
    assert expected <= set(commands)
    where = installed.run("tinyllama --version")
    assert where[0] == 0
    for command in commands:
        if "gate" in command:
            continue
        status, text = installed.run(command)
        if command == "pytest --benchmark-compare":
            assert status in (0, 10, 11), text  # this machine may be slower or busier than before
            assert "SAME op/squared_relu-triton-" in text  # which is in both records
        else:
            assert status == 0, f"{command}: {status}\n{text}"
    assert (installed.root / "report.html").stat().st_size > 10_000


def test_the_gate_stops_a_slowed_kernel_and_no_other(installed: Installed) -> None:
    command = "tinyllama gate --against main --gate-json build/gate.json"
    (installed.root / "build").mkdir(exist_ok=True)
    installed.edit("def composed", "# a comment\ndef composed")
    status, text = installed.run(command)
    assert status == 0, text
    assert "4 IDENTICAL" in text
    assert "verdicts against main, all green, of this tree" in text
    installed.edit("x.clamp(min=0) * x", "x.clamp(min=0) * x" + " * 1.0" * 10)
    status, text = installed.run(command)
    assert status == 10, text
    verdicts = json.loads((installed.root / "build/gate.json").read_text())["verdicts"]
    outcomes = {verdict["name"].partition("-N")[0]: verdict["outcome"] for verdict in verdicts}
    assert outcomes["squared_relu-torch"] == "SLOWER"
    assert outcomes["row_max-torch"] == outcomes["row_max-eager"] == "IDENTICAL"
