"""Record the instructions of every kernel, as this triton compiles them for chips that need not
be there.

    python -m tools.record_instructions [--op NAME]

Each op's record is written in its folder. What other versions of triton are recorded with is kept:
run it with each that is recorded. A kernel that passes a limit of its chip is recorded without what
it was made of, so that the tests compile it.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace

from tinyllama.harness.correct.launched import held_kernels, plan
from tinyllama.harness.kernels import limits
from tinyllama.harness.kernels.instruction_record import (
    FILE,
    Key,
    Record,
    load,
    made_of,
    text_of,
    together,
)
from tinyllama.harness.kernels.instructions import Instructions
from tinyllama.harness.kernels.resources import CHIPS, lacking
from tinyllama.ops import OPS


def updated(before: Record, found: Mapping[Key, Instructions]) -> Record:
    """The record with what is found now; chips that this triton lacks keep what they had."""
    minor = limits.triton_minor()
    kept = {k: v for k, v in before.get(minor, {}).items() if k[0] in CHIPS and lacking(k[0])}
    return {**before, minor: {**kept, **found}}


def main(argv: list[str] | None = None) -> int:
    summary = "Record the instructions of every kernel under the triton that is installed."
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--op", choices=list(OPS), action="append", help="only this op; repeatable")
    asked = parser.parse_args(argv).op or list(OPS)
    found: dict[str, dict[Key, Instructions]] = {}
    for key, compilations in held_kernels(plan(OPS.values(), only_quick=True).values()).items():
        op = key[1].partition(".")[0]
        if op in asked:
            instructions = together(one.run().instructions for one in compilations)
            known = limits.of_op(op, OPS[op].folder).of(limits.triton_minor())
            if not any(limits.verdict(one, known)[0] for one in compilations):
                instructions = replace(instructions, made_of=made_of(compilations, known))
            found.setdefault(op, {})[key] = instructions
    for op, kernels in found.items():
        folder = OPS[op].folder
        if folder is None:
            print(f"{op}: not recorded, it is one file: make it a folder, {op}/__init__.py")
            continue
        path = folder / FILE
        before = load(path, op) if path.exists() else {}
        path.write_text(text_of(updated(before, kernels), op), encoding="utf-8")
        print(f"{path}: {len(kernels)} kernels under triton {limits.triton_minor()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
