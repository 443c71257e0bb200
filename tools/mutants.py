"""Mutants of the Triton kernels: does a check fail when a kernel is changed in one place?

    python -m tools.mutants [--only rope,silu_mul] [--sample 10] [--jobs 2]

Each function under ``jit`` in the file or folder of an op is changed in one place at a time: an
operator, a comparison, a number, or a mask. A sample of each function's mutants is written
to a copy of the package, one at a time, and `tinyllama check` runs `CHECKS` there on the Triton
providers of the op. A mutant is killed by a wrong or unsafe result; one that only raises an error,
or does not end, is counted apart, since it shows that the code runs and not that it is checked.

Prints a line for each mutant that survives, and the rates. Exit status: 1 if the rate of killed
mutants among those that ran to an end is under `LEAST`, else 0.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import whole_within
from tinyllama.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
CHECKS = "outputs,gradients,unwritten memory,untouched inputs,input layouts,out of bounds,races"
SECONDS = 240  # for a mutant
LEAST = 0.9
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """A file of an op, with one change. line: the changed one; text: of the whole file."""

    op: str
    file: Path
    function: str
    line: int
    change: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} {self.function}: {self.change}"


def mutants_of(op: str, file: Path) -> Iterator[Mutant]:
    """Every mutant of every function under ``jit`` in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or not any(
            "jit" in ast.unparse(decorator) for decorator in function.decorator_list
        ):
            continue
        for node in ast.walk(function):
            for field, new in changes(node):
                assert isinstance(node, ast.expr)
                before, old = ast.unparse(node), getattr(node, field)
                setattr(node, field, new)
                change, text = f"{before} -> {ast.unparse(node)}", ast.unparse(tree)
                setattr(node, field, old)
                yield Mutant(op, file, function.name, node.lineno, change, text)


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Fields of a node and what they become: another operator, comparison or number, or a call
    without its mask."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "op", SWAPPED[type(node.op)]()
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "value", node.value + 1  # type: ignore[operator]
    if isinstance(node, ast.Call) and any(word.arg == "mask" for word in node.keywords):
        yield "keywords", [word for word in node.keywords if word.arg not in ("mask", "other")]


def outcome(mutant: Mutant) -> str:
    """``killed``, ``raised``, ``survived`` or ``did not end``."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tinyllama", Path(folder) / "tinyllama")
        (Path(folder) / mutant.file.relative_to(ROOT)).write_text(mutant.text, encoding="utf-8")
        out = Path(folder) / "findings.json"
        words = ["check", "--op", mutant.op, "--device", "cpu", "--only", CHECKS]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(
                [sys.executable, "-m", "tinyllama", *words, "--json", str(out)],
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "did not end"
        if not out.is_file():
            return "raised"
        data = json.loads(out.read_text(encoding="utf-8"))
    findings = [check for name, checks in data.items() if "triton" in name for check in checks]
    outcomes = {
        check["outcome"] for check in findings if check["rank"] in ("wrong result", "unsafe")
    }
    return "killed" if "failed" in outcomes else "raised" if outcomes else "survived"


def sampled(op: str, sample: int) -> Iterator[Mutant]:
    """At most so many mutants of each function of an op, the same ones each time."""
    folder = OPS[op].folder
    files = sorted(folder.glob("*.py")) if folder else [ROOT / f"tinyllama/ops/{op}.py"]
    for file in files:
        by_function: dict[str, list[Mutant]] = {}
        for mutant in mutants_of(op, file):
            by_function.setdefault(mutant.function, []).append(mutant)
        for name, mutants in by_function.items():
            draw = random.Random(f"{file.name} {name}")
            yield from draw.sample(mutants, min(sample, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="these ops: rope,silu_mul")
    count = whole_within(1, 10_000)
    parser.add_argument("--sample", type=count, default=10, help="mutants of each function (10)")
    parser.add_argument("--jobs", type=count, default=2)
    args = parser.parse_args()
    ops = args.only.split(",") if args.only else list(OPS)
    if unknown := set(ops) - set(OPS):
        parser.error(f"no op {', '.join(sorted(unknown))}: use {', '.join(OPS)}")
    mutants = [mutant for op in ops for mutant in sampled(op, args.sample)]
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, result in zip(mutants, pool.map(outcome, mutants), strict=True):
            outcomes[result] += 1
            if result == "survived":
                print(f"survived: {mutant}", flush=True)
    judged = outcomes["killed"] + outcomes["survived"]
    rate = outcomes["killed"] / judged if judged else 0.0
    print(f"{dict(outcomes)}: {rate:.1%} of {judged} that ran to an end are killed")
    return int(rate < LEAST)


if __name__ == "__main__":
    sys.exit(main())
