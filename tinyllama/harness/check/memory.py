"""How the tensors of a call lie to each other, and what a call leaves behind."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import Inputs, Leaves, copied, mutated_results
from tinyllama.harness.check.finding import Candidate, Problem, Rank
from tinyllama.harness.check.graph import Graph, outputs_of, same_bits
from tinyllama.harness.check.resizing import general, resized

Arrangement = Callable[[Leaves, list[str]], Leaves]


# -- outputs --------------------------------------------------------------------------------------


def sharing(candidate: Candidate) -> Problem:
    """A case in which an output shares memory with an input, or elements of an output with each
    other, where the reference's do not; or in which a call is wrong without gradients."""
    advice: Problem = None
    for case, declared in _plain(candidate):
        try:
            inputs = candidate.inputs(case)
            args = {name: copied(value) for name, value in inputs.args.items()}
            with torch.no_grad():
                eager = replace(candidate, provider=candidate.op["eager"])
                reference = outputs_of(eager, args, inputs.params)
                outputs = outputs_of(candidate, args, inputs.params)
            seen = _without_gradients(candidate, case, inputs, args, outputs)
        except Exception:
            if declared:
                raise
            continue  # `sizes` tells of one entry that the op takes and the candidate does not
        if seen:
            return case, seen
        own, others = shared(args, outputs), shared(args, reference)
        names = list(candidate.op.outputs)
        for at, name in own.items():
            if at not in others:
                text = f"{names[at]} shares memory with {name}: a change of one changes both"
                return case, text
        for name, one, other in zip(names, outputs, reference, strict=False):
            if _overlaps(one) and not _overlaps(other):
                text = f"elements of {name} share memory: it has strides {one.stride()}"
                return case, f"{text}, the reference's {other.stride()}"
            if other.is_contiguous() and not one.is_contiguous():
                text = f"{name} has strides {one.stride()}, the reference's is contiguous"
                advice = advice or (case, text, Rank.WARNING)
    return advice


def _without_gradients(
    candidate: Candidate, case: OpCase, inputs: Inputs, args: Leaves, outputs: tuple[Any, ...]
) -> str:
    """What is wrong with a call under `no_grad`, in words: one that takes another way there."""
    for (name, value), given in zip(args.items(), inputs.args.values(), strict=True):
        if name not in candidate.op.mutated and not same_bits(value, given):
            return f"a call of which no gradient is wanted changed {name}"
    names = candidate.op.differentiable
    again = {n: copied(one).requires_grad_(n in names) for n, one in inputs.args.items()}
    usual = outputs_of(candidate, again, inputs.params)
    if all(map(same_bits, outputs, usual)):
        return ""
    found = dict(zip(candidate.op.outputs, outputs, strict=True))
    wrong = candidate.forward_only().wrong(case, found, replace(inputs, wanted=()))
    wrong = [one for one in wrong if one.name in found]
    return f"a call of which no gradient is wanted: {wrong[0]}" if wrong else ""


def _plain(candidate: Candidate) -> Iterator[tuple[OpCase, bool]]:
    """Those in the first dtype, and the general one with each axis of one entry; whether the op
    declares the case."""
    for case in candidate.plain():
        if case.dtype is candidate.dtypes[0]:
            yield case, True
    base = general(candidate)
    for axis, size in base.case.dims.items():
        one = resized(candidate, base, axis, 1) if isinstance(size, int) else None
        if one is not None and one.case.dims[axis] == 1:
            yield one, False


def shared(args: Leaves, outputs: tuple[torch.Tensor, ...]) -> dict[int, str]:
    """The places of outputs in the storage of an input, and that input."""
    starts = {
        tensor.untyped_storage().data_ptr(): name
        for name, value in args.items()
        for tensor in (value if isinstance(value, list) else [value])
        if tensor.numel()
    }
    found = [starts.get(one.untyped_storage().data_ptr()) for one in outputs]
    return {place: name for place, name in enumerate(found) if name is not None}


def passed_on(candidate: Candidate, inputs: Inputs) -> str | None:
    """Which output is an input with these parameters, and is not the reference's, in words."""
    if candidate.op.mutated:
        return None
    args = {name: copied(value) for name, value in inputs.args.items()}
    with torch.no_grad():
        own = shared(args, outputs_of(candidate, args, inputs.params))
        if not own:
            return None
        eager = replace(candidate, provider=candidate.op["eager"])
        others = shared(args, outputs_of(eager, args, inputs.params))
    for place, name in own.items():
        if place not in others:
            return f"{list(candidate.op.outputs)[place]} shares memory with {name}"
    return None


def _overlaps(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 and any(size > 1 and not stride for size, stride in pairs)


# -- inputs ---------------------------------------------------------------------------------------


def again(args: Leaves) -> Leaves:
    """Other tensors in the same memory."""

    def other(value: Any) -> Any:
        if isinstance(value, list):
            return [other(one) for one in value]
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    return {name: other(value) for name, value in args.items()}


def neighbours(candidate: Candidate) -> Problem:
    """Inputs give the results of their values also where they follow each other in one buffer, are
    columns of one, or are one tensor. An input that backward overwrites by design has a tensor of
    its own."""
    case = candidate.telling()
    plain = candidate.inputs(case)
    alike: dict[Any, list[str]] = {}
    alone = candidate.provider.overwrites
    for name in [name for name in candidate.op.differentiable if name not in alone]:
        value = plain.args[name]
        alike.setdefault((value.shape, value.dtype), []).append(name)
    groups = [names for (shape, _), names in alike.items() if len(names) > 1 and shape]
    every = [
        name
        for name, value in plain.args.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()
    ]
    behind = {dtype: [n for n in every if plain.args[n].dtype is dtype] for dtype in _dtypes(plain)}
    tries: list[tuple[str, Arrangement, list[list[str]]]] = [
        ("behind each other in one memory, the last one first", _behind, list(behind.values())),
        ("one tensor", _one, groups),
    ]
    if not candidate.provider.contiguous:
        tries.insert(1, ("columns of one buffer, the last one first", _columns, groups))
    usual, _ = called(candidate, plain)
    for what, arrange, sets in tries:
        sets = [names for names in sets if len(names) > 1]
        if not sets:
            continue
        args = dict(plain.args)
        for names in sets:
            args |= arrange(args, names)
        found, given = called(candidate, replace(plain, args=args))
        if arrange is not _one and _same(found, usual):
            continue
        if wrong := candidate.wrong(case, found, given):
            named = " and ".join(", ".join(names) for names in sets)
            return case, f"{named} {what}: {wrong[0]}"
    return None


def _dtypes(inputs: Inputs) -> list[torch.dtype]:
    tensors = [value for value in inputs.args.values() if isinstance(value, torch.Tensor)]
    return list(dict.fromkeys(value.dtype for value in tensors))


def _behind(args: Leaves, names: list[str]) -> Leaves:
    backwards = [args[name] for name in reversed(names)]
    whole = torch.cat([one.reshape(-1) for one in backwards])
    parts = whole.split([one.numel() for one in backwards])
    views = [part.view(one.shape) for part, one in zip(parts, backwards, strict=True)]
    return dict(zip(reversed(names), views, strict=True))


def _columns(args: Leaves, names: list[str]) -> Leaves:
    whole = torch.cat([args[name] for name in reversed(names)], -1)
    return dict(zip(reversed(names), whole.chunk(len(names), -1), strict=True))


def _one(args: Leaves, names: list[str]) -> Leaves:
    return {name: args[names[0]].detach() for name in names}


def called(candidate: Candidate, inputs: Inputs) -> tuple[dict[str, torch.Tensor], Inputs]:
    """The results of a call on these tensors themselves, and the inputs. What backward overwrites
    by design holds its values again afterwards."""
    given = replace(inputs, args={n: _detached(value) for n, value in inputs.args.items()})
    graph = Graph(candidate, given, prepare=lambda value: value)
    outputs = {name: value.detach() for name, value in graph.outputs.items()}
    before = {n: copied(inputs.args[n]) for n in candidate.provider.overwrites if n in inputs.args}
    if before:
        outputs = {name: value.clone() for name, value in outputs.items()}
    gradients = graph.gradients() if candidate.op.differentiable else {}
    for name, value in before.items():
        inputs.args[name].copy_(value)
    return {**outputs, **{f"grad {name}": one for name, one in gradients.items()}}, inputs


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(same_bits(value, other[name]) for name, value in one.items())


def _detached(value: Any) -> Any:
    """Another tensor in the same memory; a list as it is."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def parameters(candidate: Candidate) -> Problem:
    """Inputs that are parameters give the results of what they hold, before and after a step."""
    case, names = candidate.telling(), candidate.op.differentiable
    if not names:
        return None
    first, second = (candidate.inputs(case, draw) for draw in (0, 1))
    args = {name: copied(value) for name, value in first.args.items()}
    args |= {name: torch.nn.Parameter(args[name]) for name in names}
    for inputs, when in ((first, ""), (second, " and were changed")):
        with torch.no_grad():
            for name, value in inputs.args.items():
                for mine, fresh in zip(_tensors(args[name]), _tensors(value), strict=True):
                    mine.copy_(fresh)
        given = replace(inputs, args=args)
        graph = Graph(candidate, given, prepare=lambda value: value)
        named = {f"grad {name}": one for name, one in graph.gradients().items()}
        results = {**{n: value.detach() for n, value in graph.outputs.items()}, **named}
        if _same(results, called(candidate, inputs)[0]):
            continue
        if wrong := candidate.wrong(case, results, inputs):
            return case, f"where inputs are parameters{when}: {wrong[0]}"
    return None


def in_place(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong with an op that works in place: on new contents in the same tensors, also if
    they came through ``.data``; or where autograd does not learn what was changed, as it does of
    the reference."""
    first, second = (replace(candidate.inputs(case, draw), fresh=[]) for draw in (0, 1))
    told = []
    for one in (candidate.op["eager"], candidate.provider):
        args = {name: copied(value) for name, value in first.args.items()}
        before = [value._version for value in _changing(candidate, args)]
        outputs_of(replace(candidate, provider=one), args, first.params)
        after = [value._version for value in _changing(candidate, args)]
        told.append(all(map(int.__lt__, before, after)))
    calls = ((second, "on new contents", False), (first, "on contents changed through .data", True))
    for inputs, what, unnoticed in calls:
        for name, value in inputs.args.items():
            for mine, fresh in zip(_tensors(args[name]), _tensors(value), strict=True):
                (mine.data if unnoticed else mine).copy_(fresh)
        outputs_of(candidate, args, inputs.params)
        if wrong := candidate.wrong(case, mutated_results(candidate.op, args), inputs):
            return case, f"a call in the same tensors, {what}: {wrong[0]}"
    if told == [True, False]:
        text = "autograd does not learn that its tensors were changed: their version is the same"
        hint = "call torch.autograd.graph.increment_version on each tensor that a kernel writes"
        return case, f"{text}; {hint}", Rank.UNSAFE
    return None


def _changing(candidate: Candidate, args: Leaves) -> Iterator[torch.Tensor]:
    for name in candidate.op.mutated:
        yield from _tensors(args[name])


def masked(candidate: Candidate, case: OpCase) -> Problem:
    """What depends on what the masks of interpreted loads leave out, where they name no other
    value: Triton leaves that undefined. Compilers of today give 0, so it is advice."""
    if not candidate.interpreted:
        return None
    from tinyllama.harness.kernels.compiler_hints import UNDEFINED
    from tinyllama.harness.kernels.launch_cache import among

    inputs = candidate.inputs(case)
    usual = candidate.results(inputs)
    with among(UNDEFINED, None):
        found = candidate.results(inputs)
    if wrong := [name for name, one in usual.items() if not same_bits(one, found[name])]:
        text = "what the mask of a load leaves out, without `other`, changes"
        return case, f"{text} {', '.join(wrong)}", Rank.WARNING
    return _in_tf32(candidate)


def _in_tf32(candidate: Candidate) -> Problem:
    """What would have too large an error on a GPU, where `tl.dot` uses tf32 for float32 unless
    asked for another precision. The interpreter's products are exact otherwise."""
    if torch.float32 not in candidate.dtypes or torch.get_float32_matmul_precision() != "highest":
        return None
    from tinyllama.harness.kernels.compiler_hints import TF32
    from tinyllama.harness.kernels.launch_cache import among

    case = candidate.smallest(torch.float32)
    inputs = candidate.inputs(case)
    with among(TF32, None):
        found = candidate.results(inputs)
    if wrong := candidate.wrong(case, found, inputs):
        text = "where products of float32 are tf32, as tl.dot's are without input_precision"
        return case, f"{text}: {wrong[0]}", Rank.WARNING
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]
