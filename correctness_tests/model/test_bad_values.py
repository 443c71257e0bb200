"""Values that cannot be used: one line on stderr that names value and fix, and nothing else."""

import os
import resource
from pathlib import Path

import pytest

from correctness_tests.support.commands import SHORT, refused, tinyllama
from correctness_tests.support.faults import tier_with
from tinyllama.model.tiers import TIERS
from tinyllama.ops import OPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-heads 6", "hidden_dim 128 does not divide by num_heads 6: change one of them"),
        ("--num-heads 7", "--num-heads 7 is odd: give --num-kv-heads, too"),
        ("--num-kv-heads 3", "num_heads 4 does not divide by num_kv_heads 3: change one of them"),
        ("--seq-len 0", "seq_len is 0: use a whole number from 1 to 2147483647"),
        ("--batch-size -1", "batch_size is -1: use a whole number from 1 to 2147483647"),
        ("--num-steps 0", "num_steps is 0: use a whole number from 1 to 2147483647"),
        ("--num-steps 2147483648", "num_steps is 2147483648: use a whole number from 1 to"),
        (f"--seq-len {10**40}", "seq_len is 1000000000"),
        (f"--seed {2**63}", "seed is 9223372036854775808: use a whole number from 0"),
        ("--hidden-dim 1" + 5000 * "0", "0000 is not a whole number: use one"),
        ("--num-steps ten", "argument --num-steps: 'ten' is not a whole number: use one"),
        ("--seed -1", "seed is -1: use a whole number from 0"),
        ("--learning-rate fast", "argument --learning-rate: 'fast' is not a number: use one like"),
        ("--learning-rate nan", "learning_rate is nan: use a number from 0 to 1e+20"),
        ("--learning-rate -0.1", "learning_rate is -0.1: use a number from 0 to 1e+20"),
        ("--learning-rate 3e38", "learning_rate is 3e+38: use a number from 0 to 1e+20"),
        ("--learning-rate 1e999", "learning_rate is inf: use a number from 0 to 1e+20"),
        ("--tier v9", "tier 'v9' does not exist: use one of v1, v2"),
        ("--without speed", "tier v1 has no switch 'speed': use one of"),
        ("--preset huge", "argument --preset: invalid choice: 'huge'"),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--precision tf32", "precision tf32 is not there on cpu: "),
        ("--use-amp --precision fp32", "--use-amp means --precision bf16, and --precision is fp32"),
        ("--device tpu", "device 'tpu' is unknown: use cpu, cuda or cuda:N"),
        ("--device cuda:99", "device 'cuda:99' is not there: torch sees"),
        ("--data {tmp}/short", "data '{tmp}/short' has 5 bytes of text"),
        ("--resume {tmp}/short", "checkpoint '{tmp}/short' is damaged"),
        ("--save {tmp}/none/x", "--save '{tmp}/none/x': no folder '{tmp}/none'; make it first"),
        ("--save {tmp}", "--save '{tmp}' is a folder: name a file in it"),
        ("--save {tmp}/pipe", "--save '{tmp}/pipe' is a pipe or a device, which would be replaced"),
        ("--json {tmp}/pipe", "--json '{tmp}/pipe' is a pipe or a device, which would be replaced"),
        ("--json {tmp}/saved", "--save and --json are both '{tmp}/saved': name two files"),
        ("--json {tmp}/../{tmp.name}/saved", "--save and --json are both '{tmp}/../{tmp.name}/sav"),
        ("--data {tmp}/short --save {tmp}/short", "--data and --save are both '{tmp}/short'"),
        ("--resume {tmp}/short --json {tmp}/short", "--resume and --json are both '{tmp}/short'"),
        ("--json {tmp}/none/x", "--json '{tmp}/none/x': no folder '{tmp}/none'; make it first"),
        ("--accumulate 0", "accumulate is 0: use a whole number from 1 to"),
        ("--accumulate two", "argument --accumulate: 'two' is not a whole number: use one"),
        ("--max-grad-norm 0", "max_grad_norm is 0.0: use a number above 0, up to 1e+20"),
        ("--max-grad-norm big", "argument --max-grad-norm: 'big' is not a number: use one like"),
        ("--memory tiny", "argument --memory: invalid choice: 'tiny'"),
        ("--memory small --accumulate 2", "accumulate 2 needs them: use memory fast, or accum"),
        ("--memory small --max-grad-norm 1", "max_grad_norm 1.0 needs them: use memory fast, or"),
        ("--memory small --precision fp16", "precision fp16 needs them: use memory fast, or prec"),
        ("--diagnose-every 0", "--diagnose-every is 0: use a whole number of at least 1"),
        ("--epochs 3", "unrecognized arguments: --epochs 3 (see tinyllama --help)"),
        ("--batch-size 2147483647", "GiB or more, and "),
        ("--hidden-dim 2147483647 --num-heads 1 --num-kv-heads 1", "pairs need an even number"),
        ("--hidden-dim 2147483646 --num-heads 1 --num-kv-heads 1", "use a smaller model or batch"),
        ("--num-layers 2147483647", "use a smaller model or batch"),
        ("--save= ", "argument --save: '' names no file (an empty path): name one"),
        ("--data= ", "argument --data: '' names no file (an empty path): name one"),
        ("--data {tmp}/pipe", "data '{tmp}/pipe' is a pipe or a device: name a text file or a"),
        ("--data /proc/sys/kernel", "data '/proc/sys/kernel"),  # some files cannot be read
        ("--data {tmp}", "data '{tmp}' has more than 4294967296 bytes, or changed while"),
        ("--resume {tmp}/pipe", "checkpoint '{tmp}/pipe' is no file: name a file that --save"),
        ("--json {tmp}/" + 256 * "x", "names no file (File name too long): name one"),
        ("--save {tmp}/none/../x", "no folder '{tmp}/none/..'; make it first"),
        ("--save /proc/x", "--save '/proc/x' cannot be written: "),
    ],
    ids=lambda value: value.split(" {tmp}")[0][:40] if value.startswith("--") else "",
)
def test_a_bad_value_is_one_line_and_status_2(tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "short").write_text("abcde")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 2**32 + 1)  # a hole: it takes no room
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    outputs = ["--save", str(tmp_path / "saved"), "--json", str(tmp_path / "run.json")]
    line = refused(*SHORT, *outputs, *options.format(tmp=tmp_path).split())
    assert message.format(tmp=tmp_path) in line
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "short").read_text() == "abcde"


@pytest.mark.long
@pytest.mark.parametrize("option", ["--save", "--json"])
def test_a_full_disk_is_one_line_and_what_was_there_stays(tmp_path: Path, option: str) -> None:
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
    assert "File too large" in line
    assert line.endswith("is unchanged: free some space, or name another place")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_a_machine_without_triton_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = OPS["rms_norm"]["eager"].call
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with tier_with("rms_norm", eager, requires=("triton",)) as tier:
        monkeypatch.setitem(TIERS, "needy", tier)
        line = refused(*SHORT, "--tier", "needy")
    assert "needs triton: triton is not installed (pip install" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--op speed", "--op 'speed' does not exist: use one of "),
        ("--case N1", "--case 'N1' does not exist: use one of "),
        ("--op adamw --dtype bf16", "adamw: nothing to search in bf16: choose others with "),
    ],
)
def test_a_search_of_what_does_not_exist_is_refused_on_any_machine(
    options: str, message: str
) -> None:
    assert message in refused("tune", *options.split())
