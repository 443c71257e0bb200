"""When the last entry of a long axis is looked at by the programs at the ends of a launch alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from tinyllama.harness.correct.checks import last_entries, sizes
from tinyllama.harness.correct.checks.finding import Finding, Outcome
from tinyllama.harness.kernels.programs import GridError

TRIED, LONGEST = 4096, sizes.SIZES[-1]
RIGHT = f", but the last entry of {LONGEST:,} is right"
SEEN = (TRIED // 4, TRIED, LONGEST)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks for the last entry of an axis of 4,096. By size: what is ``wrong``, how many programs
    there are at ``most``, ``seconds``, ``elements``, what is ``raised``. refused: a size; the rest
    are the candidate's traits. Returns the finding, and the sizes that were run."""

    def ask(
        *,
        wrong: dict[int, list[str]] | None = None,
        most: dict[int, int] | None = None,
        seconds: dict[int, float] | None = None,
        elements: dict[int, int] | None = None,
        raised: dict[int, Exception] | None = None,
        refused: int = 0,
        interpreted: bool = True,
        mutated: tuple[str, ...] = (),
    ) -> tuple[Finding | str, list[int]]:
        run: list[int] = []
        clock = [0.0]

        class Resized(int):
            case = property(lambda self: int(self))

        def differ(candidate: Any, case: Any, axis: str) -> tuple[list[str], int]:
            assert axis == "N"
            size = int(case)
            run.append(size)
            if size in (raised or {}):
                raise (raised or {})[size]
            clock[0] += (seconds or {}).get(size, 1.0)
            return (wrong or {}).get(size, []), (most or {}).get(size, size)

        def resized(candidate: Any, base: Any, axis: str, size: int) -> Any:
            return None if size == refused else Resized(size)

        monkeypatch.setattr(last_entries, "resized", resized)
        monkeypatch.setattr(last_entries, "_ends_differ", differ)
        monkeypatch.setattr(
            last_entries, "elements", lambda op, case: (elements or {}).get(case, 1)
        )
        monkeypatch.setattr(last_entries, "time", SimpleNamespace(thread_time=lambda: clock[0]))
        candidate: Any = SimpleNamespace(
            interpreted=interpreted, op=SimpleNamespace(mutated=mutated)
        )
        base: Any = None
        return last_entries.last_entry(candidate, base, "N", TRIED, LONGEST), run

    return ask


def test_a_quarter_the_size_that_was_tried_and_the_longest_are_run(asked: Any) -> None:
    assert asked() == (RIGHT, [*SEEN])


@pytest.mark.parametrize("trait", [{"interpreted": False}, {"mutated": ("x",)}])
def test_what_is_compiled_or_updated_in_place_is_not_asked_for(asked: Any, trait: Any) -> None:
    assert asked(**trait) == ("", [])


@pytest.mark.parametrize("place", range(3))
def test_at_a_size_that_is_refused_or_too_large_nothing_is_said(asked: Any, place: int) -> None:
    before = [*SEEN[:place]]
    assert asked(refused=SEEN[place]) == ("", before)
    limit = 8 * last_entries.MOST_ELEMENTS
    assert asked(elements={SEEN[place]: limit + 1}) == ("", before)
    assert asked(elements={SEEN[place]: limit}) == (RIGHT, [*SEEN])


@pytest.mark.parametrize("place", range(3))
def test_a_grid_that_is_too_long_is_a_fault_and_another_error_is_none(
    asked: Any, place: int
) -> None:
    found, run = asked(raised={SEEN[place]: GridError("too long")})
    assert (found.check, found.outcome, found.message) == ("sizes", Outcome.FAILED, "too long")
    assert (found.case, run) == (str(SEEN[place]), [*SEEN[: place + 1]])
    assert asked(raised={SEEN[place]: ValueError()}) == ("", [*SEEN[: place + 1]])


def test_only_the_longest_may_be_wrong(asked: Any) -> None:
    for place in range(2):
        assert asked(wrong={SEEN[place]: ["y"]}) == ("", [*SEEN[: place + 1]])
    found, _ = asked(wrong={LONGEST: ["y", "grad x"]})
    text = "the last entry along N of y, grad x is wrong or never written"
    assert (found.outcome, found.case) == (Outcome.FAILED, str(LONGEST))
    assert found.message == text


@pytest.mark.parametrize("place", range(3))
def test_no_program_may_have_more_than_its_share(asked: Any, place: int) -> None:
    """By programs, and by seconds, which may double and differ by some noise."""
    size = SEEN[place]
    enough = -(-size // last_entries.ENDS)
    assert asked(most={size: enough}) == (RIGHT, [*SEEN])
    stopped = (RIGHT, [*SEEN]) if place == 2 else ("", [*SEEN[: place + 1]])
    assert asked(most={size: enough - 1}) == stopped
    if place:
        limit = 2 + last_entries.NOISE
        assert asked(seconds={size: limit - 0.01}) == (RIGHT, [*SEEN])
        assert asked(seconds={size: limit + 0.01}) == stopped
