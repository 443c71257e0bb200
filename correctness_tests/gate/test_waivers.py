"""accepted_slowdowns.toml: what is accepted, for how long, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from tinyllama.harness.gate.waivers import Waivers, load

NAME = "rms_norm-triton-N8/forward"
ENTRY = f'[[accepted]]\nbenchmark = "{NAME}"\nreason = "r"\nrelease = "0.3.0"\n'


def waivers(folder: Path, text: str, base: str = "", device: str = "gpu") -> Waivers:
    (folder / "here.toml").write_text(text)
    (folder / "base.toml").write_text(base)
    return load(folder / "here.toml", "0.2.0", folder / "base.toml", device=device)


def test_a_slowdown_is_accepted_of_its_metric_alone(tmp_path: Path) -> None:
    accepted = waivers(tmp_path, f"{ENTRY}amount = 0.03\n")
    assert accepted.amount(NAME, "device_seconds") == pytest.approx(0.03)
    assert accepted.amount(NAME, "host_seconds") == accepted.amount("other", "device_seconds") == 0


def test_a_slowdown_that_the_base_accepts_is_not_accepted_again(tmp_path: Path) -> None:
    text = f"{ENTRY}amount = 0.03\n"
    assert waivers(tmp_path, text, base=text).amount(NAME, "device_seconds") == 0
    removed = f"{ENTRY}removed = true\n"
    assert waivers(tmp_path, removed).is_removed(NAME)
    assert not waivers(tmp_path, removed, base=removed).is_removed(NAME)


def test_an_entry_of_one_device_is_not_of_the_other(tmp_path: Path) -> None:
    text = f'{ENTRY}amount = 0.03\ndevice = "gpu"\n'
    assert waivers(tmp_path, text, device="gpu").entries
    assert not waivers(tmp_path, text, device="cpu").entries


@pytest.mark.parametrize("version", ["0.3.0", "0.3", "0.4.0", "1"])
def test_an_entry_is_an_error_from_its_release_on(tmp_path: Path, version: str) -> None:
    (tmp_path / "here.toml").write_text(f"{ENTRY}amount = 0.03\n")
    assert load(tmp_path / "here.toml", "0.3.0.dev1", device="cpu").entries
    with pytest.raises(ValueError, match=r"here\.toml.*accepted until 0\.3\.0"):
        load(tmp_path / "here.toml", version, device="cpu")
    with pytest.raises(ValueError, match="version"):
        load(tmp_path / "here.toml", "", device="cpu")


def test_an_unknown_benchmark_is_an_error_where_all_are_compared(tmp_path: Path) -> None:
    accepted = waivers(tmp_path, f"{ENTRY}amount = 0.03\n")
    accepted.check([NAME])
    with pytest.raises(ValueError, match="no such benchmark"):
        accepted.check(["other"])
    replace(accepted, partial=True).check(["other"])


@pytest.mark.parametrize(
    "text",
    [
        ENTRY,
        f"{ENTRY}amount = 0.03\nremoved = true\n",
        f"{ENTRY}amount = 1.5\n",
        f"{ENTRY}amount = 0\n",
        f"{ENTRY}amount = nan\n",
        f"{ENTRY}amount = true\n",
        f'{ENTRY}amount = 0.1\nmetric = "speed"\n',
        f'{ENTRY}amount = 0.5\nmetric = "copies"\n',
        f'{ENTRY}amount = 0.1\ndevice = "tpu"\n',
        f"{ENTRY}amount = 0.1\nmore = 1\n",
        ENTRY.replace('"r"', '" "') + "amount = 0.1\n",
        ENTRY.replace("0.3.0", "next") + "amount = 0.1\n",
        ENTRY.replace('reason = "r"\n', "") + "amount = 0.1\n",
        f"{ENTRY}amount = 0.1\n{ENTRY}amount = 0.2\n",
        "[[others]]\n",
        "accepted = 3\n",
        "no toml",
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"here\.toml"):
        waivers(tmp_path, text)
