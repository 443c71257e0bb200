"""What a history of calls is, and how it is played.

A history is a list of steps, such as ``call A; call B; backward A``. `find` takes them one by one.
After each of them,

- results are right for the values that the inputs had at the time of the call;
- no argument or result of a call or a backward pass is changed, but by the step;
- outputs share no memory with inputs, nor do their elements;
- settings of the process are as before, and in the end the memory of dropped calls is released.

A fault that the op's reference has in the same history is no fault of a candidate. Calls are named
after the values of their inputs: A2 has those of A. They get copies, unless the step says more.
"""

import contextlib
import functools
import gc
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tinyllama.harness.check.candidate import Candidate, Problem, leaves
from tinyllama.harness.check.cases import WIDER, OpCase, References
from tinyllama.harness.check.compare import same_bits
from tinyllama.harness.check.crash import place
from tinyllama.harness.check.evaluate import (
    GradientError,
    Inputs,
    Leaves,
    copied,
    mutated_results,
    raising_in,
)
from tinyllama.harness.check.finding import Rank
from tinyllama.harness.check.global_settings import restore, set_unusual, setting, snapshot
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.kernels.compiler_hints import TF32, UNDEFINED
from tinyllama.harness.kernels.launch_cache import among
from tinyllama.harness.machine.modes import DispatchMode

SHOWN = 6  # steps of a history in a message: the last ones
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
BF16, F64 = torch.bfloat16, torch.float64


def _dense(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)


# What a step may say of a call, by the device.
WITHIN: dict[str, Callable[[torch.device], contextlib.AbstractContextManager[Any]]] = {
    "without gradients": lambda device: torch.no_grad(),
    "in inference mode": lambda device: torch.inference_mode(),
    "under autocast": lambda device: torch.autocast(device.type, BF16),
    "with default dtype bfloat16": lambda device: setting("the default dtype", BF16),
    "with default dtype float64": lambda device: setting("the default dtype", F64),
    "with deterministic algorithms": lambda device: setting("deterministic algorithms", 1),
    "with another default device, where device= matters": lambda device: torch.device("meta"),
    "with garbage where masks are false and `other` is missing": lambda device: among(UNDEFINED, 1),
    "where products of float32 are tf32, as tl.dot's are without input_precision": lambda device: (
        among(TF32, 1)
    ),
    # As of `torch.autograd.graph.save_on_cpu`, and of checkpoints.
    "with saved tensors moved": lambda device: torch.autograd.graph.saved_tensors_hooks(
        _dense, _dense
    ),
}
NO_GRADIENT = "without gradients", "in inference mode"


class Graph:
    """One forward call of a candidate, whose gradients can be computed any number of times.

    outputs: by name; upstream: the gradients that some of them get; args: the call's inputs.
    prepare: makes the argument of each input, a copy by default. within: a context for the call.
    differentiated: whether any gradient is asked for.
    """

    def __init__(
        self,
        candidate: Candidate,
        inputs: Inputs,
        *,
        prepare: Callable[[Any], Any] = copied,
        within: contextlib.AbstractContextManager[Any] | None = None,
        differentiated: bool = True,
    ) -> None:
        self.op, self.call = candidate.op, candidate.provider.call
        self.args: Leaves = {name: prepare(value) for name, value in inputs.args.items()}
        for name in self.op.differentiable if differentiated else ():
            self.args[name].requires_grad_()
        with within or contextlib.nullcontext(), raising_in(self.op, self.call):
            outputs = several(self.call(*self.args.values(), **inputs.params))
        self.outputs = dict(zip(self.op.outputs, outputs, strict=False))
        self.upstream = {name: g for name, g in inputs.upstream.items() if g is not None}

    def gradients(
        self, upstream: Sequence[torch.Tensor] | None = None, *, copy: bool = True
    ) -> dict[str, torch.Tensor]:
        """Gradients by input name. upstream: in the place of copies of the call's own, in the
        dtypes of their outputs. copy: they have memory of their own, whatever the backward pass
        returns.

        Raises GradientError for one that is missing: nothing else about it can be compared.
        """
        outputs = [self.outputs[name] for name in self.upstream]
        if upstream is None:
            pairs = zip(self.upstream.values(), outputs, strict=True)
            upstream = [gradient.clone().to(output.dtype) for gradient, output in pairs]
        inputs = [self.args[n] for n in self.op.differentiable]
        with raising_in(self.op, self.call):
            gradients = torch.autograd.grad(
                outputs, inputs, upstream, retain_graph=True, allow_unused=True
            )
        by_name = dict(zip(self.op.differentiable, gradients, strict=True))
        if missing := sorted(name for name, gradient in by_name.items() if gradient is None):
            raise GradientError(f"{self.op.name}: no gradient for {', '.join(missing)}")
        return {name: gradient.clone() if copy else gradient for name, gradient in by_name.items()}

    def results(self, upstream: Sequence[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Outputs by name, and gradients as ``grad x``, as `evaluate` returns them."""
        gradients = self.gradients(upstream) if self.op.differentiable else {}
        outputs = {name: value.detach() for name, value in self.outputs.items()}
        return outputs | {f"grad {name}": gradient for name, gradient in gradients.items()}


@dataclass
class Values:
    """The values of a call's inputs, and what results for them are right.

    arrange: how the inputs lie, as tensors of their own. about: what is special, in words.
    """

    case: OpCase
    inputs: Inputs
    arrange: Callable[[Leaves], Leaves] = lambda args: {n: copied(v) for n, v in args.items()}
    about: str = ""

    @functools.cached_property
    def references(self) -> References:
        return self.case.references(self.inputs)

    def wrong(self, candidate: Candidate, results: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """What is wrong with some results of a call, by the result's name."""
        eager, wrong = self.references.eager, dict[str, str]()
        for name in {*results} & {*eager} - {*candidate.provider.output_dtypes}:
            if results[name].dtype != eager[name].dtype:
                wrong[name] = f"{name} has dtype {results[name].dtype}, not {eager[name].dtype}"
        slack = WIDER * candidate.slack[self.case.dtype]  # not each case is a declared one
        comparisons = self.case.judge(
            dict(results), self.inputs, slack=slack, references=self.references
        )
        return wrong | {c.name: str(c) for c in comparisons if c.name in results and not c.passed}


@dataclass(frozen=True)
class History:
    """steps: as in ``call A; backward A``. rank: of its faults. may_raise: an error is a refusal,
    which other checks are about."""

    steps: str
    rank: Rank = Rank.WRONG
    may_raise: bool = False


class _Fault(NamedTuple):
    """steps: up to the one that shows it. rank: None for that of the history."""

    steps: str
    text: str
    rank: Rank | None


def find(candidate: Candidate, history: History, values: Callable[[str], Values | None]) -> Problem:
    """The first fault of the candidate in a history that the reference does not have, too. None
    where there are no such values. An error is a fault where faults are warnings.

    values: those of a call, by its name without digits.
    Raises what the candidate raises, where the reference raises nothing.
    """
    by_name = dict[str, Values]()
    for name in re.findall(r"(?:call|write) ([a-zA-Z_]+)", history.steps):
        if (of_call := values(name)) is None:
            return None
        by_name[name] = of_call
    error: Exception | None = None
    faults = dict[str, _Fault]()
    try:
        faults = _Play(candidate, by_name).faults_of(history)
    except Exception as raised:
        error = raised
    if not faults and (error is None or history.may_raise):
        return None
    try:
        of_reference = _Play(candidate.reference, by_name).faults_of(history)
    except Exception:
        return None
    if error is not None:
        if history.rank is not Rank.WARNING:
            raise error
        text = str(error).strip().partition("\n")[0]
        text = f"{place(error)}{type(error).__name__}: {text}"
        faults[""] = _Fault(history.steps, text, Rank.WARNING)
    new = [fault for key, fault in faults.items() if key not in of_reference]
    if not new:
        return None
    first = min(new, key=lambda fault: (fault.rank or history.rank) is Rank.WARNING)
    texts = [fault.text for fault in new if (fault.steps, fault.rank) == (first.steps, first.rank)]
    texts += [
        f"{name} is a call with {of_call.about}"
        for name, of_call in by_name.items()
        if of_call.about and name in first.steps
    ]
    case = next(iter(by_name.values())).case
    return case, f"{first.steps}: {'; '.join(texts)}", first.rank or history.rank


class _Record:
    """A tensor that a call took or returned, with a copy. kind: "inputs", "outputs", "gradients" or
    ".grad"."""

    def __init__(self, call: str, kind: str, name: str, tensor: torch.Tensor) -> None:
        self.call, self.kind, self.name, self.tensor = call, kind, name, tensor
        self.refresh()

    def refresh(self) -> None:
        self.copy = self.tensor.detach().clone()

    def __str__(self) -> str:
        return f"{self.name} of {self.call}"


class _Play:
    """A history that is played by one provider. Its methods named after verbs take a step."""

    def __init__(self, candidate: Candidate, values: Mapping[str, Values]) -> None:
        self.candidate, self.values = candidate, values
        self.graphs: dict[str, Graph] = {}
        self.watches: dict[str, _Watch] = {}
        self.passes: dict[str, int] = {}  # that have added to .grad
        self.records: list[_Record] = []
        self.dropped: dict[str, StorageWeakRef] = {}
        self.faults: dict[str, _Fault] = {}
        self.so_far: list[str] = []

    def faults_of(self, history: History) -> dict[str, _Fault]:
        """Every fault by what identifies it. Raises what the provider raises."""
        original = self.before = snapshot()
        collects = gc.isenabled()
        gc.disable()
        try:
            for step in history.steps.split("; "):
                self.so_far.append(step)
                verb, call, *_ = step.split()
                try:
                    getattr(self, verb)(step, call)
                except RuntimeError:
                    if step.endswith("or refuse"):  # says autograd, as it may
                        break
                    raise
                self._look()
            self._look_at_memory()
        finally:
            restore(original)
            if collects:
                gc.enable()
        return self.faults

    def _fault(self, key: str, text: str, rank: Rank | None = None) -> None:
        steps = "; ".join(["..."] * (len(self.so_far) > SHOWN) + self.so_far[-SHOWN:])
        self.faults.setdefault(f"{len(self.so_far)} {key}", _Fault(steps, text, rank))

    def _record(self, call: str, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.records += [_Record(call, kind, name, tensor) for name, tensor in tensors.items()]

    def _look(self) -> None:
        """Note what has changed since it was recorded."""
        for record in self.records:
            if not same_bits(record.tensor, record.copy):
                self._fault(f"changes {record}", f"{record} has changed")
                record.refresh()

    def _look_at_settings(self) -> None:
        """Note what a call has changed, and undo it: the reference depends on it, too."""
        for name in restore(self.before):
            self._fault(f"sets {name}", f"a call changes {name}", Rank.UNSAFE)

    def _values(self, call: str) -> Values:
        return self.values[call.rstrip("0123456789")]

    # -- steps

    def set(self, step: str, call: str) -> None:
        """set unusual settings"""
        set_unusual()
        self.before = snapshot()

    def call(self, step: str, call: str) -> None:
        """call A [and is refused | and look away] [in the tensors of B | in the memory of B, as far
        as these have the same values] [watched], and what `WITHIN` has"""
        op, values = self.candidate.op, self._values(call)
        args = values.arrange(values.inputs.args)
        if match := re.search(r"in the (tensors|memory) of (\w+)", step):
            earlier = self.graphs[match[2]].args
            for name, value in earlier.items():
                if _equal(value, args[name]):
                    args[name] = _anew(value) if match[1] == "memory" else value
        changing = named(args, op.mutated)
        self._record(call, "inputs", {n: v for n, v in named(args).items() if n not in changing})
        versions = [tensor._version for tensor in changing.values()]
        inputs = replace(values.inputs, args=args)
        differentiated = not any(phrase in step for phrase in NO_GRADIENT)
        try:
            with contextlib.ExitStack() as within:
                for context in (make for phrase, make in WITHIN.items() if phrase in step):
                    within.enter_context(context(self.candidate.device))
                if "is refused" in step:  # what it does until then is no fault
                    within.enter_context(self.candidate.limits(Bounds()))
                if "watched" in step:
                    self.watches[call] = within.enter_context(_Watch())
                graph = Graph(
                    self.candidate, inputs, prepare=lambda v: v, differentiated=differentiated
                )
        except Exception:
            if "look away" in step or "is refused" in step:
                return
            raise
        finally:
            self._look_at_settings()
        self.graphs[call] = graph
        outputs = {n: value.detach() for n, value in graph.outputs.items() if value is not None}
        self._record(call, "outputs", outputs)
        if "look away" in step:
            return
        if "is refused" in step:
            text = f"{call} gives a result where the reference raises an error: raise one, too"
            return self._fault("is taken", text, Rank.WARNING)
        after = [tensor._version for tensor in changing.values()]
        if any(map(int.__eq__, versions, after)):
            text = "autograd does not learn that its tensors were changed: their version is the "
            text += "same; call torch.autograd.graph.increment_version on each"
            self._fault("version", text, Rank.UNSAFE)
        self._judge(call, mutated_results(op, args) if op.mutated else outputs)
        self._look_at_outputs(args, outputs)
        waits = self.candidate.provider.waits or self.candidate.provider.counts_on_host
        if call in self.watches and (reads := self.watches[call].reads) and not waits:
            text = f"values are read back from the device ({', '.join(reads)}): "
            text += "no device graph captures it; declare waits=True"
            self._fault("reads", text, Rank.WARNING)

    def _judge(self, call: str, results: Mapping[str, torch.Tensor]) -> None:
        for name, text in self._values(call).wrong(self.candidate, results).items():
            self._fault(f"wrong {name}", text)

    def _look_at_outputs(self, args: Leaves, outputs: Mapping[str, torch.Tensor]) -> None:
        for name, of in sharing(args, outputs).items():
            text = f"{name} shares memory with {of}: a change of one changes both"
            self._fault(f"shares {name}", text, Rank.UNSAFE)
        dense = all(tensor.is_contiguous() for tensor in named(args).values())
        for name, output in outputs.items():
            if _overlaps(output):
                text = f"elements of {name} share memory: it has strides {output.stride()}"
                self._fault(f"overlaps {name}", text, Rank.UNSAFE)
            if dense and not output.is_contiguous():
                text = f"{name} has strides {output.stride()}, the reference's is contiguous"
                self._fault(f"strides {name}", text, Rank.WARNING)

    def backward(self, step: str, call: str) -> None:
        """backward A [doubled] [in a thread] [into .grad] [or refuse]"""
        graph, op = self.graphs[call], self.candidate.op
        if not op.differentiable or self.candidate.provider.overwrites:
            return
        upstream = [g * 2 if "doubled" in step else copied(g) for g in graph.upstream.values()]
        copies = [gradient.clone() for gradient in upstream]

        def run() -> dict[str, torch.Tensor]:
            with self.watches.get(call, contextlib.nullcontext()):
                if "into .grad" not in step:
                    return graph.gradients(upstream, copy=False)
                outputs = [graph.outputs[name] for name in graph.upstream]
                torch.autograd.backward(outputs, upstream, retain_graph=True)
                grads = {name: graph.args[name].grad for name in op.differentiable}
                return {name: grad for name, grad in grads.items() if grad is not None}

        try:
            if "in a thread" in step:  # as of a GPU, whose backward pass has its own
                with ThreadPoolExecutor(1) as thread:
                    gradients = thread.submit(run).result()
            else:
                gradients = run()
        finally:
            self._look_at_settings()
        for name, gradient, copy in zip(graph.upstream, upstream, copies, strict=True):
            if not same_bits(gradient, copy):
                self._fault(f"upstream {name}", f"the upstream gradient of {name} has changed")
        kind = ".grad" if "into .grad" in step else "gradients"
        if kind == ".grad":  # it has changed
            self.records = [
                record for record in self.records if (record.call, record.kind) != (call, kind)
            ]
            self.passes[call] = self.passes.get(call, 0) + 1
        prefix = ".grad of" if kind == ".grad" else "grad"
        self._record(call, kind, {f"{prefix} {name}": grad for name, grad in gradients.items()})
        factor = self.passes[call] if kind == ".grad" else 2 if "doubled" in step else 1
        self._judge(call, {f"grad {name}": grad / factor for name, grad in gradients.items()})
        for name in op.differentiable:
            if (graph.args[name].grad is None) is (call in self.passes):
                how = "missing" if call in self.passes else "changed by torch.autograd.grad"
                self._fault(f".grad {name}", f".grad of {name} is {how}")

    def write(self, step: str, call: str) -> None:
        """write A to B [through .data]: the values of A to the inputs of call B"""
        args, values = self.graphs[step.split()[3]].args, self._values(call).inputs.args
        with torch.no_grad():
            for tensor, fresh in zip(leaves(args), leaves(values), strict=True):
                (tensor.data if "through .data" in step else tensor).copy_(fresh)
        for record in self.records:
            if record.kind == "inputs":
                record.refresh()

    def double(self, step: str, kind: str) -> None:
        """double outputs|inputs|gradients|.grad of A [or refuse], in place, unseen by autograd"""
        call = step.split()[3]
        records = [record for record in self.records if (record.call, record.kind) == (call, kind)]
        for record in records:
            if record.tensor.is_floating_point() and not _overlaps(record.tensor):
                with torch.no_grad():
                    record.tensor.mul_(2)
            if kind == ".grad":  # each leaf has memory of its own for it
                record.refresh()
                self._look()
        for record in records:
            record.refresh()

    def drop(self, step: str, call: str) -> None:
        """drop A: all arguments and results of call A"""
        dropped = [record for record in self.records if record.call == call]
        self.dropped |= {
            str(record): StorageWeakRef(record.tensor.untyped_storage()) for record in dropped
        }
        self.records = [record for record in self.records if record.call != call]
        del self.graphs[call]
        if call in self.watches:
            self.dropped |= self.watches.pop(call).storages

    def _look_at_memory(self) -> None:
        """Note what is still there of dropped calls; only then does Python collect cycles."""
        alive = [name for name, storage in self.dropped.items() if not storage.expired()]
        if alive:
            gc.collect()
        for name in alive:
            if self.dropped[name].expired():
                text = "is released only when Python collects cycles: save it for backward"
                self._fault(f"memory {name}", f"memory of {name} {text}", Rank.WARNING)
            else:
                text = f"memory of {name} is not released: something keeps it"
                self._fault(f"memory {name}", text, Rank.UNSAFE)


class _Watch(DispatchMode):
    """Notes what torch does in a call outside of kernels: what waits for values, new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[str, None] = {}
        self.storages: dict[str, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if launching():  # this is the harness's own
            return result
        name = func._schema.name.partition("::")[2]
        if name in READS:
            self.reads[name] = None
        earlier = {None, *map(_address, (*args, *(kwargs or {}).values()))}
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if _address(value) not in earlier:  # else it is a view, or was changed in place
                storage = StorageWeakRef(value.untyped_storage())
                self.storages[f"a result of {name} ({len(self.storages) + 1})"] = storage
        return result


def _address(value: Any) -> int | None:
    """Of the memory of a tensor."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def launching() -> bool:
    """Whether a kernel is interpreted just now."""
    module = sys.modules.get("tinyllama.harness.kernels.interpreter_values")
    return module is not None and bool(module.RUNNING)


def named(args: Leaves, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors among arguments by name; those of a list are numbered."""
    tensors: dict[str, torch.Tensor] = {}
    for name in args if names is None else names:
        if isinstance(args[name], list):
            tensors |= {f"{name}[{place}]": tensor for place, tensor in enumerate(args[name])}
        else:
            tensors[name] = args[name]
    return tensors


def _equal(value: Any, other: Any) -> bool:
    """Whether two tensors, or the tensors of two lists, have the same values."""
    pairs = zip(leaves({"": value}), leaves({"": other}), strict=True)
    return all(same_bits(x, y) for x, y in pairs)


def _anew(value: Any) -> Any:
    """Another tensor in the same memory, of whose changes autograd knows nothing; or a list."""
    return [_anew(tensor) for tensor in value] if isinstance(value, list) else value.data


def _overlaps(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 and any(size > 1 and not stride for size, stride in pairs)


def sharing(args: Leaves, outputs: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The outputs that lie in the storage of an input, and that input."""
    names = {_address(value): name for name, value in named(args).items() if value.numel()}
    return {n: names[_address(x)] for n, x in outputs.items() if _address(x) in names}
