"""Configurations: the chip's table, the default, what is forced, and tables that are wrong."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama import ops
from tinyllama.harness.kernels.configs import SPACES, Config, Space, asked, key_text
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.kernels.resources import CHIPS
from tinyllama.ops import OPS

CPU = torch.device("cpu")
DEFAULT = Config(num_warps=4, ROWS=1)
TUNED = Config(num_warps=8, num_stages=3, ROWS=4)

Write = Callable[[Any], None]


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Space]:
    """A space whose tables are in an empty folder."""
    made = Space(
        "toy",
        default=lambda D, dtype: DEFAULT,
        configs=lambda D, dtype: [
            Config(num_warps=w, ROWS=r) for w in (4, 8) for r in (1, D // 64)
        ],
    )
    made.tables = tmp_path
    yield made
    del SPACES["toy"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the table of gfx942."""

    def table(content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "gfx942.json").write_text(text, encoding="utf-8")

    return table


def spaces(key: str = "D=512,dtype=bf16", **entry: Any) -> dict[str, Any]:
    entry = {"num_warps": 8, "num_stages": 3, "ROWS": 4} | entry
    return {"spaces": {"toy": {key: entry}}}


def chosen(space: Space, chip: str = "gfx942", D: int = 512, dtype: str = "bf16") -> Config:
    with recorded(chip):
        return space.choose(CPU, D=D, dtype=dtype)


# -- choices ----------------------------------------------------------------------------------


def test_a_configuration_is_what_a_launch_takes() -> None:
    config = Config(num_warps=8, num_stages=1, ROWS=2, BLOCK=64)
    assert config.kwargs() == {"ROWS": 2, "BLOCK": 64, "num_warps": 8, "num_stages": 1}
    assert config["BLOCK"] == 64
    assert config == Config(BLOCK=64, ROWS=2, num_stages=1, num_warps=8)
    assert hash(config) == hash(Config(BLOCK=64, ROWS=2, num_stages=1, num_warps=8))
    assert config != Config(BLOCK=64, ROWS=2, num_stages=2, num_warps=8)
    assert str(config) == "BLOCK=64, ROWS=2, num_warps=8, num_stages=1"


def test_the_chips_table_decides_for_its_keys_only(space: Space, write: Write) -> None:
    write({"chip": "gfx942", **spaces()})
    assert chosen(space) == TUNED
    assert chosen(space, D=256) == DEFAULT
    assert chosen(space, dtype="fp32") == DEFAULT
    assert chosen(space, chip="sm_90") == DEFAULT
    assert chosen(space, chip="") == DEFAULT
    assert space.choose(CPU, D=512, dtype="bf16") == DEFAULT


def test_the_order_of_a_keys_parts_does_not_matter(space: Space, write: Write) -> None:
    write(spaces())
    assert key_text({"dtype": "bf16", "D": 512}) == "D=512,dtype=bf16"
    with recorded("gfx942"):
        assert space.choose(CPU, dtype="bf16", D=512) == TUNED


def test_a_forced_configuration_holds_for_its_key_and_ends(space: Space, write: Write) -> None:
    write(spaces())
    first, second = Config(ROWS=2), Config(ROWS=8)

    def fails() -> None:
        with space.force(second, D=512, dtype="bf16"):
            assert chosen(space) == second
            raise KeyError

    with space.force(first, D=512, dtype="bf16"):
        assert chosen(space) == chosen(space, chip="sm_90") == first
        assert chosen(space, D=256) == DEFAULT
        with pytest.raises(KeyError):
            fails()
        assert chosen(space) == first
    assert chosen(space) == TUNED


def test_what_is_asked_for_can_be_noted(space: Space) -> None:
    with asked() as pairs:
        chosen(space)
        chosen(space)
        chosen(space, D=64)
    chosen(space, D=128)
    assert pairs == {
        ("toy", "D=512,dtype=bf16"): {"D": 512, "dtype": "bf16"},
        ("toy", "D=64,dtype=bf16"): {"D": 64, "dtype": "bf16"},
    }


def test_two_spaces_of_one_name_are_refused(space: Space) -> None:
    with pytest.raises(ValueError, match=r"'toy' is declared twice: pick another name"):
        Space("toy", default=lambda: DEFAULT, configs=lambda: [DEFAULT])


def test_a_space_may_have_a_single_key(tmp_path: Path) -> None:
    made = Space("toy_single", default=lambda: DEFAULT, configs=lambda: [DEFAULT, TUNED])
    del SPACES["toy_single"]
    made.tables = tmp_path
    table = {"spaces": {"toy_single": {"": TUNED.kwargs()}}}
    (tmp_path / "sm_90.json").write_text(json.dumps(table), encoding="utf-8")
    with recorded("sm_90"):
        assert made.choose(CPU) == TUNED


def test_tables_lie_beside_the_file_that_declares_the_space() -> None:
    made = Space("toy_here", default=lambda: DEFAULT, configs=lambda: [DEFAULT])
    del SPACES["toy_here"]
    assert made.tables == Path(__file__).parent / "tuned"


# -- tables that are wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"gfx942\.json is not JSON"),
        ("[]", r"gfx942\.json: 'spaces' must be a mapping"),
        ({}, r"gfx942\.json: 'spaces' must be a mapping"),
        ({"spaces": []}, r"gfx942\.json: 'spaces' must be a mapping"),
        ({"spaces": {"toy": []}}, r"gfx942\.json: 'toy' must be a mapping"),
        ({"spaces": {"toy": {"D=512": 4}}}, r"gfx942\.json, toy: 'D=512' must be a mapping"),
        ({"chip": "sm_90", "spaces": {}}, r"is of chip 'sm_90': name it sm_90\.json"),
        (spaces(ROWS="4"), r"toy, 'D=512,dtype=bf16': ROWS is '4', not a whole number"),
        (spaces(ROWS=None), r"ROWS is None, not a whole number"),
        (spaces(num_warps=6), r"num_warps is 6, not a power of two"),
        (spaces(num_warps=0), r"num_warps is 0, not a power of two"),
        (spaces(num_warps=4.0), r"num_warps is 4\.0, not a whole number"),
        (spaces(num_stages=0), r"num_stages must be 1 or more"),
        ({"spaces": {"toy": {"D=1": {"num_stages": 1}}}}, r"num_warps is 0, not a power of two"),
        ({"spaces": {"toy": {"D=1": {"num_warps": 1}}}}, r"num_stages must be 1 or more"),
        ({"spaces": {"toy": {"D=1": {"num_warps": -4}}}}, r"num_warps is -4, not a power of two"),
        (spaces(COLUMNS=4), r"toy, 'D=512,dtype=bf16': constants are ROWS, not COLUMNS, ROWS"),
        (spaces(key="D=512"), r"toy, 'D=512': a key has D, dtype"),
        (spaces(key="Width=512,dtype=bf16"), r"'Width=512,dtype=bf16': a key has D, dtype"),
        (
            {"spaces": {"toy": {"D=64,dtype=bf16": {"num_warps": 4, "num_stages": 2}}}},
            r"'D=64,dtype=bf16': constants are ROWS, not none",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if not isinstance(value, str) else "",
)
def test_a_malformed_table_gets_one_message_with_the_file_and_the_fix(
    content: Any, message: str, space: Space, write: Write
) -> None:
    write(content)
    with pytest.raises(ValueError, match=message) as raised:
        chosen(space)
    assert str(raised.value).endswith(
        "json" if "name it" in message else "python -m tinyllama tune"
    )
    assert chosen(space, chip="sm_90") == DEFAULT


# -- what is declared -------------------------------------------------------------------------


def tree_tables() -> list[Path]:
    found = sorted(Path(ops.__file__).parent.glob("*/tuned/*.json"))
    assert found, "no op of the tree has a table"
    return found


def test_tables_of_the_tree_are_of_known_chips() -> None:
    assert {path.stem for path in tree_tables()} <= set(CHIPS)


def test_tables_of_the_tree_hold_declared_choices_only() -> None:
    assert OPS
    for path in tree_tables():
        for name, entries in json.loads(path.read_text(encoding="utf-8"))["spaces"].items():
            assert name in SPACES, f"{path}: no kernel declares the space {name!r}"
            assert SPACES[name].tables == path.parent, f"{path}: {name} is another op's"
            for text, entry in entries.items():
                key = parsed(text)
                allowed = [SPACES[name].default(**key), *SPACES[name].configs(**key)]
                assert Config(**entry) in allowed, f"{path.name}: {name} {text} is not declared"


def parsed(text: str) -> dict[str, Any]:
    """A key from its text: whole numbers, booleans, words."""

    def value(word: str) -> Any:
        if word.lstrip("-").isdigit():
            return int(word)
        return {"True": True, "False": False}.get(word, word)

    pairs = (part.split("=") for part in text.split(",") if part)
    return {name: value(word) for name, word in pairs}
