"""Arguments that a call is not made for: of another width, integers of 32 bits; and what a call
takes from elsewhere than its arguments: the default device, values that it reads back."""

from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.between import launching
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import place
from tinyllama.harness.check.evaluate import Inputs, Leaves, copied
from tinyllama.harness.check.finding import Candidate, Problem, Rank
from tinyllama.harness.check.graph import outputs_of
from tinyllama.harness.check.memory import called
from tinyllama.harness.check.state import SETTINGS, same_setting
from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.machine.modes import DispatchMode

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}


def other_arguments(candidate: Candidate) -> Problem:
    """What is wrong with arguments of another width, which the reference refuses, or behind such a
    call; and with integers of 32 bits, where the reference takes them."""
    case = candidate.telling()
    inputs = candidate.inputs(case)
    before = {name: one.get() for name, one in SETTINGS.items()}
    advice: Problem = None
    refused = False
    for name, value in inputs.args.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[-1] < 2:
            continue
        args = {**inputs.args, name: value[..., :-1].contiguous()}
        if _outputs(replace(candidate, provider=candidate.op["eager"]), args, inputs) is not None:
            continue  # any width may be right
        refused = True
        bounds = Bounds()
        with candidate.limits(bounds):
            taken = _outputs(candidate, args, inputs) is not None
        if taken:
            shape = tuple(args[name].shape)
            text = f"{name} of shape {shape} is taken beside the others, which the reference"
            advice = advice or (case, f"{text} refuses: raise an error", Rank.WARNING)
    if refused:
        left = [name for name, one in SETTINGS.items() if not same_setting(one.get(), before[name])]
        for name in left:
            SETTINGS[name].set(before[name])
        if left:
            text = "a call with an argument of another width changes"
            return case, f"{text} {' and '.join(left)}", Rank.UNSAFE
        found, given = called(candidate, inputs)
        if wrong := candidate.wrong(case, found, given):
            return case, f"after a call with an argument of another width: {wrong[0]}"
    return _of_32_bits(candidate, case, inputs) or advice


def _outputs(candidate: Candidate, args: Leaves, inputs: Inputs) -> Any:
    """None where there is an error."""
    given = {name: copied(value) for name, value in args.items()}
    for name in candidate.op.differentiable:
        given[name].requires_grad_()
    try:
        return outputs_of(candidate, given, inputs.params)
    except Exception:
        return None


def _of_32_bits(candidate: Candidate, case: OpCase, inputs: Inputs) -> Problem:
    eager = replace(candidate, provider=candidate.op["eager"])
    for name, value in inputs.args.items():
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.int64:
            continue
        given = replace(inputs, args={**inputs.args, name: value.to(torch.int32)})
        try:  # not by `evaluate`, which refuses them
            right, own = (called(one, given)[0] for one in (eager, candidate))
        except Exception:
            continue
        wrong = candidate.wrong(case, own, inputs)
        if wrong and not candidate.wrong(case, right, inputs):
            return case, f"{name} of 32 bits, which the reference takes: {wrong[0]}"
    return None


def from_elsewhere(candidate: Candidate) -> Problem:
    """Advice: what is made without ``device=``, which lies elsewhere than the arguments on a GPU;
    and values that a call reads back from the device, which no device graph captures."""
    case = candidate.telling()
    inputs = candidate.inputs(case)
    eager = replace(candidate, provider=candidate.op["eager"])
    said = _on_the_default_device(candidate, inputs)
    if said and not _on_the_default_device(eager, inputs):
        return case, f"{said} is made on the default device: give device=", Rank.WARNING
    if candidate.provider.waits or candidate.provider.counts_on_host:
        return None
    own, reference = (_reads(one, inputs) for one in (candidate, eager))
    if own and not reference:
        text = f"a call reads values back from the device ({', '.join(own)})"
        return case, f"{text}: no device graph captures it; declare waits=True", Rank.WARNING
    return None


def _on_the_default_device(candidate: Candidate, inputs: Inputs) -> str:
    """What a call makes on torch's default device, in words."""
    args = {name: copied(value) for name, value in inputs.args.items()}
    try:
        with torch.device("meta"), torch.no_grad():
            outputs = outputs_of(candidate, args, inputs.params)
    except Exception as error:
        return f"{place(error)}a tensor"
    return "an output" if any(one.is_meta for one in outputs if one is not None) else ""


class _Reading(DispatchMode):
    """Notes calls of torch that wait for values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in READS and not launching():  # not what the harness reads of an interpreted launch
            self.seen[name] = None
        return func(*args, **(kwargs or {}))


def _reads(candidate: Candidate, inputs: Inputs) -> list[str]:
    args = {name: copied(value) for name, value in inputs.args.items()}
    with _Reading() as reading:
        outputs_of(candidate, args, inputs.params)
    return list(reading.seen)
