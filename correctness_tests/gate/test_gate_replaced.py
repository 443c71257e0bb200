"""A file of ops that changes another op when it is imported leaves none IDENTICAL."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from correctness_tests.support.two_trees import judged, op_file, pair
from tinyllama.harness.gate.opened import Group, Seen
from tinyllama.harness.gate.pair import Tree

pytestmark = pytest.mark.long

THEIRS = "import sys\nfor m in [m for n, m in sys.modules.items() if n.endswith('_victim')]:\n    "
PATCHES = {
    "a provider": ("object.__setattr__(m.victim['sum'], 'call', abs)", "victim-sum: call"),
    "the provider": ("m.victim.providers['sum'] = m.victim['eager']", "provider victim-sum"),
    "a function": ("m.helper = abs", "tinyllama_ops_file_victim.helper"),
    "its code": ("m.added.__code__ = m.eager.__code__", "victim.added, inside"),
}


@pytest.mark.parametrize("names", [("victim", "patch"), ("patch", "victim")], ids=str)
def test_a_file_that_changes_another_op_is_named(
    tmp_path: Path, seen: Callable[..., list[Seen]], names: tuple[str, str]
) -> None:
    files = {f"kernels/{name}.py": op_file(name) for name in names}
    files["kernels/victim.py"] = op_file("victim", "def helper(x):\n    return x")
    lines = THEIRS + "; ".join(line for line, _ in PATCHES.values())
    pair(tmp_path, files, {"kernels/patch.py": op_file("patch", lines)})
    found = judged(tmp_path, names, seen)
    assert set(found) == {"victim-sum", "patch-sum"}
    assert "kernels/patch.py of the candidate changes for every op" in found["victim-sum"]


@pytest.mark.parametrize("line", ["os._exit(0)", f"{THEIRS}os._exit(0)"], ids=["always", "beside"])
def test_an_import_that_ends_the_process_hides_nothing(
    tmp_path: Path, seen: Callable[..., list[Seen]], line: str
) -> None:
    """Nor does one that ends it only where the other op is there, and runs to its end alone."""
    files = {f"kernels/{name}.py": op_file(name) for name in ("victim", "patch")}
    pair(tmp_path, files, {"kernels/patch.py": op_file("patch", line)})
    found = judged(tmp_path, ("victim", "patch"), seen)
    assert set(found) == {"victim-sum", "patch-sum"}
    assert "import of all files (ended the process" in found["victim-sum"]
    assert "ended the process" in found["patch-sum"]


def test_each_way_to_change_another_op_is_seen(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    names = [f"patch{number}" for number, _ in enumerate(PATCHES)]
    files = {"victim.py": op_file("victim", "def helper(x):\n    return x")}
    for name, (line, _) in zip(names, PATCHES.values(), strict=True):
        files[f"{name}.py"] = op_file(name, THEIRS + line)
    files["right.py"] = op_file("right", "import tinyllama.ops.block")
    pair(tmp_path, files, {})
    tree = Tree("base", tmp_path / "base", sys.executable, "main", tmp_path)
    found = seen(tree, [Group((name,)) for name in ("victim.py", *files)][1:])
    victim, *each, right = found
    assert victim.changed == right.changed == {}
    for one, (_, what) in zip(each, PATCHES.values(), strict=True):
        assert any(what in name for name in one.changed), (what, one.changed)
