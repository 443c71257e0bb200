"""The summary of a training run as a whole: each figure under its name and in its unit."""

import io

from rich.console import Console

from tinyllama.cli.summary import print_summary
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.training.memory import Memory
from tinyllama.training.result import FAILED, Result

MODEL = ModelConfig(hidden_dim=48, num_layers=3, num_heads=6, num_kv_heads=2)
TRAIN = TrainConfig(
    batch_size=2, accumulate=4, seq_len=16, max_grad_norm=0.5, precision="fp16", seed=9
)
RESULT = Result(
    status=FAILED,
    reason="the loss is nan",
    model=MODEL,
    parameters=1234567,
    train=TRAIN,
    tier="v2",
    plan="compile",
    left_out={"capture": "device graphs need a GPU"},
    ranks=5,
    reduced="copies",
    batches={"kind": "text", "bytes": 77, "sha256": "ab", "files_taken": 1, "files_left_out": 0},
    start=10,
    losses=[6.5, 4.25, 5.125],
    gradient_norms=[0.75, None, 0.25],  # the second step was skipped
    step_seconds=[0.5, 0.25, 0.125],
    phase_seconds={"forward": 0.01, "backward": 0.02, "optimizer": 0.003},
    gradients={"one": True, "another": False, "third": True},
    lost={"another": "all zero"},
    device="a device",
    versions={"tinyllama": "0.1", "torch": "9.9"},
)
RESULT.memory = Memory(3 * 2**20, "taken", 5 * 2**20, "resident")
WHOLE = """\
tier         v2, compile, fp16
left out     capture: device graphs need a GPU
device       a device
ranks        5, each with all parameters and its part of the batch; gradients summed by copies
versions     tinyllama 0.1, torch 9.9
model        1,234,567 parameters: hidden 48, 3 layers, 6 heads, 2 kv heads
data         text, 77 bytes, 1 files taken, 0 files left out
batch        4 x 2 x 16 tokens, seed 9
steps        11 to 13
loss         6.5000 first, 5.1250 last
speed        32.0 samples/s, 512 tokens/s
step         250.00 ms, median
clipped      1 of 3 steps, to norm 0.5 (it was 0.25 to 0.75)
phases       forward 10.00 ms, backward 20.00 ms, optimizer 3.00 ms (each run by itself)
live memory  3.0 MiB (taken)
peak memory  5.0 MiB (resident)
gradients    2 of 3 parameters received one
NO GRADIENT at 1 of 3 parameters:
  another: all zero
failed: the loss is nan
"""


def test_a_summary_as_a_whole() -> None:
    out = io.StringIO()
    print_summary(RESULT, Console(file=out, width=120, markup=False, highlight=False))
    assert out.getvalue() == WHOLE
