"""What is timed here: groups of a workload and a precision, for the device at hand."""

import os
from dataclasses import dataclass

import torch

from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import WORKLOADS, Workload

PRECISIONS = ("fp32", "tf32", "bf16")
ON_GPU, ON_CPU = ("small", "medium"), ("tiny",)
LARGE = "large-bf16"  # in the precision in which models of its size are trained

# Of the workloads whose contenders do not all fit on one GPU at once: those that are compared.
# The scores of materialised attention alone would not fit.
TOGETHER: dict[str, tuple[str, ...]] = {"large": ("v4", "hf-compile", "floor")}
_SHORT = "-short"
# On a GPU, of groups of steps, and of ops: fewer contenders and cases of the same groups, timed for
# less time.
SHORT_STEPS = tuple(name + _SHORT for name in ("small-bf16", "medium-bf16"))
SHORT_OPS = ("ops-bf16" + _SHORT,)
PROCESSORS = 4  # for each contender that is being made: compilers start processes
SHORT_PROCESSORS = 2  # in a short run: its contenders are few, and one GPU holds them all


@dataclass(frozen=True)
class Group:
    """A workload in a precision: what is compared is compared within one group."""

    workload: str
    precision: str

    def __str__(self) -> str:
        return f"{self.workload}-{self.precision}"

    @staticmethod
    def parse(name: str) -> "Group":
        return Group(*name.rsplit("-", 1))

    @property
    def shape(self) -> Workload:
        return WORKLOADS[self.workload]


def full_group(name: str) -> str:
    """The group of which one of the short set is a part."""
    return name.removesuffix(_SHORT)


ALL = [*(Group(w, p) for w in (*ON_CPU, *ON_GPU) for p in PRECISIONS), Group.parse(LARGE)]


def not_beside(contender: str, group: str) -> str | None:
    """Why a contender is left out of a group by name; None when it is not."""
    workload = group.partition("-")[0]
    if contender in TOGETHER.get(workload, (contender,)):
        return None
    together = ", ".join(TOGETHER[workload])
    return f"one GPU does not hold every contender of {workload}: {together} are compared"


def at_once(group: Group, short: bool = False) -> int:
    """How many contenders of a group are made at the same time: as many as the processors allow;
    one if they do not all fit on the GPU, since a warm-up takes more memory than remains in use."""
    if group.workload in TOGETHER:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // (SHORT_PROCESSORS if short else PROCESSORS))


def not_here(group: Group, device: torch.device) -> str | None:
    """Why a group is not timed on a device; None when it is."""
    if device.type == "cpu" and group.workload not in ON_CPU:
        return f"the workload {group.workload} is timed on a GPU; a CPU is timed on tiny"
    if device.type != "cpu" and group.workload in ON_CPU:
        return f"the workload {group.workload} is for machines without a GPU"
    reason = cannot(group.precision, device)
    return reason and f"{group.precision}: {reason}"
