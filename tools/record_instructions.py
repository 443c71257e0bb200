"""Record the instructions of every kernel, as this triton compiles them for chips that need not
be there.

    python -m tools.record_instructions

What other versions of triton are recorded with is kept: run it with each that is recorded.
"""

from __future__ import annotations

import argparse
import sys

from correctness_tests.kernels.test_instructions import RECORDED, held
from tinyllama.harness.kernels.instruction_record import Record, load, text_of, together
from tinyllama.harness.kernels.limits import triton_minor
from tinyllama.harness.kernels.resources import CHIPS, lacking


def recorded_anew(before: Record) -> Record:
    """The record with what is found now; chips that this triton lacks keep what they had."""
    minor = triton_minor()
    kept = {k: v for k, v in before.get(minor, {}).items() if k[0] in CHIPS and lacking(k[0])}
    found = {
        key: together(one.run().instructions for one in compilations)
        for key, compilations in held().items()
    }
    return {**before, minor: {**kept, **found}}


def main(argv: list[str] | None = None) -> int:
    summary = "Record the instructions of every kernel under the triton that is installed."
    argparse.ArgumentParser(description=summary).parse_args(argv)
    before = load(RECORDED) if RECORDED.exists() else {}
    after = recorded_anew(before)
    RECORDED.write_text(text_of(after), encoding="utf-8")
    minor = triton_minor()
    print(f"{RECORDED}: {len(after[minor])} kernels under triton {minor}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
