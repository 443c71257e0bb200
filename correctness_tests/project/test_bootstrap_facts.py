"""How tools/bootstrap.py finds out what machine it is on, shown on simulated ones."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
FROZEN = {"torch": "2.9.0+rocm6.4", "pytorch-triton-rocm": "3.5.0"}


def load(name: str) -> ModuleType:
    """Load a script of tools/ under its own name, by which bootstrap.py imports bootstrap_plan."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


load("bootstrap_plan")
bootstrap = load("bootstrap")


def add_kfd(root: Path, simd_counts: Sequence[int]) -> None:
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()
    for index, simd_count in enumerate(simd_counts):
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(index)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd_count}\nwave 64\n")


def test_an_amd_gpu_is_a_topology_node_with_simds(tmp_path: Path) -> None:
    assert not bootstrap.has_amd_gpu(tmp_path)
    add_kfd(tmp_path, [0, 304])
    assert bootstrap.has_amd_gpu(tmp_path)


def test_without_dev_kfd_the_gpu_is_not_for_us(tmp_path: Path) -> None:
    add_kfd(tmp_path, [0, 304])
    (tmp_path / "dev/kfd").unlink()
    assert not bootstrap.has_amd_gpu(tmp_path)


def test_cpu_nodes_and_unreadable_nodes_are_no_gpus(tmp_path: Path) -> None:
    add_kfd(tmp_path, [0])
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/1/properties").mkdir(parents=True)
    assert not bootstrap.has_amd_gpu(tmp_path)


def add_distribution(
    site: Path, name: str, version: str, module: str, requires: Sequence[str] = ()
) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    fields = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *fields, ""]))
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n")
    (site / module).mkdir()
    (site / module / "__init__.py").touch()


@pytest.fixture
def rocm_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages directory like a ROCm container's, the only one on sys.path."""
    needs = ["pytorch-triton-rocm==3.5.0", "sympy>=1.13; python_version > '3'", "opt; extra == 'o'"]
    add_distribution(tmp_path, "torch", "2.9.0+rocm6.4", "torch", needs)
    add_distribution(tmp_path, "pytorch-triton-rocm", "3.5.0", "triton")
    add_distribution(tmp_path, "tritonclient", "2.60.0", "tritonclient")
    add_distribution(tmp_path, "sympy", "1.13.3", "sympy", ["mpmath<1.4", "gmpy2"])
    add_distribution(tmp_path, "mpmath", "1.3.0", "mpmath")
    add_distribution(tmp_path, "numpy", "1.26.4", "numpy")
    add_distribution(tmp_path, "opt", "1.0", "opt")
    (tmp_path / "torch/version.py").write_text("hip = '6.4.43482'\n")
    standard_library = [each for each in sys.path if "-packages" not in each]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *standard_library])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return tmp_path


@pytest.mark.usefixtures("rocm_site")
def test_torch_and_whatever_provides_triton_are_frozen_exactly() -> None:
    facts = bootstrap.gather_facts()
    assert facts.torch_found
    assert facts.torch_is_rocm
    assert facts.frozen == FROZEN


@pytest.mark.usefixtures("rocm_site")
def test_what_torch_and_numpy_brought_along_is_spoken_for() -> None:
    brought = {"torch", "pytorch-triton-rocm", "sympy", "mpmath", "numpy"}
    assert bootstrap.gather_facts().spoken_for == brought


def test_what_the_environment_constrains_is_spoken_for(
    rocm_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rocm_site / "constraint.txt").write_text("# NVIDIA\nTyping_Extensions==4.12\n")
    monkeypatch.setenv("PIP_CONSTRAINT", f"{rocm_site}/constraint.txt {rocm_site}/absent.txt")
    assert "typing-extensions" in bootstrap.gather_facts().spoken_for


def test_a_torch_for_cuda_or_the_cpu_is_no_rocm_build(rocm_site: Path) -> None:
    (rocm_site / "torch/version.py").write_text("hip = None\n")
    assert not bootstrap.gather_facts().torch_is_rocm


def test_a_directory_that_happens_to_be_called_torch_is_none(rocm_site: Path) -> None:
    (rocm_site / "torch/__init__.py").unlink()
    facts = bootstrap.gather_facts()
    assert not facts.torch_found
    assert facts.frozen == {}


def test_the_new_environment_is_asked_for_the_versions_it_sees(
    rocm_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(rocm_site))
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert bootstrap.versions_seen_by(tmp_path).items() >= FROZEN.items()
