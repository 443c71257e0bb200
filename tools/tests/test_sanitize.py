"""`tools/sanitize.py`: only a tool that sees faults and finds none is a success."""

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools import cuda_tools, sanitize


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the tool and a GPU."""
    monkeypatch.setattr(cuda_tools.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(cuda_tools, "cannot", lambda need, device: None)


def answers(
    monkeypatch: pytest.MonkeyPatch, planted: int, ops: int, only: str = ""
) -> list[list[str]]:
    """Has sanitized processes end with these statuses; returns their command lines. only: the one
    tool of which that holds for the ops, the others find nothing."""
    seen: list[list[str]] = []

    def run(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        seen.append(list(command))
        assert options["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"  # type: ignore[index]
        inside = command[command.index("--inside") + 1]
        status = ops if not only or only in command else 0
        said = None if inside == "ops" else "Device not supported"
        return subprocess.CompletedProcess(command, status if inside == "ops" else planted, said)

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    return seen


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("planted", "ops", "status"),
    [(86, 0, 0), (86, 86, 1), (86, 1, 1), (86, -11, 1), (0, 0, 2), (1, 0, 2)],
    ids=["clean", "a fault", "it failed", "it died", "blind", "the planted one failed"],
)
def test_only_a_tool_that_sees_and_finds_nothing_is_green(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    planted: int,
    ops: int,
    status: int,
) -> None:
    seen = answers(monkeypatch, planted, ops)
    assert sanitize.main(["--tool", "memcheck", "--only", "rope"]) == status
    assert ("Device not supported" in capsys.readouterr().err) == (status == 2)
    assert seen[0][seen[0].index("--inside") + 1] == "store"
    assert all("memcheck" in command and "86" in command for command in seen)


@pytest.mark.usefixtures("there")
def test_one_fault_of_three_tools_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answers(monkeypatch, 86, 0)
    assert sanitize.main([]) == 0
    assert len(seen) == 5, "nothing can be planted for racecheck"
    answers(monkeypatch, 86, 86)
    assert sanitize.main([]) == 1
    for tool in sanitize.TOOLS:
        answers(monkeypatch, 86, 86, only=tool)
        assert sanitize.main([]) == 1, tool


def test_the_planted_kernel_stores_beyond_its_buffer() -> None:
    x, wide = torch.ones(100), torch.zeros(128)
    sanitize.stray_kernel[(1,)](x, wide, 100, FAULT="store")
    assert wide[:100].eq(1).all()
    wide.fill_(7)
    sanitize.stray_kernel[(1,)](x, wide, 100, FAULT="load")
    assert wide[100] == 7
    sanitize.stray_kernel[(1,)](x, wide, 100, FAULT="store")
    assert wide[100] == 0
    assert wide[101] == 7


class Seen(TorchDispatchMode):
    """The names of the calls, and of products whether the memory that they write into was zero."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = func.__name__
        if "out" in kwargs:
            name += " into zeros" if not kwargs["out"].any() else " into something"
        self.calls.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["mm", "bmm"])
def test_products_are_written_over_zeros_and_are_what_they_were(batch: tuple[int, ...]) -> None:
    a, b = torch.randn(*batch, 3, 4, requires_grad=True), torch.randn(*batch, 4, 5)
    wanted = a.detach() @ b
    given = torch.full((*batch, 3, 5), torch.nan)
    with Seen() as seen, sanitize.Written():
        made = a @ b
        made.sum().backward()
        torch.matmul(a.detach(), b, out=given)
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(a.grad, torch.ones(*batch, 3, 5) @ b.mT)
    products = [name for name in seen.calls if "mm" in name]
    assert len(products) == 3
    assert all(name.endswith("out into zeros") for name in products)


def test_a_sanitizer_that_does_not_end_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: Sequence[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    assert sanitize._status("/bin/compute-sanitizer", "racecheck", ["rope"]) == 1
    assert "no end after 1800 s" in capsys.readouterr().out
