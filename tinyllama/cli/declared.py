"""The declaration of a function that is to be like another one, written as a Python file.

Both functions are imported. The reference is called on small tensors of several sizes; the shapes
and dtypes of the declared outputs follow from its results.
"""

import ast
import contextlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.check.evaluate import evaluate, make_inputs
from tinyllama.harness.check.finding import Finding, Provided
from tinyllama.harness.check.process import Checks
from tinyllama.harness.check.remote import Request
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, import_name, load_about
from tinyllama.harness.declare.specs import FLOATS, Case, DeclarationError, size_of
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.harness.kernels.tuned import adopted
from tinyllama.harness.machine.device import usable_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.testing.shapes import InputShape, parse_shapes

# Sizes of the dimensions in three cases, the last dimension first: mostly no powers of two; mostly
# powers of two; the last two longer than a block. No dimension has one size in all cases, else an
# axis of an output could not be told from a number.
GENERAL = (50, 7, 3, 2, 5, 4, 6, 9)
ALIGNED = (64, 32, 4, 4, 8, 16, 3, 5)
LARGE = (260, 67, 5, 2, 3, 4, 6, 7)
ALONE = (2500,)  # the large size of a single dimension
# What was concluded of the axes of outputs must hold for these sizes, too. The reference may need
# even or long axes: an axis that is even in all three cases is even here, and none is shorter than
# in all three.
INDEPENDENT = (58, 11, 7, 6, 9, 8, 3, 6)
LONGER = 201  # more than in the general case: it changes the parity, and exceeds a block
EMPTY = inspect.Parameter.empty

TEMPLATE = '''"""{function} of {file} is to be like {like}."""

import torch

{imports}
from tinyllama.harness import Case, Op, Tensor, in_double
from tinyllama.harness.values import integers

op = Op(
    "{name}",
    inputs={{
{inputs}
    }},
    outputs={{{outputs}}},
    params={{{params}}},
    cases=[
{cases}
    ],
    dtypes=({dtypes}),
)


@op.reference
@in_double
{reference}


@op.provider("candidate", double_backward=None)  # a second derivative is right, or raises
{candidate}
'''


class Function:
    """A function as the declaration calls it.

    name: in the declaration. parameters: their names in order; None where they are not known;
    needed: those without a default. by_name: whether it takes parameters by name, which
    ``Class.apply`` does not.
    """

    def __init__(self, name: str, function: Any) -> None:
        known = _parameters(function)
        self.name, self.parameters = name, None if known is None else [*known]
        self.needed = [x for x, parameter in (known or {}).items() if parameter.default is EMPTY]
        owner = getattr(function, "__self__", None)
        self.by_name = not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function))

    def takes(self, name: str) -> bool:
        return self.parameters is None or name in self.parameters

    def defined_as(self, name: str, inputs: Sequence[str], params: Mapping[str, str]) -> str:
        """A function of this name that calls it. params: what is passed for each parameter. Inputs
        are passed by position up to the first that is elsewhere in the signature, and by name from
        there on: ``weight`` where a function takes a shape before it."""
        values = {parameter: text for parameter, text in params.items() if self.takes(parameter)}
        places = self.parameters or []
        moved = (i for i, x in enumerate(inputs) if x in places and places.index(x) != i)
        first = next(moved, len(inputs)) if self.by_name else len(inputs)
        words = [*inputs[:first], *(f"{x}={x}" for x in inputs[first:])]
        words += [f"{k}={v}" if self.by_name else v for k, v in values.items()]
        arguments = ", ".join([*inputs, *(p for p, text in params.items() if p == text)])
        return f"def {name}({arguments}):\n    return {self.name}({', '.join(words)})"


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is written in C++
        return None
    return None if any("*" in str(x) for x in parameters.values()) else parameters


class Draft:
    """The declaration of ``function`` of ``file``, with another function as its reference.

    like: ``torch.nn.functional.gelu``, or ``FILE:FUNCTION``. shape: of the inputs, see
    `tinyllama.testing.shapes`. params: ``NAME=LITERAL``. dtypes: short names; none: all
    that the reference takes. gradients: whether those are compared that the reference gives.
    device: where the reference is called; None: on the first GPU, else the CPU.

    Raises UsageError for a value that cannot be used, and where no declaration follows.
    """

    def __init__(
        self,
        file: str,
        function: str,
        *,
        like: str,
        shape: str,
        params: Sequence[str] = (),
        dtypes: Sequence[str] = (),
        gradients: bool = True,
        device: str | None = "cpu",
    ) -> None:
        self.file, self.function, self.like = Path(file), function, like
        self.device = usable_device(device)
        self.notes, self.imports, self.loaded = list[str](), list[str](), {"torch": torch}
        self.candidate = self._imported(f"{file}:{function}", f"my_{function}")
        self.inputs = self._in_order(parse_shapes(shape), self.candidate.parameters)
        self.reference = self._imported(like, "like_" + re.split("[.:]", like)[-1])
        self.literals = dict(map(_literal, params))
        functions = (self.candidate, self.reference)
        for name in self.literals:
            if not any(user.takes(name) for user in functions):
                raise UsageError(f"--param {name}: neither {function} nor {like} takes {name!r}")
        for user, text in zip(functions, (function, like), strict=True):
            self._check_complete(user, text)
        self.params = [x for x in self.literals if all(user.takes(x) for user in functions)]
        for name, value in self.literals.items():
            if not self.candidate.takes(name):
                self.notes.append(f"{name}={value} is for {like} alone: {function} takes no {name}")
        self.cases = self._cases()
        floating = [name for name, shape in self.inputs.items() if shape.floating]
        self.gradients = floating if gradients else []
        self.dtypes = [DTYPE_OF[name] for name in dtypes] or list(FLOATS)
        self.outputs = {"output": 'Tensor("")'}  # until they are known
        self.outputs = self._outputs(droppable=not dtypes)
        self.gradients = self._differentiated()

    def _in_order(
        self, shapes: dict[str, InputShape], parameters: list[str] | None
    ) -> dict[str, InputShape]:
        """The inputs in the order of the candidate's parameters, which have their names."""
        if "" in shapes:
            return {parameters[0] if parameters else "x": shapes[""]}
        names = parameters or list(shapes)
        for name in shapes.keys() - set(names):
            text = f"{self.function} has no argument {name!r}: use {', '.join(names)}"
            raise UsageError(f"--shape: {text}")
        return {name: shapes[name] for name in names if name in shapes}

    def _check_complete(self, user: "Function", name: str) -> None:
        """Raise UsageError where a function needs more arguments than there are shapes and
        parameters; the message has a line with its own names."""
        passed = [parameter for parameter in self.literals if user.takes(parameter)]
        free = [parameter for parameter in user.needed if parameter not in passed]
        if len(free) <= len(self.inputs):
            return
        axes = [" ".join(shape.axes) for shape in self.inputs.values()]
        axes += axes[-1:] * (len(free) - len(axes))
        example = ", ".join(f"{x}: {shape}" for x, shape in zip(free, axes, strict=True))
        text = f"{name} needs {', '.join(free)}, and --shape says {len(self.inputs)} of them"
        raise UsageError(
            f"{text}: name each tensor with its axes, as in --shape {example!r}, and give what is "
            "no tensor by --param NAME=LITERAL"
        )

    def _imported(self, text: str, name: str) -> Function:
        """A function by a dotted name, or of a file, under this name. It may ask for a GPU where it
        is imported, and have kernels."""
        home, _, function = text.rpartition(".")
        if text.startswith("torch."):
            name, statement = text, "import torch"
        else:
            if ":" in text:
                file, _, function = text.rpartition(":")
                folder, home = import_name(Path(file))
                sys.path.insert(0, str(folder))
                if folder != import_name(self.file)[0]:
                    self.imports += ["import sys", f"sys.path.append({str(folder)!r})"]
            statement = f"from {home} import {function} as {name}"
            self.imports.append(statement)
        try:
            with adopted(), foreign() if self.device.type == "cpu" else contextlib.nullcontext():
                exec(statement, self.loaded)
                value = eval(name, self.loaded)
        except Exception as error:
            text = f"{text!r} cannot be imported ({type(error).__name__}: {error})"
            fix = "use FILE:FUNCTION, or a dotted name such as torch.nn.functional.gelu"
            raise UsageError(f"{text}: {fix}") from error
        if hasattr(value, "fn") and hasattr(value, "run"):
            raise UsageError(
                f"{function} is a kernel of Triton: name the Python function that launches it"
            )
        return Function(name, value)

    def _cases(self) -> list[Case]:
        """The cases of the declaration, and last the one that verifies it."""
        shapes = self.inputs.values()
        names = list(dict.fromkeys(name for shape in shapes for name in shape.dimensions))[::-1]
        if len(names) > len(GENERAL):
            raise UsageError(f"--shape has {len(names)} dimensions: use at most {len(GENERAL)}")
        several = (GENERAL, ALIGNED, LARGE if names[1:] else ALONE, INDEPENDENT)
        cases = [list(zip(names, sizes, strict=False)) for sizes in several]
        return [Case().resized(**dict(reversed(sizes))) for sizes in cases]

    def _op(self) -> Op:
        """The op as far as it is declared, with the reference alone."""
        names: dict[str, Any] = {**self.loaded, "__name__": "declaration"}
        try:
            exec(self.text().partition("\n\n@op.provider")[0], names)
        except DeclarationError as error:
            raise UsageError(f"--shape: {error}") from error
        op: Op = names["op"]
        return op

    def _outputs(self, droppable: bool) -> dict[str, str]:
        """The outputs of the reference, called in each dtype and size, as the text has them."""
        op = self._op()
        general, *others = self.cases
        longer = [general.resized(**{x: size + LONGER}) for x, size in general.dims.items()]
        in_dtype = {}
        for dtype in self.dtypes:
            try:
                in_dtype[dtype] = self._results(op, general, dtype)
            except UsageError as error:
                if not droppable or not in_dtype:
                    raise
                self.notes.append(f"not in {str(dtype).removeprefix('torch.')}: {error}")
        self.dtypes = [*in_dtype]
        results = in_dtype[self.dtypes[0]]
        floating = [result for result in results if result.is_floating_point()]
        if self.gradients and not (floating and all(x.requires_grad for x in floating)):
            self.gradients = []
            self.notes.append(f"no gradients: the results of {self.like} have none")
        called = [(general, results)]
        called += [(case, self._results(op, case, self.dtypes[0])) for case in others]
        for case in longer:
            with contextlib.suppress(UsageError):  # the reference need not take it
                called.append((case, self._results(op, case, self.dtypes[0])))
        if len({len(tensors) for _, tensors in called}) > 1:
            raise self._refused(f"{self.like} has no fixed number of outputs")
        outputs = {}
        for place, result in enumerate(results):
            name = "output" if len(results) == 1 else f"output_{place + 1}"
            name = f"{name}_" if name in (*self.inputs, *self.params) else name
            axes = self._axes([(case, tensors[place].shape) for case, tensors in called], name)
            dtypes = {dtype: tensors[place].dtype for dtype, tensors in in_dtype.items()}
            fixed = any(dtype is not usual for usual, dtype in dtypes.items())
            if fixed and len(set(dtypes.values())) > 1:
                raise self._refused(f"the dtype of {name} follows no rule: {dtypes}")
            outputs[name] = f'Tensor("{axes}"{f", dtype={result.dtype}" if fixed else ""})'
        return outputs

    def _differentiated(self) -> list[str]:
        """The inputs to which the reference gives a gradient. It may detach others, for which a
        kernel that gives none is right."""
        op = self._op()
        case = op.cases[0]
        with self._refusing(f"float64, case {case}"):  # as the oracle
            inputs = make_inputs(op, case, torch.float64, self.device)
            results = evaluate(op, op["eager"].call, inputs)
        names = [name for name in self.gradients if f"grad {name}" in results]
        if without := [name for name in self.gradients if name not in names]:
            self.notes.append(f"no gradients of {', '.join(without)}: {self.like} gives none")
        return names

    def _refused(self, reason: str) -> UsageError:
        return UsageError(f"{reason}: declare it in a file instead (docs/declare.md)")

    @contextlib.contextmanager
    def _refusing(self, where: str) -> Iterator[None]:
        """Calls of the reference, whose error is a UsageError in one line."""
        try:
            yield
        except Exception as error:
            # All lines: torch names the signatures that it has below the first one.
            message = " ".join(str(error).split())[:500] or "no message"
            text = f"{self.like} raised {type(error).__name__}: {message}"
            raise self._refused(f"{text} (in {where})") from error

    def _results(self, op: Op, case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What the reference returns for the inputs of a case."""
        inputs = make_inputs(op, case, dtype, self.device)
        for name in op.differentiable:
            inputs.args[name].requires_grad_()
        with self._refusing(f"{dtype}, case {case}"):
            results = several(op["eager"].call(*inputs.args.values(), **inputs.params))
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results) or "nothing"
            raise self._refused(f"{self.like} returned {kinds}, not tensors")
        return results

    def _axes(self, shapes: Sequence[tuple[Case, torch.Size]], output: str) -> str:
        """The axes that have these sizes in the cases: as the user writes one, if that fits."""
        if len({len(shape) for _, shape in shapes}) > 1:
            texts = ", ".join(f"{tuple(shape)} for {case}" for case, shape in shapes)
            raise self._refused(f"{output} has no fixed number of axes: {texts}")
        names = list(self.cases[0].dims)
        written = [axis for shape in self.inputs.values() for axis in shape.axes]
        pairs = ["".join(pair) for pair in itertools.product(names, "*/+", [*names, *"2345678"])]
        axes = []
        for place, length in enumerate(shapes[0][1]):
            for axis in (*written, *names, str(length), *pairs):
                if all(size_of(axis, case.dims) == shape[place] for case, shape in shapes):
                    axes.append(axis)
                    break
            else:
                text = f"an axis of {output} is no sum or product of the dimensions"
                lengths = ", ".join(f"{shape[place]} for {case}" for case, shape in shapes)
                raise self._refused(f"{text}: {lengths}")
        return " ".join(axes)

    def text(self) -> str:
        """The declaration as a Python file."""
        declared = [case.dims.items() for case in self.cases[:-1]]
        cases = [", ".join(f"{x}={size}" for x, size in sizes) for sizes in declared]
        inputs = {x: _source(shape, x in self.gradients) for x, shape in self.inputs.items()}
        passed = {x: x if x in self.params else text for x, text in self.literals.items()}
        return TEMPLATE.format(
            function=self.function,
            file=self.file.name,
            like=self.like,
            imports="\n".join(self.imports),
            name="my_" + re.sub(r"\W+", "_", self.function).lower(),
            inputs="\n".join(f'        "{x}": {text},' for x, text in inputs.items()),
            outputs=", ".join(f'"{x}": {text}' for x, text in self.outputs.items()),
            params=", ".join(f'"{x}": {self.literals[x]}' for x in self.params),
            cases="\n".join(f"        Case({case})," for case in cases),
            dtypes=", ".join(map(str, self.dtypes)) + ",",
            reference=self.reference.defined_as("reference", [*inputs], passed),
            candidate=self.candidate.defined_as("candidate", [*inputs], passed),
        )


class DeclaredChecks(Checks):
    """The checks of a function that is to be like another one. The first process that makes them
    drafts the declaration, beside its log; others read that.

    draft: the arguments of `Draft`. Raises UsageError as it does.
    """

    def __init__(self, log: str, request: Request, *, draft: Mapping[str, Any]) -> None:
        self.params = draft["params"]
        self.declaration, self.notes = Path(log).parent / "declaration.py", list[str]()
        if not self.declaration.is_file():
            drafted = Draft(**draft)
            self.declaration.write_text(drafted.text(), encoding="utf-8")
            self.notes = drafted.notes
        super().__init__(log, request)

    def ops(self) -> tuple[list[Op], str]:
        registry = Registry()
        with self.loading(str(self.request.file)):
            module = load_about(self.declaration, str(self.request.file), registry).__name__
        return [*registry.values()], module

    def findings(self, provider: str, only: list[str], earlier: list[Finding]) -> list[Finding]:
        """The findings; what is wrong names the parameters, one of which may be ignored."""
        return [self._naming(f) for f in super().findings(provider, only, earlier)]

    def _naming(self, finding: Finding) -> Finding:
        """A fault with the parameters of the command; its case names one with another value."""
        params = [text for text in self.params if f",{_literal(text)[0]}=" not in finding.case]
        if not (params and finding.rank):
            return finding
        return replace(finding, message=f"{finding.message}; with {', '.join(params)}")

    def provided(self) -> list[Provided]:
        """The function; what was noted of its declaration comes with it."""
        return [
            replace(provided, with_reference=False, notes=tuple(self.notes))
            for provided in super().provided()
        ]


def _source(shape: InputShape, grad: bool) -> str:
    """An input as a `Tensor` in Python."""
    words = [f'"{" ".join(shape.axes)}"', *([f"dtype={shape.dtype}"] if shape.dtype else [])]
    if shape.below.isidentifier():
        words.append(f'values=lambda sizes: integers(sizes["{shape.below}"])')
    elif not shape.floating:
        words.append(f"values=integers({shape.below or 2})")
    words += ["grad=True"] if grad else []
    words += ["optional=True"] if shape.optional else []
    return f"Tensor({', '.join(words)})"


def _literal(text: str) -> tuple[str, str]:
    """The name and the literal of ``NAME=LITERAL``."""
    name, _, value = (word.strip() for word in text.partition("="))
    with contextlib.suppress(ValueError, SyntaxError):
        ast.literal_eval(value)
        if name.isidentifier():
            return name, value
    fix = "use NAME=LITERAL, such as dim=-1, eps=1e-5 or reduction='sum'"
    raise UsageError(f"--param {text!r}: {fix}")
