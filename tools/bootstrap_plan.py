"""What tools/bootstrap.py decides: pure functions, from facts about a machine to a plan for it.

They are apart from the effects so that the tests can state machines which are not at hand. The
file has to parse on the older Pythons that the bootstrap turns away.
"""

import re
import sys
from pathlib import Path
from typing import Dict, FrozenSet, Iterable, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 10)
# From which Python on the triton that constraints/ names has wheels for the machine.
TRITON_WHEELS = {"x86_64": (3, 10), "aarch64": (3, 11)}
ROCM_WHEELS = "https://download.pytorch.org/whl/rocm6.4"

DISTRIBUTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CONNECTION_FAILURE = re.compile(
    "Failed to establish a new connection|Temporary failure in name resolution"
    "|Name or service not known|Failed to resolve|Connection refused|Connection reset"
    "|Network is unreachable|timed out|connect to proxy|CERTIFICATE_VERIFY_FAILED|Max retries"
)


class BootstrapError(Exception):
    """Why the bootstrap cannot go on, in words for whoever ran it, and its exit status."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class Facts(NamedTuple):
    """What the decisions depend on."""

    python: Tuple[int, int]
    machine: str  # as in `uname -m`
    amd_gpu: bool
    torch_found: bool  # the calling interpreter finds a torch, working or not
    torch_is_rocm: bool
    frozen: Dict[str, str]  # versions of torch and of whatever provides the module triton
    spoken_for: FrozenSet[str]  # the distributions whose version the container has settled


class Plan(NamedTuple):
    """The environment to make."""

    inherit: bool  # it sees the packages of the calling interpreter
    extras: Tuple[str, ...]
    constraints: str


def canonical(name: str) -> str:
    """The spelling under which distribution names compare equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unfit(python: Tuple[int, int], system: str, has_venv: bool) -> Optional[str]:
    """Why this interpreter cannot make the environment at all, or None."""
    if python < MIN_PYTHON:
        found, needed = (".".join(map(str, version)) for version in (python, MIN_PYTHON))
        return f"Python {found} found, {needed} or newer needed: `make PYTHON=/path/to/python ...`"
    if system != "linux":
        return f"Linux needed, this is {system}: triton and ROCm have no wheels for it"
    if not has_venv:
        return "this Python lacks venv or ensurepip: on Debian or Ubuntu `apt install python3-venv`"
    return None


def default_constraints(python: Tuple[int, int]) -> Path:
    """The newest tested versions no longer install on Python 3.10, which has the floor instead."""
    return ROOT / "constraints" / ("newest.txt" if python >= (3, 11) else "floor.txt")


def make_plan(facts: Facts, extras: Iterable[str], constraints: str) -> Plan:
    """Decide what to install, or raise BootstrapError where installing would do harm."""
    extras = tuple(extras)
    if facts.amd_gpu and not facts.torch_is_rocm:
        found = "has a torch that is no ROCm build" if facts.torch_found else "has no torch"
        raise BootstrapError(
            f"this machine has an AMD GPU, but {sys.executable} {found}. Either start a ROCm "
            "PyTorch container (rocm/pytorch), or install a ROCm torch:\n"
            f"    {sys.executable} -m pip install torch --index-url {ROCM_WHEELS}\n"
            "Then run this again; with another Python than python3, as `make PYTHON=... test`."
        )
    if not facts.torch_found:
        if facts.python >= TRITON_WHEELS.get(facts.machine, (99,)):
            extras += ("triton",)
        return Plan(False, extras, constraints)

    if "torch" not in facts.frozen:
        raise BootstrapError(
            f"the torch of {sys.executable} has no package metadata: pip would install another"
        )
    has_triton = len(facts.frozen) > 1
    if not has_triton and not facts.torch_is_rocm:
        extras += ("triton",)
    return Plan(True, extras, freeze(constraints, facts.frozen, facts.spoken_for))


def freeze(constraints: str, frozen: Dict[str, str], spoken_for: FrozenSet[str]) -> str:
    """Our constraints, with the container's own torch stack put in the place of ours."""
    dropped = {"torch", "triton"} | set(frozen) | spoken_for
    lines = []
    for line in constraints.splitlines():
        name = DISTRIBUTION_NAME.match(line)
        if not name or canonical(name.group()) not in dropped:
            lines.append(line)
    lines += [f"{name}=={version}" for name, version in sorted(frozen.items())]
    return "\n".join(lines) + "\n"


def check_unchanged(before: Dict[str, str], after: Dict[str, str], plan: Plan) -> None:
    """Hold the bootstrap to its promise; a second triton beside the first would shadow it."""
    expected = dict(before, triton=after.get("triton")) if "triton" in plan.extras else before
    if after != expected:
        raise BootstrapError(
            f"the installation was to keep {before} and left {after}; nothing was marked as done"
        )


def pip_failure(output: str, wanted: str) -> str:
    """Name the network as the cause where it is one.

    pip warns about every connection that it retries, and then has "no matching distribution"; a
    warning alone may be about a retry that worked.
    """
    lines = output.rstrip().splitlines()
    warnings = "\n".join(line for line in lines if "WARNING: " in line)
    errors = "\n".join(line for line in lines if "WARNING: " not in line)
    if CONNECTION_FAILURE.search(errors) or (
        CONNECTION_FAILURE.search(warnings) and "No matching distribution found" in errors
    ):
        started = re.findall(r"(?:Collecting|satisfies the requirement) (\S+)", output)
        last = started[-1] if started else wanted
        what = f"the package registry could not be reached while installing {last}, for {wanted}"
    else:
        what = f"pip failed to install {wanted}"
    return "\n    ".join([f"{what}; pip's last lines:", *lines[-15:]])
