"""Files as Nsight Compute writes them with --csv, and a program that stands for it. All synthetic,
in the form that they had on an H200."""

import sys
from pathlib import Path

from correctness_tests.support.rocm_files import LAUNCHES

HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
NOTICES = ("==PROF== Connected to process 7", "what the program prints", "==PROF== Disconnected")
PROGRAM = """
import argparse, sys
from pathlib import Path
from correctness_tests.support import nsight_files

parser = argparse.ArgumentParser(prog="ncu", allow_abbrev=False)
parser.add_argument("--csv", action="store_true", required=True)
parser.add_argument("--print-units", choices=["auto", "base"], default="auto")
parser.add_argument("--metrics", required=True)
parser.add_argument("--target-processes", choices=["all", "application-only"], default="all")
parser.add_argument("--log-file", required=True)
parser.add_argument("program", nargs=argparse.REMAINDER)
args = parser.parse_args()
assert args.program and not args.program[0].startswith("-")
nsight_files.counters(Path(args.log_file), args.metrics.split(","), base=args.print_units == "base")
"""


def counters(path: Path, metrics: list[str], *, base: bool = True) -> Path:
    """The launches of `LAUNCHES`: each moves 4 KiB, and half of its warps are active, and in the
    last launch all. Without ``base`` bytes and times have units of their size."""
    rows = []
    for number, (kernel, start, end) in enumerate(LAUNCHES):
        known = {
            "gpu__time_duration.sum": ("nsecond", f"{end - start:,}"),
            "dram__bytes.sum": ("byte", "4,096") if base else ("Kbyte", "4.10"),
            WARPS: ("%", "100" if number == len(LAUNCHES) - 1 else "50"),
        }
        for metric in metrics:
            unit, value = known[metric]
            rows.append(f'"{number}","7","{kernel}","{metric}","{unit}","{value}"')
    path.write_text("\n".join([*NOTICES[:2], HEAD, *rows, NOTICES[2]]) + "\n")
    return path


def install(folder: Path) -> Path:
    """A folder with a program named ncu."""
    folder.mkdir(parents=True)
    root = Path(__file__).resolve().parents[2]
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n{PROGRAM}"
    )
    program.chmod(0o755)
    return folder
