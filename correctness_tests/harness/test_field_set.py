"""Kernels of other projects under every check: each known fault is found, and nothing else.

Releases are installed from the package index, into the cache of `field.run`. docs/FIELD.md shows
what was found.
"""

import subprocess

import pytest

pytest.importorskip("triton")

from field import run as field

DECLARED = field.declared()
FIRST_VERDICT = 60.0  # seconds, on a CPU
slow = pytest.mark.slow("every check on kernels of other projects, which pip installs")


def found(library: str, op: str, release: str) -> field.Faults:
    try:
        folder = field.installed(library, release, field.CACHE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{library} {release} cannot be installed: pip ended with {error.returncode}")
    seen = field.findings(library, op, folder)
    assert 0 < seen.first < FIRST_VERDICT
    return seen.faults


@slow
@pytest.mark.parametrize("case", DECLARED.cases, ids=lambda one: f"{one.library}-{one.op}")
def test_a_known_bug_is_found_and_nothing_unknown_in_other_releases(case: field.Case) -> None:
    newest = DECLARED.newest[case.library]
    releases = filter(None, dict.fromkeys([case.buggy, case.fixed, newest]))
    seen = {release: found(case.library, case.op, release) for release in releases}
    assert field.verdicts(case, seen, DECLARED.known, newest) == []


@slow
@pytest.mark.parametrize("kernel", DECLARED.kernels, ids=lambda one: f"{one.library}-{one.op}")
def test_another_kernel_has_its_known_faults_alone(kernel: field.Kernel) -> None:
    seen = found(kernel.library, kernel.op, kernel.release)
    assert field.differences(kernel, seen) == []
