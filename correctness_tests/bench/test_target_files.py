"""Files of targets that cannot be used say what is wrong, where, and what to write instead."""

from collections.abc import Callable
from pathlib import Path

import pytest

from correctness_tests.support.target_files import written
from tinyllama.harness.records.targets import TargetError, load, load_ops

ANY_NAMES = 'use a name, a list of names, or "any"'
NAMES = "use a name, or a list of names"


WHY = {"caveat": '"slow"', "known_misses": "{ H200 = 5 }"}


def refused(read: Callable[[Path], object], path: Path, where: str, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        read(path)
    assert str(caught.value).startswith(where)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speed": "5"}, "target 1: unknown key 'speed': use at_least, at_most, "),
        ({"tier": None}, "target 1: it lacks 'tier': add it"),
        ({"source": None}, "target 1: it lacks 'source': add it"),
        ({"at_least": None}, "give at_least or at_most, and not both"),
        ({"at_most": "6"}, "give at_least or at_most, and not both"),
        ({"at_least": "0"}, "its bound is 0: use a number above 0"),
        ({"at_least": "-1.5"}, "its bound is -1.5: use a number above 0"),
        ({"at_least": "nan"}, "its bound is nan: use a number above 0"),
        ({"at_least": "inf"}, "its bound is inf: use a number above 0"),
        ({"at_least": '"fast"'}, "its bound is 'fast': use a number above 0"),
        ({"metric": '"live_bytes"', "at_least": '"522.3 MB"'}, "or of bytes '522.3 MiB'"),
        ({"metric": '"live_bytes"', "at_least": '"MiB"'}, "or of bytes '522.3 MiB'"),
        ({"at_least": '"522.3 MiB"'}, "its bound is '522.3 MiB': use a number above 0"),
        ({"at_least": "true"}, "its bound is True: use a number above 0"),
        ({"metric": '"fun"'}, "unknown metric 'fun': use speed, samples_per_second, "),
        ({"over": None}, "a speed is a ratio: say over what"),
        ({"workload": "3"}, f"workload is 3: {ANY_NAMES}"),
        ({"workload": "[]"}, f"workload is []: {ANY_NAMES}"),
        ({"precision": "[16, 32]"}, f"precision is [16, 32]: {ANY_NAMES}"),
        ({"precision": '["any", "bf16"]'}, f"precision is ['any', 'bf16']: {ANY_NAMES}"),
        ({"device": "[90]"}, f"device is [90]: {ANY_NAMES}"),
        ({"over": "1"}, "over is 1: use a text"),
        ({"tier": '""'}, "tier is '': use a text"),
        ({"judged_by": '"mean"'}, "judged_by is 'mean': use interval or median"),
        ({"documented": '"no"'}, "documented is 'no': use true or false"),
        ({"known_misses": "1.2"}, "known_misses is 1.2: use a table: device = bound"),
        ({"known_misses": "{}"}, "known_misses is {}: use a table: device = bound"),
        (
            {**WHY, "documented": "true"},
            "a claim of the documents is held as it is: remove the key",
        ),
        ({**WHY, "caveat": None}, "say in caveat why the bar is missed"),
        ({**WHY, "device": '"H100"'}, "the bar is not about H200: use H100"),
        ({**WHY, "known_misses": '{ H200 = "5" }'}, "H200 is '5': use a number above 0"),
        ({**WHY, "known_misses": "{ H200 = -5 }"}, "H200 is -5: use a number above 0"),
        ({**WHY, "known_misses": "{ H200 = true }"}, "H200 is True: use a number above 0"),
        ({**WHY, "known_misses": "{ H200 = 5.5 }"}, "H200 is 5.5, which meets >= 5.5: remove it"),
        ({**WHY, "at_least": None, "at_most": "6"}, "H200 is 5, which meets <= 6: remove it"),
    ],
)
def test_a_target_that_cannot_be_used_says_why(
    tmp_path: Path, changed: dict[str, str | None], message: str
) -> None:
    path = written(tmp_path, changed)
    refused(load, path, f"{path}, target 1: ", message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tier": '"v3"'}, "unknown key 'tier': use at_least, at_most, case, "),
        ({"documented": "true"}, "unknown key 'documented': use at_least, "),
        ({"provider": None}, "it lacks 'provider': add it"),
        ({"passes": None}, "it lacks 'passes': add it"),
        ({"over": None}, "a speed is a ratio: say over what"),
        ({"metric": '"mfu"'}, "unknown metric 'mfu': use speed, bandwidth_share, peak_bytes"),
        ({"case": "[]"}, f"case is []: {ANY_NAMES}"),
        ({"op": '["rope", "any"]'}, f"op is ['rope', 'any']: {ANY_NAMES}"),
        ({"dtype": "16"}, f"dtype is 16: {ANY_NAMES}"),
        ({"provider": '["triton"]'}, "provider is ['triton']: use a text"),
        ({"over": '"any"'}, f"over is 'any': {NAMES}"),
        ({"over": '["torch", "any"]'}, f"over is ['torch', 'any']: {NAMES}"),
        ({"over": "[]"}, f"over is []: {NAMES}"),
        ({"at_most": "2"}, "give at_least or at_most, and not both"),
    ],
)
def test_a_target_of_ops_that_cannot_be_used_says_why(
    tmp_path: Path, changed: dict[str, str | None], message: str
) -> None:
    path = written(tmp_path, changed, key="op")
    refused(load_ops, path, f"{path}, op 1: ", message)


NOTHING_ELSE = "use [[target]] and [[op]] tables and nothing else"


@pytest.mark.parametrize("read", [load, load_ops])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[target]\n", ""),
        ("", NOTHING_ELSE),
        ("title = 'mine'\n[[target]]\n", NOTHING_ELSE),
        ("target = 3\n", NOTHING_ELSE),
        ("[target]\ntier = 'v1'\n", NOTHING_ELSE),
        ("[op]\nprovider = 'triton'\n", NOTHING_ELSE),
        ("target = ['v1']\n", NOTHING_ELSE),
    ],
)
def test_a_file_that_is_none_of_targets_says_so(
    tmp_path: Path, text: str, message: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(text)
    refused(read, path, f"{path}: ", message)


def test_a_missing_file_and_a_repeated_target_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"none\.toml: .*No such file"):
        load(tmp_path / "none.toml")
    path = written(tmp_path, {}, {"device": '"H200"'}, {})
    with pytest.raises(TargetError, match=r"target 3: v3 speed over v1 >= 5.5 is there twice"):
        load(path)
    path = written(tmp_path, {}, {"dtype": '"fp32"'}, {}, key="op")
    with pytest.raises(TargetError, match=r"op 3: triton speed over torch >= 1 is there twice"):
        load_ops(path)


def test_steps_and_ops_stand_in_one_file_and_are_read_apart(tmp_path: Path) -> None:
    steps = written(tmp_path, {}).read_text()
    path = written(tmp_path, {}, {"op": '"qkv"'}, key="op")
    path.write_text(f"{path.read_text()}\n{steps}")
    assert [target.tier for target in load(path)] == ["v3"]
    assert [target.op for target in load_ops(path)] == [("rope",), ("qkv",)]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1 MiB", 1048576.0), ("522.5 MiB", 547880960.0), ("3 MiB", 3145728.0)],
)
@pytest.mark.parametrize("way", ["at_least", "at_most"])
def test_a_bound_in_mebibytes_is_read_as_bytes(
    tmp_path: Path, way: str, text: str, number: float
) -> None:
    keys = {"metric": '"peak_bytes"', "over": None, "at_least": None, way: f'"{text}"'}
    found = [*load(written(tmp_path, keys)), *load_ops(written(tmp_path, keys, key="op"))]
    assert [getattr(target, way) for target in found] == [number, number]


def test_keys_of_several_names_are_read_as_tuples(tmp_path: Path) -> None:
    keys = {name: '["a", "b"]' for name in ("op", "case", "dtype", "device", "over")}
    [target] = load_ops(written(tmp_path, keys, key="op"))
    assert {name: getattr(target, name) for name in keys} == dict.fromkeys(keys, ("a", "b"))
    keys = {name: '"a"' for name in ("workload", "precision", "device")}
    [step] = load(written(tmp_path, keys))
    assert {name: getattr(step, name) for name in keys} == dict.fromkeys(keys, ("a",))
