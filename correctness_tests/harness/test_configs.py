"""Configurations: the chip's table, the default, what is forced, and tables that are wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama import ops
from tinyllama.harness.kernels.configs import SPACES, Config, Space, recorded_keys
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.kernels.resources import CHIPS

DEFAULT = Config(num_warps=4, ROWS=1)
TUNED = Config(num_warps=8, num_stages=3, ROWS=4)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Space]:
    """A space whose tables are in an empty folder."""
    made = Space("toy", default=lambda D, dtype: DEFAULT, configs=lambda D, dtype: [DEFAULT])
    assert made.tables == Path(__file__).parent / "tuned", "beside the file that declares it"
    made.tables = tmp_path
    yield made
    del SPACES["toy"]


def spaces(key: str = "D=512,dtype=bf16", **entry: Any) -> dict[str, Any]:
    return {"spaces": {"toy": {key: {**TUNED.kwargs(), **entry}}}}


def write(space: Space, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (space.tables / "gfx942.json").write_text(text, encoding="utf-8")


def chosen(space: Space, chip: str = "gfx942", D: int = 512, dtype: str = "bf16") -> Config:
    with recorded(chip):
        return space.choose(torch.device("cpu"), dtype=dtype, D=D)


def test_the_chips_table_decides_for_its_keys_only(space: Space) -> None:
    write(space, {"chip": "gfx942", **spaces()})
    with recorded_keys() as keys:
        assert chosen(space) == TUNED
        assert chosen(space, D=256) == DEFAULT
    assert keys == {("toy", f"D={d},dtype=bf16"): {"D": d, "dtype": "bf16"} for d in (512, 256)}
    assert chosen(space, dtype="fp32") == DEFAULT
    assert chosen(space, chip="sm_90") == chosen(space, chip="") == DEFAULT
    assert TUNED.kwargs() == {"ROWS": 4, "num_warps": 8, "num_stages": 3}


WRONG: dict[str, Any] = {
    "no JSON": "{",
    "no spaces": {"spaces": []},
    "another chip": {"chip": "sm_90", "spaces": {}},
    "a text": spaces(ROWS="4"),
    "warps": spaces(num_warps=6),
    "stages": spaces(num_stages=0),
    "another constant": spaces(COLUMNS=4),
    "a part of the key is missing": spaces(key="D=512"),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_malformed_table_is_refused_with_its_file(content: Any, space: Space) -> None:
    write(space, content)
    with pytest.raises(ValueError, match=r"gfx942\.json"):
        chosen(space)
    assert chosen(space, chip="sm_90") == DEFAULT


def test_tables_of_the_tree_hold_declared_choices_of_chips_that_are_described() -> None:
    def value(word: str) -> Any:
        return {"True": True, "False": False}.get(word, int(word) if word.isdigit() else word)

    tables = sorted(Path(ops.__file__).parent.glob("*/tuned/*.json"))
    assert tables
    for path in tables:
        assert path.stem in CHIPS
        for name, entries in json.loads(path.read_text(encoding="utf-8"))["spaces"].items():
            assert SPACES[name].tables == path.parent, f"{path}: {name} is another op's"
            for text, entry in entries.items():
                pairs = (part.split("=") for part in text.split(",") if part)
                key = {name: value(word) for name, word in pairs}
                allowed = [SPACES[name].default(**key), *SPACES[name].configs(**key)]
                assert Config(**entry) in allowed, f"{path.name}: {name} {text} is not declared"
