"""Equal code is told from what triton compiles, here for two chips without one: comments move its
lines and nothing else; what is changed in a kernel or its launch is seen."""

import importlib.util
import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tinyllama.harness.gate.kernel_fingerprint import fingerprint
from tinyllama.harness.kernels import resources
from tinyllama.harness.kernels.chips import target_of
from tinyllama.harness.kernels.launch import Launched, recorded

triton = pytest.importorskip("triton")
CHIPS = ["sm_90", "gfx942"]
KERNEL = """
from tinyllama.harness.kernels import jit, tl


@jit
def scale(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside)
    value = value * 2.0
    tl.store(y + at, tl.exp(value), mask=inside)
"""
ALIKE = {
    "lines above": "\n\n# A comment.\n\n\n" + KERNEL,
    "a comment inside": KERNEL.replace(
        "    value = value", "    # It is doubled.\n    value = value"
    ),
    "a docstring": KERNEL.replace("    at =", '    """Twice x."""\n    at ='),
    "a line in two": KERNEL.replace("tl.load(x", "tl.load(\n        x"),
    "another name": KERNEL.replace("inside", "valid"),
}
numbers = itertools.count()


def module_of(source: str, folder: Path) -> ModuleType:
    """A file of that source, always of one name, in a folder of its own."""
    path = folder / str(next(numbers)) / "scales.py"
    path.parent.mkdir()
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("scales", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(source: str, chip: str, folder: Path, **options: Any) -> Launched:
    """A launch of the kernel in that source as it would be on a chip."""
    if reason := resources.lacking(chip):
        pytest.skip(reason)
    x = torch.empty(1000, device="meta")
    with recorded(chip) as launches:
        module_of(source, folder).scale[(4,)](x, x, 1000, BLOCK=256, **options)
    compilation = resources.compilation(launches[0], chip)
    with patch.dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache")):
        kernel = triton.compile(
            compilation.source, target=target_of(chip), options=compilation.options.__dict__
        )
    return Launched(kernel, launches[0].grid)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def launch(chip: str, folder: Path) -> Launched:
    return compiled(KERNEL, chip, folder)


# -- what triton compiles ---------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("change", ALIKE)
def test_a_change_that_only_moves_lines_keeps_the_fingerprint(
    launch: Launched, chip: str, folder: Path, change: str
) -> None:
    assert ALIKE[change] != KERNEL
    changed = compiled(ALIKE[change], chip, folder)
    assert fingerprint([changed]) == fingerprint([launch])


def test_another_kernel_option_or_grid_changes_the_fingerprint(
    launch: Launched, chip: str, folder: Path
) -> None:
    changed = [
        compiled(KERNEL.replace("* 2.0", "* 3.0"), chip, folder),
        compiled(KERNEL, chip, folder, num_warps=8),
        Launched(launch.kernel, (5,)),
    ]
    launch_lists = [[launch], [launch, launch], *([launched] for launched in changed)]
    assert len({str(fingerprint(launches)) for launches in launch_lists}) == len(launch_lists)
