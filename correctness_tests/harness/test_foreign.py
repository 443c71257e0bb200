"""Kernels of other projects run without a GPU: what they ask of one is answered, and no more."""

import contextlib
import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.language.extra.libdevice", reason="triton is missing")

from correctness_tests.support.commands import ROOT, python, tinyllama
from tinyllama.harness.kernels import foreign as door
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
def scaled_kernel(x, y, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, value * factor.to(tl.float32), mask=at < n)


def test_a_floating_point_argument_is_a_float32_scalar_as_it_is_compiled() -> None:
    y = torch.empty_like(X)
    scaled_kernel[(1,)](X, y, X.numel(), 0.1, BLOCK=64)
    assert torch.equal(y, X * torch.tensor(0.1))


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers itself")
def test_questions_about_a_gpu_raise_before_and_are_answered_after(tmp_path: Path) -> None:
    before, after, available = in_a_process(QUESTIONS, tmp_path).splitlines()
    assert before == ", ".join(["an error"] * 6)
    assert after == "2, cpu, (0, 0), 0, None, cpu"
    assert available == "False", "code that asks must still take its path for a CPU"


def test_what_a_gpu_answers_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        @staticmethod
        def properties(device: Any = None) -> str:
            return f"asked about {device}"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    door._replace(Torch, "properties", lambda *_: "answered")
    assert Torch.properties(torch.device("cpu")) == "answered"
    assert Torch.properties(0) == "asked about 0"
    assert Torch.properties() == "asked about None"
    assert Torch.properties(device="cuda:1") == "asked about cuda:1"


class Question:
    """Stands for what torch asks of a GPU."""

    @staticmethod
    def of(*args: Any, **kwargs: Any) -> Any:
        return "asked", args, kwargs


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("device", [None, 0, "cuda:0", "cpu", torch.device("cpu")], ids=str)
def test_a_question_is_answered_where_it_is_about_a_cpu(
    device: Any, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last argument says so, or there is no GPU that could be meant; it is asked once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    answered = str(device) == "cpu" or not there
    assert door._of_cpu(device) is answered
    class_ = type("Asked", (), {"of": Question.of})
    door._replace(class_, "of", lambda *given: ("answered", given))
    door._replace(class_, "of", lambda *given: pytest.fail("replaced twice"))
    asked: Any = class_.of  # type: ignore[attr-defined]
    if answered:
        assert asked("self", device) == ("answered", ("self", device))
        assert asked("self", device=device) == ("answered", ("self", device))
    else:
        assert asked("self", device) == ("asked", ("self", device), {})
        assert asked("self", device=device) == ("asked", ("self",), {"device": device})
    assert asked()[0] == ("asked" if there else "answered")


def test_what_is_answered_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: dict[tuple[Any, str], Any] = {}
    named: list[bool] = []

    def replace(owner: Any, name: str, answer: Any) -> None:
        replaced[owner, name] = answer

    monkeypatch.setattr(door, "_replace", replace)
    monkeypatch.setattr(door, "_name_a_target", lambda: named.append(True))
    monkeypatch.setattr(door, "processors_of", {torch.device("cpu"): 17}.__getitem__)
    door._answer()
    assert named == [True]
    monkeypatch.setattr(door, "HAS_TRITON", False)
    door._answer()
    assert named == [True]
    context = SimpleNamespace()
    replaced.pop((torch.cuda.device, "__init__"))(context, "cpu")
    assert vars(context) == {"idx": -1, "prev_idx": -1}
    facts = {"name": "cpu", "multi_processor_count": 17, "major": 0, "minor": 0, "warp_size": 32}
    answers = {name: answer("cpu") for (owner, name), answer in replaced.items() if name[0] != "c"}
    current = {name: answer() for (owner, name), answer in replaced.items() if name[0] == "c"}
    assert {owner for owner, _ in replaced} == {torch.cuda}
    assert answers == {
        "get_device_properties": SimpleNamespace(**facts),
        "get_device_capability": (0, 0),
        "get_device_name": "cpu",
        "synchronize": None,
    }
    assert current == {"current_device": 0, "current_stream": SimpleNamespace(cuda_stream=0)}


def test_what_is_asked_of_a_door_is_done_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    @contextlib.contextmanager
    def adopted() -> Iterator[None]:
        done.append("adopts")
        yield
        done.append("adopts no more")

    monkeypatch.setattr(door, "_answer", lambda: done.append("answers"))
    monkeypatch.setattr(door, "_hollow", done.append)
    monkeypatch.setattr(door, "_stand_in", lambda *given: done.append(given))
    monkeypatch.setattr(door, "adopted", adopted)
    with door.foreign(hollow=["a", "a.b"], instead={"c": {"one": 1}, "d": {}}):
        done.append("inside")
    asked = ["a", "a.b", ("c", {"one": 1}), ("d", {})]
    assert done == ["answers", *asked, "adopts", "inside", "adopts no more"]
    done.clear()
    with door.foreign():
        assert done == ["answers", "adopts"]


@pytest.mark.parametrize("there", [False, True])
def test_a_target_is_named_where_there_is_none(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.runtime

    def target() -> str:
        if not there:
            raise RuntimeError("0 active drivers")
        return "a GPU"

    made: list[Any] = []
    posed = SimpleNamespace(
        active=SimpleNamespace(get_current_target=target), set_active=made.append
    )
    monkeypatch.setattr(triton.runtime, "driver", posed)
    monkeypatch.setattr(door, "processors_of", {torch.device("cpu"): 17}.__getitem__)
    door._name_a_target()
    assert len(made) == (not there)
    for one in made:
        found = one.get_current_target()
        assert (found.backend, found.arch, found.warp_size) == ("cpu", 0, 32)
        assert one.get_active_torch_device() == torch.device("cpu")
        assert (one.get_current_device(), one.get_current_stream()) == (0, 0)
        facts = one.utils.get_device_properties(0)
        assert facts == {"multiprocessor_count": 17, "max_shared_mem": 65536, "warpSize": 32}


def test_modules_that_stand_in_are_found_from_those_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zz_hollow", "zz_hollow/inside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", before := dict(sys.modules))
    door._hollow("zz_hollow")
    door._hollow("zz_hollow.inside")
    first = before["zz_hollow"]
    door._hollow("zz_hollow")
    assert before["zz_hollow"] is first, "it was there"
    assert first.inside is before["zz_hollow.inside"]
    with pytest.raises(ModuleNotFoundError, match="no package 'zz_none': install it") as raised:
        door._hollow("zz_none")
    assert raised.value.name == "zz_none"
    door._stand_in("zz_top.deep.tools", {"factor": 10})
    door._stand_in("zz_top.other", {})
    top = before["zz_top"]
    assert top.deep.tools.factor == 10
    assert top.other is before["zz_top.other"]
    assert all(before[name].__path__ == [] for name in ("zz_top", "zz_top.deep.tools"))
    with pytest.raises(NotImplementedError, match=r"zz_top\.deep\.tools\.gone is not imported"):
        top.deep.tools.gone(1, at=2)
    assert not hasattr(top.deep, "__wrapped__"), "Python asks for such names"


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
    liger = importlib.util.find_spec("liger_kernel") is not None
    followed = 0
    for command, expected in COMMANDS:
        if "my_layer_norm" in command and not liger:
            continue  # in no lane but those that install peers
        followed += 1
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
    assert followed >= 3
