"""Which checks run on the tree's own Triton providers, in which lane, and why one does not.

`correctness_tests/ops/test_checks.py` runs them, and holds each reason to what the check says.
"""

import torch

from tinyllama.harness import Op, Provider
from tinyllama.harness.check import accuracy
from tinyllama.harness.check.launched import launches_of, with_kernels
from tinyllama.harness.check.run import CHECKS
from tinyllama.harness.machine.device import cannot
from tinyllama.ops import OPS

QUICK = "one case of several blocks"
LANES = {  # check -> what of it `make test` has, what the slow lane adds
    **{name: ("the derived cases", "every combination of them") for name in accuracy.NAMES},
    "out of bounds": (
        f"{QUICK}; every case by `make test-all`",
        "every configuration of each kernel",
    ),
    "determinism": (QUICK, "every case, every configuration of each kernel"),
    "autocast": (QUICK, "nothing more: rows that are zero have no bound under autocast"),
    "empty batch": (QUICK, "nothing more: it has no rows to differ in"),
    "sizes": ("nothing", "each axis of the first case"),
    "configurations": ("nothing", "the checks above, in each of them"),
    "large offsets": ("the smallest case that fits, in bf16", "nothing more: only offsets grow"),
    "resources": ("the largest case for each chip", "every case for each chip"),
    "compiled": (f"{QUICK}, by `aot_eager`", "every case, by `inductor`"),
}
# Those that `make test` has as tests of their own, in these files.
ELSEWHERE = {
    **dict.fromkeys(accuracy.NAMES, "ops/test_ops.py"),
    "resources": "kernels/test_compiled.py",
    "sizes": "ops/test_checks.py",
    "configurations": "ops/test_checks.py",
}
HERE = [name for name in CHECKS if name not in ELSEWHERE]
IN_PLACE = {
    "autocast": "it works in place, which autocast leaves alone",
    "compiled": "it works in place, and no compiled step contains it",
    "empty batch": "it has no batch",
    "large offsets": "it works in place",
}
INTERPRETED = ("races", "program order", "large offsets")
OF_GRADIENTS = ("scaled upstream", "backward twice", "second derivative")


def tree() -> list[tuple[Op, Provider]]:
    """The providers of the tree that launch Triton's kernels."""
    return list(with_kernels(op for op in OPS.values() if op.module.startswith("tinyllama.ops.")))


def gap(op: Op, provider: Provider, check: str, device: torch.device) -> str | None:
    """Why a check has nothing to try on a provider; None where it is tried."""
    if check in INTERPRETED and device.type != "cpu":
        return "it is seen where kernels of Triton's are interpreted"
    if check == "program order" and not launches_of(op, provider, op.cases[0], torch.float32):
        return "it launches no kernel"
    if op.mutated and check in IN_PLACE:
        return IN_PLACE[check]
    if not op.differentiable and check in OF_GRADIENTS:
        return "it has no gradients"
    if check in ("captured", "side stream"):
        reason = cannot("capture" if check == "captured" else "gpu", device)
        if reason is not None:
            return reason
        if op.mutated:
            return "it works in place: a captured training step covers it"
        if check == "captured" and provider.waits:
            return "it reads a value back from the device"
    if check == "compiled" and provider.derived is None and device.type == "cpu":
        return "the compiler traces a kernel's launch, which here is interpreted"
    if check == "backward twice" and provider.overwrites:
        return f"its backward overwrites {', '.join(provider.overwrites)}"
    if check == "determinism" and device.type not in provider.deterministic:
        return f"declared not to be deterministic on {device.type}"
    return None
