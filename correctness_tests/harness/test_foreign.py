"""Kernels of other projects run without a GPU: what they ask of one is answered, and no more."""

import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language.extra.libdevice", reason="triton is missing")

from correctness_tests.support.commands import ROOT, python, tinyllama
from tinyllama.harness.kernels import jit, tl
from tinyllama.harness.kernels.interpreter_values import stock

libdevice = pytest.importorskip("triton.language.extra.libdevice")
erf, cast = libdevice.erf, tl.cast  # by names of their own
X = torch.linspace(0.1, 3, 40)


def in_a_process(code: str, folder: Path) -> str:
    """What Python code prints; `foreign` answers for the rest of a process."""
    done = python("-c", textwrap.dedent(code), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@jit
def library_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = cast(tl.load(x + at, mask=at < n, other=1.0), tl.float32)
    tl.store(y + at, libdevice.rsqrt(value) + libdevice.pow(value, 2.0) + erf(value), mask=at < n)


@jit
def unknown_kernel(x):  # type: ignore[no-untyped-def]
    tl.store(x, libdevice.cyl_bessel_i0(tl.load(x)))


def test_functions_of_libdevice_are_computed_under_any_name() -> None:
    y = torch.empty_like(X)
    library_kernel[(1,)](X, y, X.numel(), BLOCK=64)
    torch.testing.assert_close(y, X.rsqrt() + X.square() + X.erf())
    assert libdevice.rsqrt(1.0) is None, "it is to be put back"
    with pytest.raises(stock.InterpreterError, match="cyl_bessel_i0f is not interpreted"):
        unknown_kernel[(1,)](X.clone())


QUESTIONS = """
    import torch
    from triton.runtime import driver
    from tinyllama.harness.kernels.foreign import foreign
    from tinyllama.harness.kernels.launch import processors

    def ask():
        yield lambda: torch.cuda.get_device_properties("cpu").multi_processor_count
        yield lambda: torch.cuda.get_device_properties(device=torch.device("cpu")).name
        yield lambda: torch.cuda.get_device_capability()
        yield lambda: torch.cuda.current_device()
        yield lambda: torch.cuda.device(torch.device("cpu")).__enter__()
        yield lambda: driver.active.get_current_target().backend

    def answers():
        for question in ask():
            try:
                yield question()
            except Exception as error:
                yield "an error"
    print(*answers(), sep=", ")
    with foreign():
        pass
    print(*answers(), sep=", ")
    print(torch.cuda.is_available())
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers itself")
def test_questions_about_a_gpu_raise_before_and_are_answered_after(tmp_path: Path) -> None:
    before, after, available = in_a_process(QUESTIONS, tmp_path).splitlines()
    assert before == ", ".join(["an error"] * 6)
    assert after == "2, cpu, (0, 0), 0, None, cpu"
    assert available == "False", "code that asks must still take its path for a CPU"


PACKAGE = {
    "heavy/__init__.py": "raise RuntimeError('no GPU')",
    "heavy/kernels/__init__.py": "raise RuntimeError('no GPU')",
    "heavy/kernels/one.py": """
        import triton, triton.language as tl
        from absent.tools import factor, unused

        @triton.jit
        def kernel(x):
            tl.store(x, tl.load(x) * 2)

        def double(x):
            kernel[(1,)](x)
            return x * factor
    """,
}


@pytest.mark.long
def test_a_module_is_imported_without_the_packages_around_it(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    code = """
        import torch
        from tinyllama.harness.kernels.foreign import foreign

        with foreign(hollow=["heavy", "heavy.kernels"], instead={"absent.tools": {"factor": 10}}):
            from heavy.kernels import one
        print(one.double(torch.ones(1)).item())
        try:
            one.unused()
        except NotImplementedError as error:
            print(error)
        try:
            with foreign(hollow=["nowhere"]):
                pass
        except ModuleNotFoundError as error:
            print(error)
    """
    assert in_a_process(code, tmp_path).splitlines() == [
        "20.0",
        "absent.tools.unused is not imported: `foreign` stands for absent.tools",
        "no package 'nowhere': install it",
    ]


# -- the commands of docs/FOREIGN.md print what it says, on the files that it shows --------------

TEXT = (ROOT / "docs" / "FOREIGN.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|console)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    tuple(command.partition("\n")[::2])
    for kind, text in BLOCKS
    if kind == "console"
    for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
]


def shown(output: str) -> list[str]:
    """A check's table as the guide shows it, ``check | verdict``, and the line below it."""
    rows = re.findall(r"^│ (\S[^│]*?) +│ (\w+) ", output, re.MULTILINE)
    lines = [" | ".join(row) for row in rows]
    return lines + re.findall(r"^\S+: (?:wrong result|unsafe): .*$", output, re.MULTILINE)


@pytest.mark.usefixtures("forked")
def test_the_guide_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    assert len(COMMANDS) >= 3
    for command, expected in COMMANDS:
        argv = shlex.split(command)
        if argv[0] == "sed":
            assert not expected
            subprocess.run(argv, check=True)
            continue
        assert argv[:3] == ["python", "-m", "tinyllama"]
        done = tinyllama(*argv[3:])
        assert done.status in (0, 1), done.err
        assert shown(done.out) == expected.splitlines(), done.out
        assert done.status == ("wrong result" in expected)
