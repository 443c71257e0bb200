"""The histories that are played with each op, and the checks which they make up."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.check.candidate import Candidate, Problem, Unsupported, worst
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import same_bits
from tinyllama.harness.check.evaluate import Inputs, Leaves, copied
from tinyllama.harness.check.finding import Rank
from tinyllama.harness.check.history import Graph, History, Values, find
from tinyllama.harness.check.points import settings

SHAPES = 20  # new shapes that are looked for, some of which the reference may refuse
REPEATS = {"cpu": 3, "cuda": 50}

ByName = Callable[[str], Values | None]

LAYERS = range(1, 10)  # calls between a forward pass and its backward pass: other layers of a model
LATER = range(1, 5)  # calls behind one that is over
COMPLETE = "call A; backward A"
# A backward pass gives what it gave before. `_values` says what the names of calls mean.
BETWEEN = (
    History(f"{COMPLETE}; backward A; backward A in a thread; backward A doubled"),
    History(
        "; ".join(["call A", *(f"call B{n}" for n in LAYERS), "backward A"])
        + "".join(f"; backward B{n}" for n in LAYERS)
        + "; backward A"
    ),
    History("call A; call sharing_one in the tensors of A; backward A; backward sharing_one"),
    History("call A; call sharing_more in the tensors of A; backward A; backward sharing_more"),
    History("call A; call with_other_settings; backward A", may_raise=True),
    History("call A; call of_another_shape; backward A", may_raise=True),
    History(f"{COMPLETE}; double outputs of A; backward A or refuse", Rank.UNSAFE),
    History(f"{COMPLETE}; double inputs of A; backward A or refuse", Rank.UNSAFE),
    History(f"{COMPLETE}; double gradients of A; backward A", Rank.UNSAFE),
    History("call A; backward A into .grad; backward A into .grad; double .grad of A"),
    History(
        "call transposed; backward transposed; call transposed2 with saved tensors moved; "
        "backward transposed2",
        may_raise=True,
    ),
)
MEMORY = (
    History(
        f"{COMPLETE}; call A2 watched; backward A2; drop A; drop A2; "
        + "; ".join(f"call B{n}; backward B{n}; drop B{n}" for n in LATER)
        + "; call B; backward B",
        Rank.UNSAFE,
    ),
)
# Calls are right whatever came before.
IN_A_ROW = (
    History(
        "call A without gradients; write B to A; call B in the tensors of A without gradients; "
        "call B2 in the memory of A without gradients; "
        "call B3 in the memory of A in inference mode; "
        "write A to B3 through .data; call A2 in the tensors of B3 without gradients"
    ),
    History(
        "call parameters; backward parameters; write B to parameters; "
        "call B in the tensors of parameters; backward B"
    ),
    History("call behind_each_other; backward behind_each_other"),
    History("call one_tensor; backward one_tensor"),
    History("call A with default dtype bfloat16; backward A"),
    History("call A with default dtype float64; backward A"),
    History("call A with deterministic algorithms; backward A"),
    History(f"set unusual settings; {COMPLETE}"),
)
IN_PLACE = History(
    "call A; write B to A; call B in the tensors of A; write A to B through .data; "
    "call A2 in the tensors of B"
)
AFTER_A_FIRST_CALL = (
    "call A and look away in inference mode",
    "call A and look away under autocast",
    "call A and look away with default dtype bfloat16",
    "call in_another_dtype and look away",
    "call turned and look away",
)
ABOUT = {  # what the names of calls mean, where it is not A, or B with other values
    "sharing_one": "the first input of A, and other values for the rest",
    "sharing_more": "another value of the first input, and the rest of A",
    "with_other_settings": "other values of the parameters",
    "of_another_shape": "other lengths of axes",
    "in_another_dtype": "another dtype",
    "transposed": "inputs that are transposed in memory",
    "turned": "the lengths of two axes exchanged",
    "parameters": "inputs that are torch.nn.Parameter",
    "behind_each_other": "inputs that lie behind each other in one buffer",
    "one_tensor": "one tensor for several inputs",
}
# What is right here and would not be on a GPU.
WITH_ANOTHER_DEVICE = History(
    "call A with another default device, where device= matters without gradients", Rank.WARNING
)
OF_KERNELS = (
    History(
        "call A with garbage where masks are false and `other` is missing; backward A", Rank.WARNING
    ),
    History(
        "call in_float32 where products of float32 are tf32, as tl.dot's are without "
        "input_precision; backward in_float32",
        Rank.WARNING,
    ),
)


def fresh_contents(candidate: Candidate) -> Problem:
    """A call depends on its arguments alone and leaves nothing behind: nothing is cached by address
    or shape, no output memory is used twice, no setting is changed. How tensors lie to each other
    makes no difference."""
    case = candidate.telling()
    values = _cached(candidate, case)
    if candidate.op.mutated:
        return find(candidate, IN_PLACE, values)
    memory = () if candidate.op.differentiable else MEMORY  # else it belongs to `backward_twice`
    of_kernels = OF_KERNELS if candidate.interpreted else ()
    last = (*memory, WITH_ANOTHER_DEVICE, *of_kernels)
    return worst(
        itertools.chain(
            _with_one_entry(candidate),
            (find(candidate, history, values) for history in IN_A_ROW),
            _after_an_error(candidate, case, values),
            _after_a_first_call(candidate, case),
            (find(candidate, history, values) for history in last),
        )
    )


def backward_twice(candidate: Candidate) -> Problem:
    """A backward pass gives the same gradients again, also behind other calls, in another thread
    and among other uses of its tensors. What it needs is known to autograd, and released."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    if candidate.provider.overwrites:
        raise Unsupported(f"its backward overwrites {', '.join(candidate.provider.overwrites)}")
    values = _cached(candidate, candidate.telling())
    return worst(find(candidate, history, values) for history in (*BETWEEN, *MEMORY))


def determinism(candidate: Candidate) -> Problem:
    """Equal inputs give equal bits, on the device types for which the provider declares it.

    Each call gets copies: one that changes its inputs would not get equal ones again."""
    case = candidate.telling()
    kind = candidate.device.type
    if kind not in candidate.provider.deterministic:
        raise Unsupported(f"declared not to be deterministic on {kind}")
    inputs = candidate.inputs(case)
    expected = candidate.results(inputs, watched=False)
    for repeat in range(1, REPEATS[kind]):
        results = candidate.results(inputs, watched=False)
        for name, value in expected.items():
            if not same_bits(results[name], value):
                advice = "add in a fixed order, or declare where it is deterministic="
                return case, f"{name} has other bits in repeat {repeat}: {advice}"
    return None


def _with_one_entry(candidate: Candidate) -> Iterator[Problem]:
    """Calls without gradients where an axis has one entry: a copy may be left out there."""
    base = candidate.general()
    # `sizes` tells where such a case is refused, or wrong in any call.
    history = History("call A; call A2 without gradients", may_raise=True)
    for axis, size in base.case.dims.items():
        short = candidate.resized(base, axis, 1) if isinstance(size, int) else None
        if short is not None and short.case.dims[axis] == 1 and candidate.takes(short):
            yield find(candidate, history, _cached(candidate, short))


def _after_an_error(candidate: Candidate, case: OpCase, values: ByName) -> Iterator[Problem]:
    """Calls after arguments of another width, which the reference refuses; and integers of 32 bits,
    which it takes."""
    inputs = candidate.inputs(case)

    def with_input(name: str, value: torch.Tensor) -> Inputs:
        return replace(inputs, args={**inputs.args, name: value})

    tensors = {n: value for n, value in inputs.args.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        if value.dim() and value.shape[-1] > 1:
            narrow = with_input(name, value[..., :-1].contiguous())
            try:
                Graph(candidate.reference, narrow)
            except Exception:
                about = f"a last axis of {name} that is one shorter than declared"
                of_calls = {"narrow": Values(case, narrow, about=about), "A": values("A")}
                history = History(f"call narrow and is refused; {COMPLETE}")
                yield find(candidate, history, of_calls.get)
        if value.dtype is torch.int64:
            about = f"{name} in int32, which the reference takes"
            short = Values(case, with_input(name, value.to(torch.int32)), about=about)
            short.references = case.references(inputs)  # `evaluate` refuses such integers
            history = History("call short_integers; backward short_integers", may_raise=True)
            yield find(candidate, history, {"short_integers": short}.get)


def _after_a_first_call(candidate: Candidate, case: OpCase) -> Iterator[Problem]:
    """Calls after an unusual first call of their shape, each of a new shape. A table that a first
    call makes has its dtype, or is for inference mode; its key may say too little."""
    shapes = _new_shapes(candidate, case)
    first = next(shapes, None)
    try:
        if first is None or find(candidate, History(COMPLETE), _cached(candidate, first)):
            return
    except Exception:
        return  # such a shape is wrong in any case: `sizes` tells
    for call, shape in zip(AFTER_A_FIRST_CALL, shapes, strict=False):
        history = History(f"{call}; call A2; backward A2")
        yield find(candidate, history, _cached(candidate, shape))


def _new_shapes(candidate: Candidate, case: OpCase) -> Iterator[OpCase]:
    """Other sizes of each axis, as far as the op takes them; none of them twice."""
    for number in range(SHAPES):
        new = case
        for axis, size in case.case.dims.items():
            if isinstance(size, int):
                new = candidate.resized(new, axis, size + 1 + 2 * number) or new
        if new is not case and candidate.takes(new):
            yield new


# -- values ---------------------------------------------------------------------------------------


def _cached(candidate: Candidate, case: OpCase) -> ByName:
    """The values of a call by its name, the same each time."""

    @functools.cache
    def values(name: str) -> Values | None:
        of_call = _values(candidate, case, name)
        if of_call is not None:
            of_call.inputs = replace(of_call.inputs, fresh=[])
            of_call.about = ABOUT.get(name, "")
        return of_call

    return values


def _values(candidate: Candidate, case: OpCase, name: str) -> Values | None:
    """The values of a call by its name: A, B: two draws, or what a name says. None where there are
    none."""
    first = candidate.inputs(case)
    if name == "A":
        return Values(case, first)
    if name == "B":
        return Values(case, candidate.inputs(case, draw=1))
    if name in ("sharing_one", "sharing_more"):  # a cache may have either as its key
        names = list(first.args)
        shared = names[:1] if name == "sharing_one" else names[1:]
        second = candidate.inputs(case, draw=1)
        args = {**second.args, **{n: first.args[n] for n in shared}}
        return Values(case, replace(second, args=args)) if len(names) > 1 else None
    if name == "with_other_settings":
        params = {n: numbers[0] for n, numbers in settings(candidate, case).items() if numbers}
        inputs = candidate.inputs(case, draw=1)
        changed = replace(inputs, params={**inputs.params, **params})
        return Values(case, changed) if params else None
    if name == "parameters":
        return Values(case, first, partial(_parameters, candidate.op.differentiable))
    if name in ("behind_each_other", "one_tensor"):
        arrange = partial(_arranged, candidate, name)
        args = arrange(first.args)
        return None if args is None else Values(case, replace(first, args=args), arrange)
    new_case = _other_case(candidate, case, name)
    return None if new_case is None else Values(new_case, candidate.inputs(new_case))


def _other_case(candidate: Candidate, case: OpCase, name: str) -> OpCase | None:
    if name == "transposed":
        return replace(case, layout="transposed")
    if name == "of_another_shape":
        cases = (new for new in candidate.plain_cases() if new.dtype is case.dtype)
        return next((new for new in cases if new.case.dims != case.case.dims), None)
    if name == "in_another_dtype":
        dtypes = [dtype for dtype in candidate.dtypes if dtype is not case.dtype]
        return replace(case, dtype=dtypes[0]) if dtypes else None
    if name == "in_float32":
        exact = torch.get_float32_matmul_precision() == "highest"
        float32 = exact and torch.float32 in candidate.dtypes
        return candidate.smallest(torch.float32) if float32 else None
    return _turned(candidate, case)


def _turned(candidate: Candidate, case: OpCase) -> OpCase | None:
    """The case with the sizes of two axes exchanged, the first two that the op takes so."""
    dims = case.case.dims
    axes = [axis for axis, size in dims.items() if isinstance(size, int)]
    for first, second in itertools.combinations(axes, 2):
        sizes = {first: dims[second], second: dims[first]}
        turned = replace(case, case=case.case.resized(**sizes))
        misfit = candidate.op.misfit(turned.case.dims, case.case.params) or turned.unsupported()
        if not misfit and dims[first] != dims[second] and candidate.takes(turned):
            return turned
    return None


def _parameters(names: Collection[str], args: Leaves) -> Leaves:
    return {n: torch.nn.Parameter(copied(v)) if n in names else copied(v) for n, v in args.items()}


def _arranged(candidate: Candidate, name: str, args: Leaves) -> Any:
    """Copies of the inputs which lie so; None where no two of them can. What backward overwrites by
    design has a tensor of its own."""
    groups: dict[Any, list[str]] = {}
    for n, value in args.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
            continue
        if name == "behind_each_other":
            groups.setdefault(value.dtype, []).append(n)
        elif n in candidate.op.differentiable and n not in candidate.provider.overwrites:
            groups.setdefault((value.shape, value.dtype), []).append(n)
    several = [names for names in groups.values() if len(names) > 1]
    args = {n: copied(value) for n, value in args.items()}
    for names in several:
        if name == "one_tensor":
            args |= {n: args[names[0]].detach() for n in names}
        else:
            args |= _behind_each_other({n: args[n] for n in reversed(names)})
    return args if several else None


def _behind_each_other(args: Mapping[str, torch.Tensor]) -> Leaves:
    buffer = torch.cat([value.reshape(-1) for value in args.values()])
    parts = buffer.split([value.numel() for value in args.values()])
    pairs = zip(args.items(), parts, strict=True)
    return {name: part.view(value.shape).detach() for (name, value), part in pairs}
