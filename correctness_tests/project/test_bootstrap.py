"""What tools/bootstrap.py decides on machines that are not at hand: they are stated as facts.

Above all, a torch that came with the machine is never replaced. How the facts are found and the
decisions carried out is in test_bootstrap_run.py.
"""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


spec = importlib.util.spec_from_file_location("bootstrap_plan", ROOT / "tools/bootstrap_plan.py")
assert spec is not None
assert spec.loader is not None
decide = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decide)

OURS = """\
# why
torch==2.13.0
triton==3.9.0
typing_extensions==4.16.0
sympy==1.14.0
pytest==9.2.0
"""

BARE_CPU = decide.Facts(
    python=(3, 11),
    machine="x86_64",
    amd_gpu=False,
    torch_found=False,
    torch_is_rocm=False,
    frozen={},
    spoken_for=frozenset(),
)
CUDA_CONTAINER = BARE_CPU._replace(
    torch_found=True,
    frozen={"torch": "2.10.0+cu130", "triton": "3.6.0"},
    spoken_for=frozenset({"torch", "triton", "sympy", "typing-extensions"}),
)
ROCM_CONTAINER = BARE_CPU._replace(
    amd_gpu=True,
    torch_found=True,
    torch_is_rocm=True,
    frozen={"torch": "2.9.0+rocm6.4", "pytorch-triton-rocm": "3.5.0"},
    spoken_for=frozenset({"torch", "pytorch-triton-rocm", "sympy"}),
)


# Which machine gets what


def test_a_bare_machine_gets_torch_and_triton_under_our_constraints() -> None:
    assert decide.make_plan(BARE_CPU, ["test"], OURS) == (False, ("test", "triton"), OURS)


@pytest.mark.parametrize(
    ("machine", "python", "triton"),
    [("aarch64", (3, 11), True), ("aarch64", (3, 10), False), ("riscv64", (3, 13), False)],
)
def test_triton_is_asked_for_only_where_it_has_wheels(
    machine: str, python: tuple[int, int], triton: bool
) -> None:
    facts = BARE_CPU._replace(machine=machine, python=python)
    assert ("triton" in decide.make_plan(facts, ["test"], OURS).extras) == triton


def test_a_rocm_container_keeps_its_torch_and_its_triton_exactly() -> None:
    plan = decide.make_plan(ROCM_CONTAINER, ["test"], OURS)
    assert plan.inherit
    assert plan.extras == ("test",)
    assert plan.constraints.splitlines() == [
        "# why",
        "typing_extensions==4.16.0",
        "pytest==9.2.0",
        "pytorch-triton-rocm==3.5.0",
        "torch==2.9.0+rocm6.4",
    ]


def test_a_cuda_container_keeps_its_torch_and_its_triton_exactly() -> None:
    plan = decide.make_plan(CUDA_CONTAINER, ["test"], OURS)
    assert plan.inherit
    assert plan.extras == ("test",)
    pins = ["pytest==9.2.0", "torch==2.10.0+cu130", "triton==3.6.0"]
    assert plan.constraints.splitlines() == ["# why", *pins]


@pytest.mark.parametrize(("container", "extra"), [(CUDA_CONTAINER, True), (ROCM_CONTAINER, False)])
def test_a_container_without_triton_gets_one_unless_it_is_rocm(container: Any, extra: bool) -> None:
    torch_only = container._replace(frozen={"torch": container.frozen["torch"]})
    plan = decide.make_plan(torch_only, ["test"], OURS)
    assert ("triton" in plan.extras) == extra
    assert "triton==" not in plan.constraints


def test_a_torch_that_pip_cannot_see_stops() -> None:
    with pytest.raises(decide.BootstrapError, match="pip would install another"):
        decide.make_plan(CUDA_CONTAINER._replace(frozen={}), ["test"], OURS)


@pytest.mark.parametrize(
    ("facts", "found"), [(BARE_CPU, "has no torch"), (CUDA_CONTAINER, "is no ROCm build")]
)
def test_an_amd_gpu_without_a_rocm_torch_stops_and_says_what_to_install(
    facts: Any, found: str
) -> None:
    with pytest.raises(decide.BootstrapError, match=found) as stop:
        decide.make_plan(facts._replace(amd_gpu=True), ["test"], OURS)
    assert stop.value.status == 2
    assert "-m pip install torch --index-url https://download.pytorch.org/whl/rocm" in str(
        stop.value
    )


@pytest.mark.parametrize(
    ("python", "system", "has_venv", "reason"),
    [
        ((3, 9), "linux", True, r"Python 3\.9 found, 3\.10 or newer needed"),
        ((3, 10), "darwin", True, "this is darwin"),
        ((3, 10), "linux", False, "apt install python3-venv"),
    ],
)
def test_an_unfit_interpreter_is_turned_away_in_one_line(
    python: tuple[int, int], system: str, has_venv: bool, reason: str
) -> None:
    assert re.search(reason, decide.unfit(python, system, has_venv))
    assert "\n" not in decide.unfit(python, system, has_venv)
    assert decide.unfit((3, 10), "linux", True) is None


@pytest.mark.parametrize("name", ["bootstrap", "bootstrap_plan"])
def test_the_scripts_parse_on_pythons_that_they_turn_away(name: str) -> None:
    ast.parse((ROOT / "tools" / f"{name}.py").read_text(), feature_version=(3, 7))


@pytest.mark.parametrize("python", [(3, 10), (3, 11)])
def test_the_constraints_settle_every_dependency(python: tuple[int, int]) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = sum(project["optional-dependencies"].values(), project["dependencies"])
    lines = decide.default_constraints(python).read_text().splitlines()
    names = {decide.DISTRIBUTION_NAME.match(each).group() for each in declared}
    assert names <= {m.group() for m in map(decide.DISTRIBUTION_NAME.match, lines) if m}
    assert "torch==" + {(3, 10): "2.7.1", (3, 11): "2.13.0"}[python] in lines


# What pip's output and outcome mean

REFUSED = (
    "  WARNING: Retrying (...) after connection broken by '...: [Errno 111] Connection refused'"
)
NO_MATCH = "ERROR: No matching distribution found for numpy==2.4.6"


@pytest.mark.parametrize(
    "output",
    [
        f"Collecting numpy==2.4.6\n{REFUSED}\n{NO_MATCH}",
        "Collecting numpy==2.4.6\nReadTimeoutError(host=..., port=443): Read timed out.",
        "Collecting numpy==2.4.6\nOSError: [Errno -3] Temporary failure in name resolution",
        "Collecting numpy==2.4.6\n... Failed to establish a new connection: [Errno 101]",
    ],
)
def test_a_network_failure_is_named_with_what_was_being_installed(output: str) -> None:
    message = decide.pip_failure(output, ".[test]")
    assert "registry could not be reached while installing numpy==2.4.6, for .[test]" in message
    assert output.splitlines()[-1] in message


@pytest.mark.parametrize(
    "output", [NO_MATCH, f"{REFUSED}\nERROR: ResolutionImpossible: conflicting dependencies"]
)
def test_other_failures_are_not_blamed_on_the_network(output: str) -> None:
    message = decide.pip_failure("first\n" + 15 * "middle\n" + output, ".[test]")
    assert "could not be reached" not in message
    assert output.splitlines()[-1] in message
    assert "first" not in message


@pytest.mark.parametrize(
    "after",
    [
        {"torch": "2.9.0", "pytorch-triton-rocm": "3.5.0"},
        {"torch": "2.9.0+rocm6.4", "pytorch-triton-rocm": "3.5.0", "triton": "3.9.0"},
        {"torch": "2.9.0+rocm6.4"},
    ],
)
def test_a_torch_stack_changed_by_the_installation_is_an_error(after: dict[str, str]) -> None:
    plan = decide.make_plan(ROCM_CONTAINER, ["test"], OURS)
    decide.check_unchanged(ROCM_CONTAINER.frozen, ROCM_CONTAINER.frozen, plan)
    with pytest.raises(decide.BootstrapError) as stop:
        decide.check_unchanged(ROCM_CONTAINER.frozen, after, plan)
    assert stop.value.status == 2


def test_a_triton_that_was_asked_for_is_no_change() -> None:
    frozen = {"torch": "2.10.0+cu130"}
    plan = decide.make_plan(CUDA_CONTAINER._replace(frozen=frozen), ["test"], OURS)
    decide.check_unchanged(frozen, {**frozen, "triton": "3.9.0"}, plan)
    with pytest.raises(decide.BootstrapError):
        decide.check_unchanged(frozen, {"torch": "2.13.0", "triton": "3.9.0"}, plan)
