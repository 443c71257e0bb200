"""Ops of --ops files join those of the tree before any specification is collected; a GPU of one's
own for what is timed; and the tests that take long."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from correctness_tests.support.commands import ROOT
from correctness_tests.support.forked import flush_little, forked  # noqa: F401 (a fixture)
from correctness_tests.support.posed import posed  # noqa: F401 (a fixture)
from correctness_tests.support.timed_suite import baseline, recorded, suite  # noqa: F401 (fixtures)
from tinyllama.harness.declare.op import Provider
from tinyllama.harness.plugins.suite import LEFT_OUT, worker_device
from tinyllama.ops import OPS
from tinyllama.suites.selection import load

DECLARED = pytest.StashKey[dict[str, dict[str, Provider]]]()


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a job in the background deaf to Ctrl-C, and so would be what tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A process that a test starts in another folder finds this package, installed or not.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, str(ROOT)]))
    for name in config.option.ops:
        load(name, OPS)
    if worker_device(config).type == "cpu":  # cycles may hold what a GPU has little of
        gc.set_threshold(50_000, 20, 50)  # an interpreted kernel makes 700 objects in no time
        flush_little()
    config.stash[DECLARED] = {name: dict(op.providers) for name, op in OPS.items()}


@pytest.hookimpl(tryfirst=True)  # ahead of -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr == "not long":
        long = [item for item in items if item.get_closest_marker("long")]
        if long:
            config.stash[LEFT_OUT]["long, run with make test-all, as CI does"] += len(long)


def pytest_collection_finish() -> None:
    """What torch and ten thousand tests consist of stays; no collection need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file of tests leaves: `check` collects several times in each run."""
    last_of_file = nextitem is None or nextitem.path != item.path
    if last_of_file and worker_device(item.config).type == "cpu":
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report what is left at the end as leaked


@pytest.fixture(autouse=True)
def _ops_as_declared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves other providers on the ops of the tree than it found: what is tested
    later in the process would test these too. `providers_restored` takes them off."""
    yield
    left = []
    for name, providers in request.config.stash[DECLARED].items():
        now = OPS[name].providers
        either = {**now, **providers}
        left += [
            f"{name}-{provider_name}"
            for provider_name in either
            if now.get(provider_name) is not providers.get(provider_name)
        ]
        now.clear()
        now.update(providers)
    assert not left, f"providers left registered or changed: {left}: use providers_restored"


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """pytest-benchmark starts seven processes for the default of an option, whenever pytest starts
    in this process."""
    monkeypatch.setattr("pytest_benchmark.plugin.get_tag", lambda: "a_tag")
    return pytester


def shared(device: torch.device, named: bool) -> bool:
    """Whether workers of xdist use the same GPU; named: all of them the one of ``--device``."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return device.type != "cpu" and workers > (1 if named else torch.cuda.device_count())


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type == "cpu":
        pytest.skip("times, launches and bytes of a device are read on a GPU")
    return device


@pytest.fixture
def own_gpu(device: torch.device, request: pytest.FixtureRequest) -> None:
    """For a test that holds times of a GPU to something: they would be other workers' times too."""
    if shared(device, named=bool(request.config.option.device)):
        pytest.skip("times of a GPU that xdist's workers share: run -m gpu without -n")
