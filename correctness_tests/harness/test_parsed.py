"""What others may have written as JSON or TOML is read, or is a ValueError."""

import pytest

from tinyllama.harness.machine.parsed import json_of, toml_of

DEEP = "[" * 100_000


def test_what_is_right_is_read() -> None:
    assert json_of('{"a": [1]}') == json_of(b'{"a": [1]}') == toml_of("a = [1]") == {"a": [1]}


@pytest.mark.parametrize(
    "text", ["", "{", DEEP, '{"a":' * 100_000, "9" * 5000, b"\xff", b"\0" * 9], ids=range(7)
)
def test_what_is_no_json_is_a_wrong_value(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        json_of(text)


@pytest.mark.parametrize("text", ["a", f"a = {DEEP}", f"a = {'9' * 5000}"], ids=range(3))
def test_what_is_no_toml_is_a_wrong_value(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        toml_of(text)
