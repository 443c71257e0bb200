#!/usr/bin/env python3
"""Prepare the virtual environment that the Makefile runs in, without ever replacing a torch.

A ROCm or CUDA container comes with a torch built for its GPU. A plain `pip install` may overwrite
that with the default wheel of the package registry, and the tests would then speak of another
torch than the one they were meant for. So whatever torch the calling interpreter can import is
frozen at its exact version, and only where there is none does one get installed.

Run by the system's python3: only the standard library is used, and the file parses on the older
Pythons that it turns away. What to do is decided in bootstrap_plan.py.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import site
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, Optional, Tuple

from bootstrap_plan import (
    DISTRIBUTION_NAME,
    ROOT,
    BootstrapError,
    Facts,
    Plan,
    canonical,
    check_unchanged,
    default_constraints,
    make_plan,
    pip_failure,
    unfit,
)

STAMP = "bootstrap.json"


def has_amd_gpu(root: Path = Path("/")) -> bool:
    """Whether the kernel's compute driver is there and lists a GPU; CPUs are nodes without SIMDs.

    Asked of the kernel because a GPU can be there without any ROCm tool.
    """
    if not (root / "dev/kfd").exists():
        return False
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            simds = re.search(r"^simd_count (\d+)", node.read_text(), re.MULTILINE)
        except OSError:  # a GPU that was not handed to this container
            continue
        if simds and int(simds.group(1)) > 0:
            return True
    return False


def frozen_versions() -> Dict[str, str]:
    """The installed version of torch and of every distribution that provides module `triton`."""
    from importlib.metadata import distributions

    def provides_triton(dist: Any) -> bool:
        listed = (dist.read_text("top_level.txt") or "").split()
        return "triton" in listed or any(f.parts[0] == "triton" for f in dist.files or ())

    versions: Dict[str, str] = {}
    for dist in distributions():
        name = canonical(dist.metadata["Name"] or "")
        if name == "torch" or ("triton" in name and provides_triton(dist)):
            versions.setdefault(name, dist.version)  # the first on sys.path is the one imported
    return versions


def installed_closure(roots: Iterable[str]) -> FrozenSet[str]:
    """Those of the given distributions, and of what they require in turn, that are installed."""
    from importlib.metadata import PackageNotFoundError, requires

    known = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in known:
            continue
        try:
            required = requires(name) or []
        except PackageNotFoundError:
            continue
        known.add(name)
        required = [each for each in required if not re.search(r";.*\bextra\b", each)]
        todo += [canonical(DISTRIBUTION_NAME.match(each).group()) for each in required]
    return frozenset(known)


def pip_constraint_names() -> FrozenSet[str]:
    """What the environment constrains already: NVIDIA's containers do so for all they contain."""
    files = [Path(each) for each in os.environ.get("PIP_CONSTRAINT", "").split()]
    lines = [line for each in files if each.is_file() for line in each.read_text().splitlines()]
    return frozenset(canonical(m.group()) for m in map(DISTRIBUTION_NAME.match, lines) if m)


def is_rocm_build(version_file: Path) -> bool:
    """Whether torch.version.hip is set, read from its file."""
    return version_file.exists() and runpy.run_path(str(version_file)).get("hip") is not None


def gather_facts() -> Facts:
    """Look at this machine, without importing torch: that takes seconds, and may fail."""
    torch = importlib.util.find_spec("torch")
    origin = None if torch is None else torch.origin
    found = origin is not None
    frozen = frozen_versions() if found else {}
    # numpy is no requirement of torch, but the container's compiled packages are built against it.
    spoken_for = installed_closure([*frozen, "numpy"]) | pip_constraint_names()
    return Facts(
        python=sys.version_info[:2],
        machine=platform.machine(),
        amd_gpu=has_amd_gpu(),
        torch_found=found,
        torch_is_rocm=origin is not None and is_rocm_build(Path(origin).with_name("version.py")),
        frozen=frozen,
        spoken_for=spoken_for,
    )


def run_quietly(command: Iterable[str]) -> Tuple[int, str]:
    """Status and output of a command whose output matters only if it fails."""
    done = subprocess.run(
        list(command), cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout.strip()


def check_torch_imports() -> None:
    """A broken torch is for whoever installed it to repair: another on top would hide it."""
    status, output = run_quietly([sys.executable, "-c", "import torch"])
    if status != 0:
        why = output.splitlines()[-1] if output else f"status {status}"
        raise BootstrapError(f"the torch of {sys.executable} is broken, repair it first: {why}")


def read_stamp(venv: Path) -> Dict[str, str]:
    """What the last complete run left, {} if there was none."""
    try:
        return json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def fingerprint(facts: Facts, plan: Plan) -> str:
    """Differs whenever the environment has to be made anew."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    parts = [pyproject, plan, facts.amd_gpu, sys.version, sys.prefix, str(ROOT)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def create_venv(venv: Path, inherit: bool) -> None:
    """Make an empty environment at `venv`, in the place of what was there."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise BootstrapError(f"{venv} is there and is no virtual environment")
    if (venv / STAMP).exists():
        (venv / STAMP).unlink()  # first, so that no stamp outlives an interrupted run
    nested = sys.prefix != sys.base_prefix
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    command += ["--system-site-packages"] if inherit and not nested else []
    status, output = run_quietly(command)
    if status != 0:
        raise BootstrapError(f"could not make {venv}: {output}")
    if inherit and nested:
        # The caller is a virtual environment itself, and only its base would be inherited. Plain
        # paths, because pip takes them, unlike `import` lines, out of the builds that it isolates.
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "calling_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n")


def install(venv: Path, plan: Plan) -> None:
    """Install this checkout, editable, with the plan's extras."""
    (venv / "constraints.txt").write_text(plan.constraints)
    wanted = f".[{','.join(plan.extras)}]"
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--no-input"]
    status, output = run_quietly([*pip, "-e", wanted, "-c", str(venv / "constraints.txt")])
    if status != 0:
        raise BootstrapError(pip_failure(output, wanted), status=1)


def versions_seen_by(venv: Path) -> Dict[str, str]:
    """frozen_versions() of the new environment's interpreter."""
    tools = str(Path(__file__).resolve().parent)
    code = f"import json, sys; sys.path.append({tools!r}); import bootstrap; "
    code += "print(json.dumps(bootstrap.frozen_versions()))"
    return json.loads(subprocess.check_output([str(venv / "bin/python"), "-c", code]))


def prepare(venv: Path, constraints_file: Optional[Path], extras: Iterable[str]) -> None:
    """Bring the environment up to date."""
    facts = gather_facts()
    constraints_file = constraints_file or default_constraints(facts.python)
    if not constraints_file.is_file():
        raise BootstrapError(f"there is no constraints file {constraints_file}")
    plan = make_plan(facts, extras, constraints_file.read_text())
    key = fingerprint(facts, plan)
    if read_stamp(venv).get("key") == key and (venv / "bin/python").exists():
        print(f"bootstrap: {venv} is up to date")
        return

    if facts.torch_found:
        check_torch_imports()
        kept = ", ".join(f"{name} {version}" for name, version in sorted(facts.frozen.items()))
        print(f"bootstrap: keeping {kept} of {sys.executable}")
    print(f"bootstrap: making {venv} with {sys.executable}", flush=True)
    create_venv(venv, plan.inherit)
    extras = ",".join(plan.extras)
    print(f"bootstrap: installing .[{extras}], constrained by {constraints_file}", flush=True)
    install(venv, plan)
    if facts.torch_found:
        check_unchanged(facts.frozen, versions_seen_by(venv), plan)
    (venv / STAMP).write_text(json.dumps({"key": key, "python": sys.executable}))
    print(f"bootstrap: {venv} is ready")


def step_outside(venv: Path) -> None:
    """If the environment itself is the active one, go on as the Python that it was made with."""
    if Path(sys.prefix).resolve() == venv.resolve():
        python = read_stamp(venv).get("python")
        if python is None:
            raise BootstrapError(f"{venv} is active but incomplete: `deactivate` it and run again")
        os.execv(python, [python, *sys.argv])


def main() -> int:
    """Parse the command line, and turn BootstrapError into a message and a status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help="default: by Python")
    parser.add_argument(
        "--extras", default="test,peers,report,sensors,dev", help="default: %(default)s"
    )
    args = parser.parse_args()
    try:
        has_venv = all(map(importlib.util.find_spec, ("venv", "ensurepip")))
        reason = unfit(sys.version_info[:2], sys.platform, has_venv)
        if reason is not None:
            raise BootstrapError(reason)
        step_outside(args.venv)
        prepare(args.venv.absolute(), args.constraints, args.extras.split(","))
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
