"""What a committed file accepts is accepted until its release; a file with an error accepts
nothing, and says which entry it is."""

import re
from functools import partial
from pathlib import Path

import pytest

from tinyllama.harness.gate import accepted
from tinyllama.harness.gate.accepted import FILE, METRICS
from tinyllama.harness.gate.judged import Change

REST = 'reason = "sums are compensated now"\nrelease = "0.3.0"\n'
NORM = f'[[accepted]]\nbenchmark = "norm"\namount = 0.03\n{REST}'
GONE = f'[[accepted]]\nbenchmark = "rope"\nremoved = true\n{REST}'

load = partial(accepted.load, device="gpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE


def test_an_amount_of_one_metric_of_one_benchmark(path: Path) -> None:
    kernels = NORM.replace("amount = 0.03", 'metric = "kernels"\namount = 1')
    path.write_text(NORM + kernels + GONE)
    found = load(path, "0.2.0")
    found.check(["norm", "rope", "other"])
    assert found.amount("norm", "device_seconds") == pytest.approx(0.03)
    assert (found.more("norm", "kernels"), found.amount("norm", "kernels")) == (1, 0)
    assert not any(found.amount("norm", m) for m in (*METRICS[1:], "live_bytes"))
    assert not any(found.more("norm", m) for m in METRICS if m != "kernels")
    assert not any(found.amount(name, m) for name in ("nor", "Norm", "rope") for m in METRICS)
    assert found.is_removed("rope")
    assert not found.is_removed("norm")
    assert found.entries[0].reason == "sums are compensated now"


@pytest.mark.parametrize("text", [None, "", "# nothing\n", "accepted = []\n"])
def test_without_an_entry_nothing_is_accepted(path: Path, text: str | None) -> None:
    if text is not None:
        path.write_text(text)
    found = load(path, "0.2.0", path.with_name("no base.toml"))
    found.check([])
    assert found.amount("norm", "device_seconds") == 0
    assert not found.is_removed("norm")


WRONG = {
    "an unknown key": (NORM + 'until = "now"\n', "unknown key 'until'"),
    "no benchmark": (NORM.replace("benchmark", "#"), "lacks 'benchmark': add it"),
    "no reason": (NORM.replace("reason", "#"), "lacks 'reason'"),
    "no release": (NORM.replace("release", "#"), "lacks 'release'"),
    "no amount": (NORM.replace("amount", "#"), "give either amount or removed"),
    "amount and removed": (NORM + "removed = true\n", "give either amount or removed"),
    "removed = 1": (GONE.replace("true", "1"), "removed is 1: use true"),
    "an unknown device": (NORM + 'device = "tpu"\n', "device is 'tpu': use cpu or gpu"),
    "a count that is no number of them": (
        NORM.replace("0.03", "1.5") + 'metric = "kernels"\n',
        "amount is 1.5: use a share",
    ),
    "an empty reason": (NORM.replace("sums are compensated now", " \\t"), r"reason is ' \\t'"),
    "a word as a release": (NORM.replace("0.3.0", "never"), "release is 'never': use numbers"),
    "a number as a release": (NORM.replace('"0.3.0"', "0.3"), "release is 0.3: use a text"),
    "an unknown metric": (NORM + 'metric = "speed"\n', "unknown metric 'speed': use device_"),
    "the same twice": (NORM + NORM, "two such entries: delete one"),
    "the same twice, on both devices and one": (
        NORM + NORM + 'device = "cpu"\n',
        "two such entries",
    ),
    "removed and slower": (
        GONE + NORM.replace("norm", "rope") + 'metric = "kernels"\n',
        "two such entries",
    ),
    **{
        f"amount = {amount}": (NORM.replace("0.03", amount), f"amount is {amount}: use a share")
        for amount in ("0", "-0.1", "1.001", "nan", "inf", "'3%'")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_that_is_wrong_is_named_with_the_fix(path: Path, name: str) -> None:
    text, message = WRONG[name]
    path.write_text(text)
    number = text.count("[[")
    with pytest.raises(
        ValueError, match=rf"accepted_slowdowns\.toml, accepted {number} .*{message}"
    ):
        load(path, "0.2.0")


NO_LISTS = ["[accepted]\n", "accepted = 3\n", "accepted = [3]\n", "[[excepted]]\n"]
NO_TOML = ["[[accepted]\n", NORM.replace('"norm"', "norm")]


@pytest.mark.parametrize("text", [*NO_LISTS, NORM + "[more]\n", *NO_TOML])
def test_a_file_that_is_no_list_of_entries_is_an_error(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^/.*accepted_slowdowns\.toml[ :]"):
        load(path, "0.2.0")


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    path.write_bytes(NORM.encode() + b"# \xff\n")
    with pytest.raises(ValueError, match=r"accepted_slowdowns\.toml cannot be read"):
        load(path, "0.2.0")
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"accepted_slowdowns\.toml cannot be read"):
        load(path, "0.2.0")


@pytest.mark.parametrize("text", [NORM, GONE])
def test_an_entry_of_a_benchmark_that_is_gone_is_an_error(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"accepted 1 .* no such benchmark here: rename or delete"):
        load(path, "0.2.0").check(["norm[x]", "ropes"])


@pytest.mark.parametrize(
    ("version", "release", "holds"),
    [
        ("0.2.0", "0.3.0", True),
        ("0.9", "0.10", True),
        ("0.3.0.dev4", "0.3.0", True),
        ("0.3.0", "0.3.0", False),
        ("0.3.0", "0.3", False),
        ("0.3.0.post1", "0.3.0", False),
        ("0.10.0", "0.9.0", False),
    ],
)
@pytest.mark.parametrize("entry", [NORM, GONE])
def test_an_entry_ends_with_its_release(
    path: Path, version: str, release: str, holds: bool, entry: str
) -> None:
    path.write_text(entry.replace("0.3.0", release))
    if holds:
        assert load(path, version).entries
        return
    said = re.escape(f"until {release}, and this is {version}: delete")
    with pytest.raises(ValueError, match=rf"accepted 1 .*{said}"):
        load(path, version)


def test_what_the_base_accepted_is_in_its_figures_already(path: Path) -> None:
    base = path.with_name("base.toml")
    base.write_text(NORM + GONE)
    path.write_text(NORM + GONE)
    found = load(path, "0.2.0", base)
    assert found.amount("norm", "device_seconds") == 0
    assert not found.is_removed("rope")
    path.write_text(NORM.replace("0.03", "0.05").replace("sums", "more sums"))
    more = load(path, "0.2.0", base)
    assert more.amount("norm", "device_seconds") == pytest.approx(1.05 / 1.03 - 1)
    path.write_text(NORM.replace("0.03", "0.01"))
    assert load(path, "0.2.0", base).amount("norm", "device_seconds") == 0
    path.unlink()
    assert load(path, "0.2.0", base).amount("norm", "device_seconds") == 0
    assert load(base, "0.2.0", path).amount("norm", "device_seconds") == pytest.approx(0.03)


def test_what_only_one_device_has_is_no_error_on_the_other(path: Path) -> None:
    here = NORM.replace("norm", "norm-bf16") + 'device = "gpu"\n'
    there = NORM.replace("norm", "norm-fp32").replace("0.03", "0.05") + 'device = "cpu"\n'
    path.write_text(here + there)
    for device, name, amount in (("gpu", "norm-bf16", 0.03), ("cpu", "norm-fp32", 0.05)):
        found = accepted.load(path, "0.2.0", device=device)
        found.check([name])
        assert found.amount(name, "device_seconds") == pytest.approx(amount)
        assert len(found.entries) == 1
    with pytest.raises(
        ValueError, match=r"accepted 2 \('norm-fp32'\): .* name the device that has it"
    ):
        accepted.load(path, "0.2.0", device="cpu").check(["norm-bf16"])
    path.write_text(NORM + 'device = "gpu"\n' + NORM + 'device = "cpu"\n')
    assert len(accepted.load(path, "0.2.0", device="cpu").entries) == 1


def test_of_counts_a_whole_number_is_how_many_more(path: Path) -> None:
    path.write_text(NORM.replace("0.03", "3") + 'metric = "copies"\n')
    base = path.with_name("base.toml")
    assert load(path, "0.2.0").more("norm", "copies") == 3
    base.write_text(NORM.replace("0.03", "2") + 'metric = "copies"\n')
    assert load(path, "0.2.0", base).more("norm", "copies") == 1
    base.write_text(NORM.replace("0.03", "5") + 'metric = "copies"\n')
    assert load(path, "0.2.0", base).more("norm", "copies") == 0


def test_what_is_removed_may_be_unknown_once_the_base_says_so_too(path: Path) -> None:
    path.write_text(GONE)
    found = load(path, "0.2.0")
    assert found.is_removed("rope")
    found.check(["rope"])
    with pytest.raises(ValueError, match="no such benchmark"):
        found.check(["norm"])
    merged = load(path, "0.2.0", path)
    merged.check(["norm"])
    assert not merged.is_removed("rope")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", ": changed is None: use a text"),
        ('changed = "a.py"\ndigest = "1"\n', ": reason is None: use a text"),
        ('changed = "a.py"\nreason = " "\ndigest = "1"\n', ": reason is ' ': use a text"),
        ('changed = "a.py"\nreason = 3\ndigest = "1"\n', ": reason is 3: use a text"),
        ('more = "1"\n', ": unknown key 'more': use changed, digest, reason"),
    ],
)
def test_a_change_of_what_judges_has_three_texts(path: Path, table: str, message: str) -> None:
    right = '[[judge]]\nchanged = "b.py"\ndigest = "2"\nreason = "a clock"\n'
    whole = 'changed = "a.py"\ndigest = "1"\nreason = "faster"\n'
    path.write_text(right + "[[judge]]\n" + whole)
    changes = {Change("b.py", "2"), Change("a.py", "1")}
    assert load(path, "0.2.0").changes == changes
    filled = table if "more" not in table else whole + table
    path.write_text(right + "[[judge]]\n" + filled)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}, judge 2{message}')}$"):
        load(path, "0.2.0")
