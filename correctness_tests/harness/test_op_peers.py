"""The peers of single ops: they register, and say what they do not take.

Asked in a process of its own: they are providers of the tree's ops from then on.
"""

import pytest

from correctness_tests.support.commands import python

ASKED = """
import torch
from tinyllama.bench.measure_ops import PACKAGE, PEER_FILES, PEERS, Bench, OpCaseRun
from tinyllama.harness.measure.op_contender import ops_of

ops = ops_of(PACKAGE, PEER_FILES)
for op in ops.values():
    for name in (name for name in PEERS if name in op.providers):
        traits = op[name]
        print("registered", op.name, name, *traits.requires, *traits.overwrites, traits.waits)

attention = ops["attention"]
q, k, v = (torch.randn(2, 40, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
same = torch.equal(attention(q, k, v, provider="flash"), attention(q, k, v, provider="torch"))
print("held", same)
try:
    attention(q, k, v, provider="cudnn")
except ValueError as error:
    print("held", error)

def ask(op, name, case, dtype):
    object.__setattr__(op[name], "requires", ())  # as on a GPU
    run = OpCaseRun(op, case, dtype)
    print("tried", op.timed[case], dtype, Bench(dtype, torch.device("cpu"), [op])._can(run, name))
    print("tried", *run.cannot.values())

for dtype in ("fp32", "bf16"):
    ask(attention, "flash", 0, dtype)
    ask(attention, "cudnn", 0, dtype)
ask(ops["swiglu"], "naive", 1, "bf16")
ask(ops["swiglu"], "naive", 2, "bf16")
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    done = python("-c", ASKED)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        about, _, answer = line.partition(" ")
        found.setdefault(about, []).append(answer)
    return found


def test_every_peer_is_registered_where_it_has_a_kernel(answers: dict[str, list[str]]) -> None:
    liger = "liger gpu module liger_kernel"
    assert answers["registered"] == [
        f"add_rms_norm {liger} False",
        "attention flash gpu False",
        "attention cudnn gpu False",
        f"cross_entropy {liger} True",
        f"linear_cross_entropy {liger} True",
        f"rms_norm {liger} False",
        f"silu_mul {liger} gate up False",
        f"swiglu {liger} False",
    ]


def test_attention_held_to_a_backend_is_that_backend_or_an_error(
    answers: dict[str, list[str]],
) -> None:
    """A CPU has a flash kernel, and no cuDNN."""
    same, error = answers["held"]
    assert same == "True"
    assert error.startswith(
        "CUDNN_ATTENTION does not take q, k, v of (2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16) "
        "in torch.bfloat16: "
    )


def test_what_a_provider_does_not_take_is_not_tried(answers: dict[str, list[str]]) -> None:
    tried = answers["tried"]
    asked, reasons = tried[::2], tried[1::2]
    small = "B4T64H4G2K32"
    assert asked == [
        *(f"{small} fp32 False" for _ in ("flash", "cudnn")),
        *(f"{small} bf16 True" for _ in ("flash", "cudnn")),
        "B8T128D512F2048 bf16 True",
        "B4T4096D2048F8192 bf16 False",
    ]
    assert reasons[:5] == [
        "attention-flash does not support fp32",
        "attention-cudnn does not support fp32",
        *[""] * 3,
    ]
    assert reasons[5].startswith("one program for each element: ")
