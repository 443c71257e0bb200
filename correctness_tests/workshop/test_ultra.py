"""The open exercise of V4: each fault is found in turn, and the solution has none."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import refused, tinyllama
from tinyllama.workshop import blanks

STARTER, SOLUTION = blanks.starter("ultra"), blanks.solution("ultra")
LAUNCHED = ("n, total, D, BLOCK=block", "n, total, D, eps, BLOCK=block")
ABSENT = ("if grads[1] is not None:", "if grads[1] is not None and grads[0] is None:")


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STARTER.replace("s = a + b", "s = a - b").replace(*LAUNCHED), "0 of 4 hold. outputs: "),
        (STARTER, "1 of 4 hold. fused_kernel: never launched"),
        (STARTER.replace(*LAUNCHED), "2 of 4 hold. gradients: "),
        (SOLUTION.replace(*ABSENT), "2 of 4 hold. gradients: "),
        (SOLUTION.replace("ds = torch.zeros_like(total)", "ds = grads[0].float() * 0"), "3 of 4"),
        (SOLUTION, "4 of 4 hold. all that is required holds"),
    ],
    ids=["wrong", "idle", "no gradient", "lost gradient", "absent gradient", "solution"],
)
def test_what_is_wrong_is_said(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    done = tinyllama("stages", "--tier", "v4", "--file", file, "--device", "cpu")
    assert done.out.startswith(said)
    assert done.status == (0 if text == SOLUTION else 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tier", "v4"], "--starter ultra"),
        (["--file", "mine.py"], "--starter ultra"),
        (["--tier", "v4", "--file", "absent.py"], "no file"),
        (["--tier", "v4", "--file", "broken.py"], "cannot be imported: SyntaxError"),
        (["--tier", "v4", "--file", "empty.py"], "declares no provider 'lesson' of add_rms_norm"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def", encoding="utf-8")
    assert said in refused("stages", "--device", "cpu", *options)
