"""Values that cannot be used: one line on stderr that names value and fix, and nothing else."""

import math
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import SHORT, refused, tinyllama
from correctness_tests.support.faults import tier_with
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_writable
from tinyllama.model.config import PRESETS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS
from tinyllama.ops import OPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-heads 6", "hidden_dim 128 does not divide by num_heads 6: change one of them"),
        ("--num-heads 7", "--num-heads 7 is odd: give --num-kv-heads, too"),
        ("--seq-len 0", "seq_len is 0: use a whole number from 1 to 2147483647"),
        (f"--seq-len {10**40}", "seq_len is 1000000000"),
        ("--num-steps ten", "argument --num-steps: invalid int value: 'ten'"),
        ("--seed -1", "seed is -1: use a whole number from 0"),
        ("--learning-rate fast", "argument --learning-rate: invalid float value: 'fast'"),
        ("--learning-rate nan", "learning_rate is nan: use a number from 0 to 1e+20"),
        ("--max-grad-norm 0", "max_grad_norm is 0.0: use a number above 0, up to 1e+20"),
        ("--tier v9", "argument --tier: invalid choice: 'v9'"),
        ("--without speed", "tier v1 has no switch 'speed': use one of"),
        ("--preset huge", "argument --preset: invalid choice: 'huge'"),
        ("--precision tf32", "precision tf32 is not there on cpu: "),
        ("--device tpu", "device 'tpu' is unknown: use cpu, cuda or cuda:N"),
        ("--device cuda:99", "device 'cuda:99' is not there: torch sees"),
        ("--memory small --accumulate 2", "accumulate 2 needs them: use memory fast, or accum"),
        ("--memory small --max-grad-norm 1", "max_grad_norm 1.0 needs them: use memory fast, or"),
        ("--memory small --precision fp16", "precision fp16 needs them: use memory fast, or prec"),
        ("--epochs 3", "unrecognized arguments: --epochs 3 (see tinyllama --help)"),
        ("--batch-size 2147483647", "GiB or more, and "),
        ("--num-layers 2147483647", "use a smaller model or batch"),
        ("--save= ", "argument --save: '' names no file (an empty path): name one"),
        ("--save {tmp}/none/x", "--save '{tmp}/none/x': no folder '{tmp}/none'; make it first"),
        ("--save {tmp}", "--save '{tmp}' is a folder: name a file in it"),
        ("--json {tmp}/pipe", "--json '{tmp}/pipe' is a pipe or a device, which would be replaced"),
        ("--json {tmp}/saved", "--save and --json are both '{tmp}/saved': name two files"),
        ("--data {tmp}/short --save {tmp}/short", "--data and --save are both '{tmp}/short'"),
        ("--resume {tmp}/short --json {tmp}/short", "--resume and --json are both '{tmp}/short'"),
        ("--resume {tmp}/short", "checkpoint '{tmp}/short' is damaged"),
        ("--data {tmp}/short", "data '{tmp}/short' has 5 bytes of text"),
        ("--data {tmp}/pipe", "data '{tmp}/pipe' is a pipe or a device: name a text file or a"),
        ("--data {tmp}", "data '{tmp}' has more than 4294967296 bytes: name a smaller folder"),
    ],
    ids=lambda value: value.split(" {tmp}")[0][:40] if value.startswith("--") else "",
)
def test_bad_value_is_one_line_and_status_2(tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "short").write_text("abcde")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 2**32 + 1)  # a hole: it takes no room
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    outputs = ["--save", str(tmp_path / "saved"), "--json", str(tmp_path / "run.json")]
    line = refused(*SHORT, *outputs, *options.format(tmp=tmp_path).split())
    assert message.format(tmp=tmp_path) in line
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "short").read_text() == "abcde"


ODD = ModelConfig(
    hidden_dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=10, vocab_size=7
)


def model(**changes: Any) -> ModelConfig:
    return replace(ODD, **changes)


def train(**changes: Any) -> TrainConfig:
    return replace(TrainConfig(), **changes)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        *((model, {"num_layers": value}) for value in (0, 2**31, True, 2.0, "8", None)),
        *((train, {name: 0}) for name in ("batch_size", "accumulate", "seq_len", "num_steps")),
        *((train, {"eps": value}) for value in (-1e-30, math.nan, "1", True)),
        (train, {"learning_rate": math.nextafter(1e20, math.inf)}),
        (model, {"rope_theta": 0}),
        *((train, {name: 1.0}) for name in ("beta1", "beta2")),
        *((train, {"seed": value}) for value in (-1, 2**63, 1.0)),
        (model, {"hidden_dim": 18}),
        (model, {"num_kv_heads": 4}),
        (train, {"precision": "fp8"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_config_refuses_value_out_of_bounds_by_name(
    make: Callable[..., Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        make(**changes)


def test_sizes_follow_from_shape() -> None:
    assert PRESETS["small"].parameters == 31_977_984
    assert ODD.parameters == sum(p.numel() for p in TinyLlama(ODD).parameters()) == 7104
    # 6 for each parameter but the norms' and each token; 6 products of the 45 scores of 6 heads
    assert ODD.step_flops(5, 9) == 6 * (7104 - 7 * 24) * 45 + 6 * 2 * 3 * 5 * 6 * 4 * 45


def test_disk_without_room_is_refused_before_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--save '.*x' takes \d+ bytes, and folder .* has \d+"):
        check_writable(tmp_path / "x", "--save", 2**70)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("option", ["--save", "--json"])
def test_full_disk_is_one_line_and_leaves_old_file(tmp_path: Path, option: str) -> None:
    """A limit on the size of files stands in for it: both fail while they are written."""
    file = tmp_path / "file"
    file.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        done = tinyllama(*SHORT, option, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.status == 1
    (line,) = done.err.splitlines()
    assert line.startswith(f"tinyllama: error: '{file}' cannot be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_machine_without_triton_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = OPS["rms_norm"]["eager"].call
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with tier_with("rms_norm", eager, requires=("triton",)) as tier:
        monkeypatch.setitem(TIERS, "v1", tier)
        line = refused(*SHORT)
    assert "needs triton: triton is not installed (pip install" in line
