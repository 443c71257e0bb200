"""Values of a candidate, judged in a process that never imports it.

The judge draws the inputs from a seed that nobody else knows, computes the references, and decides.
The candidate's process gets the inputs and gives back results, both as the bytes of files that the
judge names; the rest is JSON. So a candidate that replaces its runner, the reference or a function
of torch changes nothing here but its own results. It can give those of the reference instead of
computing them: that, only a review sees.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import SLACK
from tinyllama.harness.check.evaluate import ContractError, Inputs, evaluate
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.provider import MOST_SLACK, Provider
from tinyllama.harness.kernels.precision import SHORT

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Stored:
    """A tensor whose storage is the file of this number in a folder."""

    file: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Traits:
    """What a candidate states of itself. declines: by case, why it does not cover it."""

    slack: Mapping[str, float]
    output_dtypes: Mapping[str, str]
    declines: tuple[str | None, ...]


def cases_of(op: Op) -> list[OpCase]:
    """Those that are judged: every shape in every dtype; on the first shape, extreme values and
    strides that no two tensors share."""
    eager, first = op["eager"], OpCase(op, op["eager"], op.cases[0], op.dtypes[0])
    plain = [OpCase(op, eager, case, dtype) for dtype in op.dtypes for case in op.cases]
    extremes = [replace(first, extreme=name) for name in op.extremes]
    return [*plain, *extremes, replace(first, layout="distinct")]


# -- in the candidate's process -------------------------------------------------------------------


def traits(provider: Provider, cases: Sequence[OpCase]) -> Traits:
    return Traits(
        {SHORT[dtype]: value for dtype, value in provider.slack.items() if dtype in SHORT},
        {name: str(dtype) for name, dtype in provider.output_dtypes.items()},
        tuple(_declined(replace(case, provider=provider)) for case in cases),
    )


def _declined(case: OpCase) -> str | None:
    contiguous = case.provider.contiguous and case.layout != "contiguous"
    return "it takes contiguous inputs alone" if contiguous else case.unsupported()


def answer(
    op: Op, provider: Provider, inputs: Any, device: torch.device, folder: Path
) -> dict[str, Stored]:
    """The results of a provider for the inputs of a folder, whose files they become."""
    loaded = _mapped(inputs, lambda stored: load(stored, folder, device))
    results = evaluate(
        op, provider.call, loaded, provider.overwrites, dtypes=provider.output_dtypes
    )
    return {
        name: store(value.clone(memory_format=torch.contiguous_format), folder, place)
        for place, (name, value) in enumerate(sorted(results.items()), 1000)
    }


# -- in the judge's -------------------------------------------------------------------------------


def compared(
    case: OpCase, traits: Traits, ask: Callable[[Inputs], Mapping[str, Stored]], folder: Path
) -> str:
    """What is wrong with a candidate's results of a case; empty where nothing is.

    ask: hands inputs to the candidate's process.
    """
    inputs = case.inputs(seed=secrets.randbelow(2**62))
    places = iter(range(1000))
    stored_inputs = _mapped(inputs, lambda tensor: store(tensor, folder, next(places)))
    expected = evaluate(case.op, case.provider.call, inputs)
    results = {}
    for place, (name, stored) in enumerate(sorted(ask(stored_inputs).items()), 1000):
        if name not in expected:
            return f"{name} is not asked for"
        dtype = traits.output_dtypes.get(name, str(expected[name].dtype))
        shape, strides = tuple(expected[name].shape), expected[name].contiguous().stride()
        if (actual := (stored.dtype, tuple(stored.size))) != (dtype, shape):
            return f"{name} is {actual}, not {(dtype, shape)}"
        dense = Stored(place, dtype, shape, strides, 0)
        results[name] = load(dense, folder, torch.device("cpu"))
    slack = traits.slack.get(SHORT[case.dtype], 1.0)
    if not 0 < slack <= MOST_SLACK:
        return f"a slack of {slack}: state at most {MOST_SLACK:.0f}"
    try:
        comparisons = case.judge(results, inputs, slack=SLACK * slack)
    except ContractError as error:
        return str(error)
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)


# -- tensors as files -----------------------------------------------------------------------------


def store(value: torch.Tensor, folder: Path, number: int) -> Stored:
    """Write a tensor's whole storage, gaps and all."""
    raw = torch.empty(0, dtype=torch.uint8, device=value.device)
    raw.set_(value.detach().untyped_storage())
    raw.cpu().numpy().tofile(folder / str(number))
    shape = tuple(value.shape), tuple(value.stride())
    return Stored(number, str(value.dtype), *shape, int(value.storage_offset()))


def load(stored: Stored, folder: Path, device: torch.device) -> torch.Tensor:
    """Raises ValueError or RuntimeError for a file that does not hold that tensor."""
    raw = torch.from_numpy(np.fromfile(folder / str(stored.file), dtype=np.uint8)).to(device)
    empty = torch.empty(0, dtype=DTYPES[stored.dtype], device=device)
    return empty.set_(raw.untyped_storage(), stored.offset, stored.size, stored.stride)


def _mapped(inputs: Inputs, change: Callable[[Any], Any]) -> Inputs:
    """Inputs with something else in the place of each tensor."""

    def apply(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: apply(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [apply(entry) for entry in value]
        return change(value) if isinstance(value, (torch.Tensor, Stored)) else value

    names = ("args", "upstream", "fresh")
    return replace(inputs, **{name: apply(getattr(inputs, name)) for name in names})
