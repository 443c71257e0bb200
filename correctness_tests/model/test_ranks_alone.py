"""What a rank knows of the others, without any: torch.distributed is stood in for.

`test_ranks.py` has two ranks.
"""

import contextlib
import datetime
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.machine.errors import UsageError
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.tiers import StepPlan
from tinyllama.training import memory, ranks, shards, train
from tinyllama.training.memory import Memory, MemoryMeter
from tinyllama.training.ranks import ALONE, Ranks, device_of, joined, launched
from tinyllama.training.result import Result

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what the second of two ranks passes to what gathers and sums."""
    theirs: list[Any] = []

    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [mine, *theirs]

    def reduce(numbers: torch.Tensor) -> None:
        numbers += theirs[0]

    monkeypatch.setattr(ranks.dist, "all_gather_object", gather)
    monkeypatch.setattr(ranks.dist, "all_reduce", reduce)

    def choose(*values: Any) -> None:
        theirs[:] = values

    return choose


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(rank=0, count=1, local=0, seconds=600.0) == ALONE == Ranks()
    assert [Ranks(rank, 3).first for rank in range(3)] == [True, False, False]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    for told, found in (
        *(({}, ALONE), ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ALONE)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Ranks(3, 4, 1)),
        ({"RANK": "3"}, None),
        ({"RANK": "3", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, None),
        ({"RANK": "-1", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    ):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        if found:
            assert launched() == found
            continue
        with pytest.raises(UsageError, match="is no rank of a job: start with") as caught:
            launched()
    assert str(caught.value) == (
        "the environment has {'RANK': '-1', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0'}, which is no "
        "rank of a job: start with torchrun, or unset RANK, WORLD_SIZE, LOCAL_RANK"
    )


def test_parts_follow_each_other_and_are_equal() -> None:
    assert [Ranks(rank, 3).part(6) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert ALONE.part(5) == slice(0, 5)
    with pytest.raises(ConfigError) as caught:
        Ranks(0, 3).part(5)
    assert str(caught.value) == (
        "batch_size 5 does not divide by 3 ranks: use a multiple of 3, or another number of ranks"
    )


def test_one_rank_asks_nobody(other: Callable[..., None]) -> None:
    other(9.0)
    numbers = torch.tensor([2.0])
    assert ALONE.gathered("mine") == ["mine"]
    assert ALONE.mean(numbers) is numbers
    assert numbers.item() == 2
    assert Ranks(0, 2).gathered("mine") == ["mine", 9.0]
    assert Ranks(0, 2).mean(numbers) is numbers
    assert numbers.item() == 5.5


def test_settings_are_the_same_on_all_ranks(other: Callable[..., None]) -> None:
    settings = {"seed": 0, "tier": "v1"}
    other(settings, settings)
    Ranks(0, 3).check_alike(settings)
    for name, value in (("seed", 1), ("tier", "v2")):
        other(settings, {**settings, name: value})
        with pytest.raises(UsageError) as caught:
            Ranks(0, 3).check_alike(settings)
        assert str(caught.value) == (
            f"{name} is {settings[name]!r} on rank 0 and {value!r} on rank 2: start all ranks with "
            "the same options, data and versions"
        )


def test_one_rank_takes_any_gpu_and_several_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_device", lambda named: torch.device(named or "cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(ALONE, "cuda:1") == GPU
    assert device_of(Ranks(0, 2, 0), "cuda") == torch.device("cuda", 0)
    assert device_of(Ranks(1, 2, 1), None) == GPU
    assert device_of(Ranks(1, 2, 1), "cpu") == CPU
    for given, named, message in (
        (
            Ranks(1, 2, 1),
            "cuda:1",
            "--device cuda:1 is one GPU, and there are 2 ranks: use --device cuda or leave it out, "
            "and each takes its own",
        ),
        (
            Ranks(5, 6, 2),
            None,
            "rank 5 is number 2 on its machine, which has 2 GPUs: start one process for each GPU "
            "(torchrun --nproc-per-node), or use --device cpu",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            device_of(given, named)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "there", "device", "backend"),
    [
        (ALONE, False, CPU, None),
        (Ranks(1, 2), True, CPU, None),
        (Ranks(1, 2, seconds=7.0), False, CPU, "gloo"),
        (Ranks(0, 2, seconds=7.0), False, GPU, "cpu:gloo,cuda:nccl"),
    ],
)
def test_ranks_are_connected_once(
    given: Ranks, there: bool, device: torch.device, backend: str | None, monkeypatch: Any
) -> None:
    told: list[Any] = []

    class Watched:
        def __init__(self, *given: Any) -> None:
            told.append(given)

        def start(self) -> None:
            told.append("watches")

        def stop(self, left: bool) -> None:
            told.append(f"stopped {left}")

    def note(name: str) -> Callable[..., None]:
        return lambda *args, **options: told.append((name, *args, *options.items()))

    monkeypatch.setattr(ranks, "Answering", Watched)
    monkeypatch.setattr(ranks, "own_store", lambda: "store")
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: there)
    monkeypatch.setattr(ranks.dist, "init_process_group", note("connected"))
    monkeypatch.setattr(ranks.dist, "destroy_process_group", note("left"))
    monkeypatch.setattr(torch.cuda, "set_device", note("on"))
    monkeypatch.setattr(gc, "collect", note("collected"))
    with joined(given, device):
        inside = list(told)
    wait = ("timeout", datetime.timedelta(seconds=7))
    on_gpu = device.type != "cpu"
    connected = ("connected", backend, wait, ("device_id", device if on_gpu else None))
    watched = [("store", given.rank, 2, 7.0), "watches"]
    expected = [*([("on", device)] if on_gpu else []), connected, *watched] if backend else []
    assert inside == expected
    assert told[len(inside) :] == (["stopped True", ("collected",), ("left",)] if backend else [])
    with pytest.raises(KeyError), joined(given, device):
        raise KeyError
    assert ("stopped False" in told) is bool(backend)


# -- memory ------------------------------------------------------------------------------------


def a_step(device: torch.device, memory_mode: str = "fast") -> Any:
    parameters = [torch.zeros(3), torch.zeros(5), torch.zeros(2)]
    parameters[0].grad, parameters[2].grad = torch.zeros(3), torch.zeros(2)
    moments = {"one": torch.zeros(7), "last": torch.zeros(11)}
    optimizer = SimpleNamespace(parameters=parameters, tensors=lambda: moments)
    plan = StepPlan(memory=memory_mode)
    return SimpleNamespace(device=device, optimizer=optimizer, plan=plan, graphs=["graph"])


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("fast", "parameters, gradients and optimizer state"),
        ("selective", "parameters, gradients and optimizer state"),
        ("small", "parameters and optimizer state"),
    ],
)
def test_on_a_cpu_tensors_are_counted(
    mode: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "resident_peak_bytes", lambda: 1234)
    meter = MemoryMeter(a_step(CPU, mode))
    expected = 4 * (3 + 5 + 2 + 3 + 2 + 7 + 11)
    assert meter.read() == Memory(expected, what, 1234, "resident set of the process")


def test_on_a_gpu_what_is_paused_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [-1]  # and one for the graph
    told: list[torch.device] = []
    monkeypatch.setattr(memory, "live_bytes", lambda device, graphs: 40 + len(graphs))
    monkeypatch.setattr(memory, "peak_bytes", lambda device, graphs: peaks[0] + len(graphs))
    monkeypatch.setattr(memory, "forget_peak", told.append)
    meter = MemoryMeter(a_step(GPU))
    meter.start()
    assert told == [GPU]
    on = "taken on the device"
    assert meter.read() == Memory(41, on, 0, on)
    peaks[0] = 100
    assert meter.read() == Memory(41, on, 101, on)
    with contextlib.suppress(KeyError), meter.paused():
        peaks[0] = 50  # the peak of before is forgotten, and kept by the meter
        raise KeyError
    assert told == [GPU, GPU]
    assert meter.read().peak_bytes == 101
    peaks[0] = 200
    assert meter.read().peak_bytes == 201


@pytest.mark.parametrize(("count", "in_shards"), [(1, False), (2, False), (2, True)])
def test_a_run_that_cannot_fit_is_refused(
    count: int, in_shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the byte: parameters with two moments, the tokens as int64 twice, one activation."""
    shape = train.ModelConfig(hidden_dim=24, num_heads=6, num_kv_heads=2, ffn_dim=10)
    config = TrainConfig(batch_size=6, accumulate=5, seq_len=7)
    state = 12 * shape.parameters // (count if in_shards else 1)
    least = state + (6 * 5 * 7 * 16 + 6 * 7 * 24 * 4) // count
    monkeypatch.setattr(train, "device_name", lambda device: "a device")
    given = (shape, config, CPU, Ranks(0, count), in_shards)
    monkeypatch.setattr(train, "memory_bytes", lambda device: least)
    train._check_fits(*given)
    monkeypatch.setattr(train, "memory_bytes", lambda device: least - 1)
    with pytest.raises(ConfigError, match=r"the run takes 0 GiB or more, and a device has 0 GiB"):
        train._check_fits(*given)


def test_what_cannot_fit_is_said_in_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "device_name", lambda device: "a device")
    monkeypatch.setattr(train, "memory_bytes", lambda device: 3 * 2**30)
    shape = train.ModelConfig(vocab_size=2**20)  # 512 Mi parameters of the embedding
    with pytest.raises(ConfigError) as caught:
        train._check_fits(shape, TrainConfig(batch_size=1, seq_len=1), CPU, ALONE, False)
    assert str(caught.value) == (
        "the run takes 6 GiB or more, and a device has 3 GiB: use a smaller model or batch"
    )


# -- the result --------------------------------------------------------------------------------


def test_speeds_are_of_the_median_step() -> None:
    config = TrainConfig(batch_size=3, accumulate=2, seq_len=7)
    fields: dict[str, Any] = {
        **{"model": train.ModelConfig(), "parameters": 1, "train": config, "tier": "v1"},
        **{"plan": "eager", "left_out": {}, "batches": {}, "start": 0, "device": "cpu"},
    }
    found = Result(**fields, versions={})
    found.memory = Memory(1, "a", 2, "b")
    assert (found.status, found.ranks, found.in_shards, found.reduced) == (
        "completed",
        1,
        False,
        None,
    )
    assert (found.samples_per_second, found.tokens_per_second) == (None, None)
    found.step_seconds = [9.0, 0.5, 0.1]
    assert (found.samples_per_second, found.tokens_per_second) == (12.0, 84.0)
    plain = found.as_dict()
    assert (plain["samples_per_second"], plain["tokens_per_second"]) == (12.0, 84.0)
    assert plain["train"]["seq_len"] == 7


def test_each_block_is_sharded_before_the_model_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed.fsdp as fsdp
    from torch.distributed import device_mesh

    done: list[Any] = []
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda kind, shape: (kind, shape))
    monkeypatch.setattr(fsdp, "fully_shard", lambda part, mesh: done.append((part, mesh)))
    monkeypatch.setattr(
        fsdp, "register_fsdp_forward_method", lambda part, name: done.append((part, name))
    )
    model: Any = SimpleNamespace(stack=None, layers=["first", "second", "last"])
    config: Any = SimpleNamespace(precision="bf16")
    shards.shard(model, config, CPU, Ranks(0, 2))
    mesh = ("cpu", (2,))
    blocks = [(layer, mesh) for layer in model.layers]
    assert done == [*blocks, (model, mesh), (model, "loss_with")]
    with pytest.raises(ConfigError, match="one rank has nothing to shard"):
        shards.shard(model, config, CPU, ALONE)
    with pytest.raises(ConfigError, match="precision fp16"):
        shards.shard(model, SimpleNamespace(precision="fp16"), CPU, Ranks(0, 2))  # type: ignore[arg-type]
    model.stack, model.tier = object(), SimpleNamespace(name="v4")
    with pytest.raises(ConfigError, match="tier v4 reads the weights of all blocks"):
        shards.shard(model, config, CPU, Ranks(0, 2))
