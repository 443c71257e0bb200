"""A page says and draws what is recorded of SYNTHETIC records, to the last digit.

What is right in a page other tests say; here nothing changes unseen. A wanted change is recorded
by ``python -m correctness_tests.support.told_page``, and read in the difference of page.txt.
"""

import difflib
import importlib.util

import pytest

from tinyllama.harness.page import NEEDS

if not all(map(importlib.util.find_spec, NEEDS)):
    pytest.skip("needs the extra 'report'", allow_module_level=True)

from correctness_tests.support.told_page import FILE, told


def test_a_page_is_as_recorded() -> None:
    recorded = FILE.read_text(encoding="utf-8").splitlines()
    assert list(difflib.unified_diff(recorded, told().splitlines(), "recorded", "now", n=0)) == []
