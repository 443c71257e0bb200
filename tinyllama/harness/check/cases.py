"""The cases that follow from a declaration.

For each provider: every shape in every dtype; then, on the first shape, every layout of the
inputs, every layout of the upstream gradients, every extreme distribution, each upstream gradient
absent alone, and subsets of the gradients that are wanted. Extreme distributions are also tried on
the two largest shapes, which take several blocks of a kernel. A case that a provider does not cover
has a name and a reason.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from tinyllama.harness.check.compare import SLACK, Comparison, Reference, compare
from tinyllama.harness.check.evaluate import (
    GradientError,
    Inputs,
    evaluate,
    is_gradient,
    leaves,
    make_inputs,
    shapes_of,
)
from tinyllama.harness.check.guards import PoisonedMemory
from tinyllama.harness.check.layouts import (
    ABOUT,
    FAINT,
    LAYOUTS,
    RARE,
    REPEATING,
    TIED,
    UPSTREAMS,
    deep,
)
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.specs import Case, Terms
from tinyllama.harness.kernels.precision import SHORT

# Roundings of sums in float32 add up, along an axis that is long or where terms are equal: right
# results were off by up to 6 times the usual bound. In 16 bits they are not seen.
WIDER = 16.0
EQUAL = {"expanded", "summed"}  # layouts that make terms equal; of `TIED` little is asked
NOTHING = 2.0**-40  # of the size of terms: zero, up to roundings of float64
CANCELLED = 2.0**-10  # of the size of terms: the most that their roundings leave
PERTURBATIONS = 8  # draws that estimate how sensitive a result is to rounding
SUBSETS = (3, 5)  # inputs of which every part is wanted alone: in a suite, and thorough


@dataclass(frozen=True)
class References:
    """Results of the reference, by name: in the case's dtype, in float64, and in float64 on inputs
    that were moved by a rounding. off_by: as declared, of outputs of integers. magnitudes: of what
    cancels, where the op declares it (`Op.magnitude`); terms: how that is rounded."""

    eager: dict[str, torch.Tensor]
    oracle: dict[str, torch.Tensor]
    perturbed: list[dict[str, torch.Tensor]]
    off_by: Mapping[str, int] = field(default_factory=dict)
    magnitudes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    _cache: dict[str, Reference] = field(default_factory=dict, init=False)  # not of a `replace`

    def of(self, name: str) -> Reference:
        if name not in self._cache:
            self._cache[name] = Reference(
                self.eager[name],
                self.oracle[name],
                [results[name] for results in self.perturbed],
                self.magnitudes.get(name),
                self.off_by.get(name, 0),
                self.terms,
            )
        return self._cache[name]

    def asked_for(self, names: Collection[str] | None) -> "References":
        """Without the gradients of other inputs than these; None: all of them."""
        if names is None:
            return self
        named = {f"grad {name}" for name in names}

        def part(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {n: x for n, x in results.items() if n in named or not is_gradient(n)}

        results = part(self.eager), part(self.oracle), [*map(part, self.perturbed)]
        references = References(*results, self.off_by, self.magnitudes, self.terms)
        references._cache.update(self._cache)
        return references


@dataclass(frozen=True)
class OpCase:
    """One check of one provider: a shape, a dtype, and at most one variation of the inputs.

    absent: the output that gets no upstream gradient. wanted: the inputs whose gradients are asked
    for, where not all are; () for none. alone: the only input that has the layout; the others are
    contiguous.
    """

    op: Op
    provider: Provider
    case: Case
    dtype: torch.dtype
    extreme: str | None = None
    layout: str = "contiguous"
    upstream: str = "contiguous"
    absent: str | None = None
    wanted: tuple[str, ...] | None = None
    alone: str | None = None

    def __str__(self) -> str:
        parts = [str(self.provider), str(self.case), SHORT[self.dtype]]
        if self.extreme:
            parts.append(self.extreme)
        if self.layout != "contiguous":
            parts.append(f"{self.layout}_{self.alone or 'inputs'}")
        if self.upstream != "contiguous":
            parts.append(f"{self.upstream}_grads")
        if self.absent:
            parts.append(f"no_{self.absent}_grad")
        if self.wanted is not None:
            parts.append(f"only_grad_{'_'.join(self.wanted)}" if self.wanted else "no_grad")
        return "-".join(parts)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis and IPython show it: by its name, not field by field."""
        printer.text(str(self))

    @property
    def varied(self) -> bool:
        """Whether it differs from the plain case of its shape and dtype."""
        layouts = {self.layout, self.upstream}
        of_values = self.extreme or self.absent or self.wanted is not None
        return bool(of_values) or layouts != {"contiguous"}

    @property
    def layout_text(self) -> str:
        """How inputs and upstream gradients lie in memory, in words; "" where they are dense."""
        sides = {f"{self.alone} alone" if self.alone else "inputs": self.layout}
        sides["upstream gradients"] = self.upstream
        if self.layout == self.upstream:
            sides = {"inputs and upstream gradients": self.layout}
        return ", ".join(f"{side}: {ABOUT[x]}" for side, x in sides.items() if x in ABOUT)

    def of_equal_values(self) -> "OpCase":
        """The plainest case of the reference whose inputs have the same values: a layout says where
        they lie, but for those that repeat some of them."""
        inputs, upstream = self.layout, self.upstream
        return replace(
            self,
            provider=self.op["eager"],
            layout=inputs if inputs in REPEATING else "contiguous",
            upstream=upstream if upstream in REPEATING else "contiguous",
            alone=self.alone if inputs in REPEATING else None,
            wanted=None,
        )

    def unsupported(self) -> str | None:
        """Why the provider does not cover this case; None when it does."""
        if self.dtype not in self.provider.dtypes:
            return f"{self.provider} does not support {SHORT[self.dtype]}"
        return self.provider.supports(self.op.numbers(self.case.dims))

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        inputs = make_inputs(
            self.op,
            self.case,
            self.dtype,
            device,
            seed=seed,
            extreme=self.extreme,
            layout=self.layout,
            upstream=self.upstream,
        )
        if self.alone:
            dense = replace(self, layout="contiguous", alone=None).inputs(device, seed).args
            inputs = replace(inputs, args={**dense, self.alone: inputs.args[self.alone]})
        if self.absent:
            inputs = replace(inputs, upstream={**inputs.upstream, self.absent: None})
        return replace(inputs, wanted=self.wanted)

    def compare(self, device: torch.device | str = "cpu", seed: int = 0) -> list[Comparison]:
        """Run the provider and compare every result with eager's.

        The provider runs first, on poisoned memory, so that it cannot find the reference's results
        there.
        """
        inputs, provider = self.inputs(device, seed), self.provider
        with PoisonedMemory():
            results = evaluate(
                self.op, provider.call, inputs, provider.overwrites, dtypes=provider.output_dtypes
            )
        return self.judge(results, inputs, slack=SLACK * provider.slack_in(self.dtype))

    def judge(
        self,
        results: dict[str, torch.Tensor],
        inputs: Inputs,
        *,
        slack: float = SLACK,
        references: References | None = None,
        of_elements: float | None = None,
    ) -> list[Comparison]:
        """Results against the reference in the same dtype and in float64, those that are missing
        too; empty ones have no error. of_elements: as `compare` takes it.

        Raises GradientError for one that is not zero where the reference has none.
        """
        references = references or self.references(inputs)
        if EQUAL & {self.layout, self.upstream} and self.dtype is torch.float32:
            slack *= WIDER
        oracle = references.oracle
        for name, value in results.items():
            if name not in oracle and value.any():
                raise GradientError(f"{self.op.name}: {name} is not zero")
        by_name = {name: references.of(name) for name, value in oracle.items() if value.numel()}
        least = median(reference.gain for reference in by_name.values()) if by_name else 1.0

        def compared(name: str, result: torch.Tensor) -> Comparison:
            gain = max(least, by_name[name].gain)
            return compare(
                name, result, by_name[name], gain=gain, slack=slack, of_elements=of_elements
            )

        comparisons = []
        for name in by_name:
            if name not in results:
                comparisons.append(Comparison.missing(name))
                continue
            comparison = compared(name, results[name])
            if comparison.may_cancel:
                rest = without_cancelled(name, results[name], oracle[name], inputs)
                comparison = compared(name, rest)
            comparisons.append(comparison)
        if not {*EQUAL, *TIED} & {self.layout, self.upstream}:
            return comparisons
        # Equal elements have equal roundings, which do not average out along the oracle: in a layer
        # norm of equal elements they are all that is left.
        return [comparison.without("scale") for comparison in comparisons]

    def references(self, inputs: Inputs, draws: int = PERTURBATIONS) -> References:
        """What results for these inputs are compared with; the same for every provider. draws: of
        inputs that are moved by a rounding."""
        reference = self.op["eager"].call
        oracle = evaluate(self.op, reference, inputs.double())
        return References(
            evaluate(self.op, reference, inputs.dense()),
            oracle,
            [
                evaluate(self.op, reference, inputs.perturbed(n), watched=False)
                for n in range(draws)
            ],
            {name: output.off_by for name, output in self.op.outputs.items()},
            self.magnitudes(inputs.double(), oracle),
            self.op.terms,
        )

    def magnitudes(
        self, exact: Inputs, oracle: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Of what cancels in results for these inputs; ``oracle``: the results in float64."""
        if self.op.magnitudes is None:
            return {}
        upstream = {
            name: torch.zeros_like(oracle[name]) if gradient is None else gradient
            for name, gradient in exact.upstream.items()
        }
        return self.op.magnitudes(**exact.args, upstream=upstream, **exact.params)


def op_cases(
    ops: Iterable[Op],
    *,
    providers: Iterable[str] | None = None,
    thorough: bool = False,
) -> Iterator[OpCase]:
    """Every case of every provider of these ops. The reference is one of them: it must agree with
    itself in float64 within its own error, which finds a reference that modifies its inputs. All
    providers' cases of one kind follow each other: they share what they are compared with.

    thorough: with every part of more inputs wanted alone, and with inputs in the layouts `TIED`,
        whose values may cancel, as in a layer norm: whoever compares them has to ask whether they
        are wrong densely, too."""
    for op in ops:
        chosen = [p for p in op.providers.values() if providers is None or p.name in providers]
        in_turn = itertools.zip_longest(*(_cases(op, p, thorough) for p in chosen))
        yield from (case for alike in in_turn for case in alike if case is not None)


def _cases(op: Op, provider: Provider, thorough: bool = False) -> Iterator[OpCase]:
    op = provider.offered(op)
    for dtype in op.dtypes:
        for case in op.cases:
            yield OpCase(op, provider, case, dtype)
        first = OpCase(op, provider, op.cases[0], dtype)
        for extreme in op.extremes:
            yield replace(first, extreme=extreme)
        for layout in LAYOUTS[1:]:
            yield replace(first, layout=layout)
        if op.differentiable:
            for upstream in UPSTREAMS[1:]:
                yield replace(first, upstream=upstream)
            yield replace(first, upstream=FAINT)
        floating = [name for name, output in op.outputs.items() if output.floating]
        for output in floating if len(floating) > 1 else ():
            yield replace(first, absent=output)
    first_case = OpCase(op, provider, op.cases[0], op.dtypes[0])
    yield from _rare(first_case, thorough)
    for output in floating if len(floating) > 1 else ():
        for name in op.differentiable:
            yield replace(first_case, absent=output, wanted=(name,))
    for wanted in _subsets(op.differentiable, SUBSETS[thorough]):
        yield replace(first_case, wanted=wanted)
    for case in sorted(op.cases[1:], key=lambda case: elements(op, case))[-2:]:
        for extreme in op.extremes:
            yield replace(first_case, case=case, extreme=extreme)


def _rare(case_of_op: OpCase, tied: bool) -> Iterator[OpCase]:
    """The case in each of `RARE` that some input has axes for, and some upstream gradient."""
    op, dims = case_of_op.op, case_of_op.case.dims
    outputs = op.outputs_for({**op.params, **case_of_op.case.params}) if op.differentiable else {}
    for layout in RARE:
        cases = replace(case_of_op, layout=layout), replace(case_of_op, upstream=layout)
        for side, case in zip((op.inputs, outputs), cases, strict=True):
            shapes = (shape for declared in side.values() for shape in shapes_of(declared, dims))
            if (tied or case.layout not in TIED) and any(deep(layout, s) for s in shapes):
                yield case


def _subsets(names: Collection[str], most: int) -> Iterator[tuple[str, ...]]:
    """Every part of these names, neither none nor all; of more than ``most``, each one alone and
    all but each one."""
    counts = range(1, len(names)) if len(names) <= most else (1, len(names) - 1)
    for count in counts:
        yield from itertools.combinations(names, count)


def elements(op: Op, case: Case) -> int:
    """The number of elements of a case's inputs."""
    shapes = [shape for declared in op.inputs.values() for shape in shapes_of(declared, case.dims)]
    return sum(map(math.prod, shapes))


def full_cases(ops: Iterable[Op]) -> Iterator[OpCase]:
    """The combinations that `op_cases` leaves out: every shape with every variation."""
    for op in ops:
        for provider in op.providers.values():
            quick = {str(case) for case in _cases(op, provider)}
            layouts = list(zip(LAYOUTS, UPSTREAMS, strict=True))
            parts = list(_subsets(op.differentiable, most=4))
            for dtype in op.dtypes:
                of_dtype = [OpCase(op, provider, case, dtype) for case in op.cases]
                varied = itertools.product(of_dtype, (None, *op.extremes), layouts)
                full = [replace(c, extreme=e, layout=x, upstream=y) for c, e, (x, y) in varied]
                full += [replace(c, wanted=part) for part in parts for c in of_dtype]
                yield from (case for case in full if str(case) not in quick)


def without_cancelled(
    name: str, result: torch.Tensor, oracle: torch.Tensor, inputs: Inputs
) -> torch.Tensor:
    """A result, with zeros where the right one is zero whatever the inputs are, since terms cancel,
    and this one is no more than their rounding: as in the gradient of a layer norm over one
    element, or of a query with one key. Terms are as large as the upstream gradients, or inputs."""
    if not result.is_floating_point() or not result.numel():
        return result
    tensors = leaves(inputs.upstream if is_gradient(name) else inputs.args)
    floating = (x for x in tensors if x.is_floating_point() and x.numel())
    size = max((float(x.double().abs().max()) for x in floating), default=0.0)
    if not math.isfinite(size):
        return result
    share = max(CANCELLED, torch.finfo(result.dtype).eps)
    cancelled = (oracle.abs() <= NOTHING * size) & (result.double().abs() <= share * size)
    return result.masked_fill(cancelled, 0.0)
