"""Equal code is told from what triton compiles, here for two chips without one: comments move its
lines and nothing else; what is changed in a kernel or its launch is seen."""

import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.gate.compiled import code, code_of, fingerprint
from tinyllama.harness.gate.compiled import resources as taken
from tinyllama.harness.kernels import resources
from tinyllama.harness.kernels.launch import Launched, recorded, target_of

triton = pytest.importorskip("triton")
CHIPS = ["sm_90", "gfx942"]
STAGE = {"sm_90": "ptx", "gfx942": "amdgcn"}
INSTRUCTION = {
    "sm_90": re.compile(r"^\s+(@!?%p\d+ )?[a-z][\w.:]* .*;"),
    "gfx942": re.compile(r"^\s+(v|s|global|buffer|ds)_\w+"),
}
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
    made = resources.compilation(launches[0], chip)
    with resources._surroundings(str(folder / "cache")):
        kernel = triton.compile(made.source, target=target_of(chip), options=made.options.__dict__)
    return Launched(kernel, launches[0].grid)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def usual(chip: str, folder: Path) -> Launched:
    return compiled(KERNEL, chip, folder)


# -- what triton compiles ---------------------------------------------------------------------


@pytest.mark.parametrize("change", ALIKE)
def test_what_moves_lines_moves_no_code(
    usual: Launched, chip: str, folder: Path, change: str
) -> None:
    assert ALIKE[change] != KERNEL
    other = compiled(ALIKE[change], chip, folder)
    assert fingerprint([other]) == fingerprint([usual])


def test_no_instruction_is_stripped(usual: Launched, chip: str) -> None:
    text = str(usual.kernel.asm[STAGE[chip]])
    kept = code_of(usual.kernel.asm).splitlines()
    raw = [line for line in text.splitlines() if INSTRUCTION[chip].match(line)]
    assert len(raw) > 20
    assert len([line for line in kept if INSTRUCTION[chip].match(line)]) == len(raw)
    assert len(kept) < len(text.splitlines()), "and some lines are"
    assert not re.search(r"scales\.py|\.loc\b|\.debug_", "\n".join(kept))


# -- what is read of it -----------------------------------------------------------------------

TOLD = {
    "num_warps": 4,
    "num_ctas": 1,
    "shared": 0,
    "cluster_dims": (1, 1, 1),
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
OTHERWISE: dict[str, Any] = {
    "num_warps": 8,
    "num_ctas": 2,
    "shared": 1024,
    "cluster_dims": (2, 1, 1),
    "launch_cooperative_grid": True,
    "launch_pdl": True,
}


def launch(grid: tuple[int, ...] = (4,), text: str = "ret;", **told: Any) -> Launched:
    metadata = SimpleNamespace(**{**TOLD, "name": "a_kernel", "num_stages": 3, **told})
    kernel = SimpleNamespace(asm={"ptx": text}, metadata=metadata, n_regs=32, n_spills=0)
    return Launched(kernel, grid)


@pytest.mark.parametrize(
    "other",
    [
        launch((5,)),
        launch((4, 2)),
        launch(text="ret; ret;"),
        *(launch(**{name: value}) for name, value in OTHERWISE.items()),
    ],
    ids=lambda other: f"{other.grid}{other.kernel.asm}{other.kernel.metadata}"[:60],
)
def test_what_the_runtime_is_told_is_part_of_a_launch(other: Launched) -> None:
    assert fingerprint([launch()]) == fingerprint([launch(name="b", num_stages=4)])
    assert fingerprint([other]) != fingerprint([launch()])


def test_the_order_and_the_number_of_launches_count() -> None:
    one, other = launch(), launch((5,))
    found = [fingerprint(each) for each in ([one, other], [other, one], [one], [one, other, other])]
    assert all(first != second for first, second in itertools.combinations(found, 2))
    assert fingerprint([]) == []


@pytest.mark.parametrize(
    ("stage", "text", "kept"),
    [
        ("ptx", "\tadd.s32 a, b, c; mov.b32 d, e; // why", "\tadd.s32 a, b, c; mov.b32 d, e;"),
        ("ptx", "\t.loc 1 2 3\n\tret;\n", "\tret;"),
        ("ptx", "$L__tmp3:\n$L__BB0_2:\n\tret;", "$L__BB0_2:\n\tret;"),
        (
            "ptx",
            "ret;\n\t.section\t.debug_str\n{\n.b8 1\n}\n\t.section .x\nmore",
            "\t.section .x\nmore",
        ),
        ("amdgcn", "\tv_add v0, v1 ; why\n.Ltmp3:\n.LBB0_1:\n", "\tv_add v0, v1\n.LBB0_1:"),
        (
            "amdgcn",
            '\t.section\t.debug_info,"",@progbits\n\t.byte 1\n\t.text\n\ts_endpgm',
            "s_endpgm",
        ),
        ("amdgcn", '\t.cfi_startproc\n\t.file 1 "a.py"\n\ts_endpgm', "\ts_endpgm"),
    ],
)
def test_lines_of_debug_information_go_and_code_stays(stage: str, text: str, kept: str) -> None:
    assert code(text, stage).endswith(kept)
    assert "debug" not in code(text, stage)
    assert "why" not in code(text, stage)


def test_a_backend_without_text_is_an_error() -> None:
    with pytest.raises(LookupError, match="no instructions in the stages ttir, bin"):
        code_of({"ttir": "", "bin": b""})


def test_what_a_kernel_takes_is_of_its_last_launch() -> None:
    found = taken([launch((4,)), launch((2, 3), shared=8), launch(name="b_kernel")])
    assert found.keys() == {"a_kernel", "b_kernel"}
    wanted = {"registers": 32, "spills": 0, "shared": 8, "warps": 4, "stages": 3, "programs": 6}
    assert found["a_kernel"] == wanted


@pytest.mark.parametrize("told", [{}, None, 0], ids=["not told", "None", "0"])
def test_what_a_backend_does_not_tell_is_zero(told: Any) -> None:
    of_kernel = dict.fromkeys(("n_regs", "n_spills"), told) if told != {} else {}
    names = ("shared", "num_warps", "num_stages")
    of_launch = dict.fromkeys(names, told) if told != {} else {}
    kernel = SimpleNamespace(metadata=SimpleNamespace(name="a_kernel", **of_launch), **of_kernel)
    found = taken([Launched(kernel, (4,))])["a_kernel"]
    assert found.pop("programs") == 4
    assert found == dict.fromkeys(("registers", "spills", "shared", "warps", "stages"), 0)
