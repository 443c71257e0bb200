"""What a gate cannot use is refused before a judge is started and before the device is awaited."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.gated_suite import git, plain_git
from tinyllama.cli import main
from tinyllama.harness.gate import judge

OP = 'from tinyllama.harness import Op\n\n{0} = Op("{0}", inputs={{"x": "N D"}})\n'
HARNESS = "tinyllama/harness/gate/x.py"  # which a tree of one's own lacks
FILES = {
    "perf_tests/conftest.py": "",
    "tinyllama/ops/scale.py": OP.format("scale"),
    "tinyllama/ops/gone.py": OP.format("gone"),
    "correctness_tests/toy.py": f"def toy(name):\n    return Op(name)\n{OP.format('toy')}",
}
OWN = {"kernels/scale.py": OP.format("scale"), "kernels/gone.py": OP.format("gone")}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the judges that were started were asked."""
    started: list[Any] = []

    def run(*given: Any) -> int:
        started.append(given)
        return 7

    monkeypatch.setattr(judge, "run", run)
    return started


def repository(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with a candidate that lacks an op of main."""
    monkeypatch.chdir(folder)
    plain_git(monkeypatch)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "tracked.txt").touch()
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message=all")
    for name in [name for name in files if name.endswith("gone.py")]:
        (folder / name).unlink()
    (folder / "new.py").write_text(OP.format("new"))


REFUSED = {
    "--op nosuch": "--op 'nosuch' is no op of either side: use one of gone, new, scale$",
    "--op scale --op nosuch": "--op 'nosuch' is no op of either side",
    "--op toy": "--op 'toy' is no op of either side",
    "--against nosuch": "no commit 'nosuch'",
    "--against HEAD --against nosuch": "no commit 'nosuch'",
    "nosuch": "nosuch: no such folder",
    "..": ".. is outside",
    "--results-dir nosuch": "--results-dir nosuch: no such folder",
    "--results-dir tracked.txt": "--results-dir tracked.txt: no such folder",
    "--gate-json tracked.txt": "--gate-json tracked.txt: git tracks that file",
    "--junit tracked.txt": "--junit tracked.txt: git tracks that file",
    "--junit kernels": "--junit 'kernels' is a folder",
    "--junit tracked.txt/x.xml": "--junit .*cannot be written|--junit .*no folder",
    "--junit /proc/no/x.xml": "--junit .* cannot be written",
    "--junit x --gate-json x": "--gate-json and --junit are both 'x'",
    "--device nosuch": "device 'nosuch' is unknown",
    "--device cpu:3": "device 'cpu:3' is unknown",
    "--against-env nosuch": "--against-env nosuch: no such file",
    "--against-env tracked.txt": "--against-env tracked.txt: it cannot be executed",
    f"--against-env {sys.executable}": "this interpreter runs the gate",
    "--ops new.py": "--ops: the gate times the benchmarks of this repository's conftest",
    "--verify x --time-limit 5": "--time-limit: --verify compares nothing",
    "--verify x --unwatched": "--unwatched: --verify compares nothing",
}
REFUSED_OWN = {
    "": "no ops are named: add --ops FILE",
    "--ops nosuch.py": "--ops nosuch.py: no such file",
    "--ops kernels": "--ops kernels: kernels is no Python file",
    "--ops tracked.txt": "--ops tracked.txt: tracked.txt is no Python file",
    "--ops ../outside.py": "the gate compares files of",
    "--ops new.py --op nosuch": "--op 'nosuch' is no op of either side: use one of .*rms_norm, ",
}


HARNESSED = {**FILES, HARNESS: "", "kernels/x.py": ""}


@pytest.mark.parametrize(
    ("files", "asked", "said"),
    [
        *(pytest.param(HARNESSED, asked, said, id=asked) for asked, said in REFUSED.items()),
        *(pytest.param(OWN, asked, said, id=f"own {asked}") for asked, said in REFUSED_OWN.items()),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_judge_is_started(
    files: dict[str, str],
    asked: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    judged: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "outside.py").touch()
    (tmp_path / "tree").mkdir()
    repository(tmp_path / "tree", files, monkeypatch)
    assert main(["gate", "--against=main", *shlex.split(asked)]) == 2
    assert re.search(said, (shown := capsys.readouterr().err).strip()), shown
    assert judged == []


@pytest.mark.parametrize(
    "asked",
    ["", "--op scale", "--op gone", "--op new", "perf_tests", "--junit new/x.xml --gate-json y"],
)
@pytest.mark.parametrize("own", [False, True])
def test_what_can_be_used_is_left_to_the_judge(
    asked: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: list[Any]
) -> None:
    """An op that one side alone declares too: its verdict says so."""
    files = {**FILES, **OWN} if own else {**FILES, HARNESS: ""}
    if own:
        files = {name: text for name, text in files.items() if not name.startswith("tinyllama")}
    repository(tmp_path, files, monkeypatch)
    ops = ["--ops", "new.py"] if own else []
    assert main(["gate", "--against=main", *shlex.split(asked), *ops]) == 7
    assert len(judged) == 1


def test_an_earlier_report_does_not_outlive_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: list[Any]
) -> None:
    repository(tmp_path, {**FILES, HARNESS: ""}, monkeypatch)
    report = tmp_path / "out.json"
    report.touch()
    assert main(["gate", "--against=nosuch", f"--gate-json={report}"]) == 2
    assert not report.exists()
