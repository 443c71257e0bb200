"""The declaration of a function that is to be like another one, written as a Python file.

    draft = Draft("my.py", "softmax", like="torch.softmax", shape="N D", params=["dim=-1"])
    print(draft.text)     # what the user could have written
    print(draft.problem)  # why it is incomplete; "" where it can be checked

Outputs are found by calling the reference on small tensors of several sizes. The file is read, not
imported; what is named by ``like`` is imported.
"""

import ast
import contextlib
import importlib
import inspect
import itertools
import math
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.declare.in_double import DoubleKept
from tinyllama.harness.declare.registry import import_name
from tinyllama.harness.declare.shapes import InputShape, parse_shapes
from tinyllama.harness.declare.source import definitions, parameters_of, public_functions
from tinyllama.harness.declare.specs import FLOATS, size_of
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.harness.kernels.tuned import adopted
from tinyllama.harness.machine.errors import UsageError

# Sizes of the last dimension, of the one before, and so on: no power of two, powers of two, and
# more than a block. Those of a case differ, which tells the axes of an output.
GENERAL = (50, 19, 3, 2, 5, 4, 7, 6)
ALIGNED = (64, 32, 4, 2, 8, 16, 3, 5)
LARGE = (260, 130, 70, 67, 5, 4, 7, 6)
ALONE = 2500  # the large size of a single dimension
MOST_ELEMENTS = 2**18  # of a tensor in the large case: more takes long to interpret

_LIKE = "use a dotted name such as torch.nn.functional.gelu, or FILE:FUNCTION"
_HAS_BACKWARD = re.compile(r"autograd\.Function|custom_op|triton_op")
_RESERVED = {"op", "reference", "candidate", "torch", "sys", "Case", "Op", "Tensor", "integers"}


class NotExpressibleError(Exception):
    """Why no declaration follows from the reference."""


@dataclass(frozen=True)
class Function:
    """A function of a user, as it is called.

    name: in the declaration. parameters: their names in order; None where they are not known.
    by_name: whether it takes parameters by name, which ``Class.apply`` does not.
    """

    name: str
    parameters: Sequence[str] | None
    by_name: bool = True

    def takes(self, name: str) -> bool:
        return self.parameters is None or name in self.parameters

    def arguments(
        self, inputs: Sequence[str], params: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """What is passed by place, and by name. An input goes by name where it has another place,
        as the weight of a function that takes a shape before it."""
        if not self.by_name:
            return [*inputs, *params.values()], {}
        places = list(self.parameters or ())
        moved = [
            name in places and places.index(name) != place for place, name in enumerate(inputs)
        ]
        first = moved.index(True) if True in moved else len(inputs)
        named = inputs[first:] if all(name in places for name in inputs[first:]) else ()
        by_place = list(inputs[: len(inputs) - len(named)])
        return by_place, {**{name: name for name in named}, **params}

    def call(self, inputs: Sequence[str], params: Mapping[str, str]) -> str:
        """The call in Python."""
        by_place, by_name = self.arguments(inputs, params)
        words = [*by_place, *(f"{name}={value}" for name, value in by_name.items())]
        return f"{self.name}({', '.join(words)})"


class Draft:
    """The declaration of ``function`` of ``file``, with another function as its reference.

    like: ``torch.nn.functional.gelu``, or ``FILE:FUNCTION``. shape: of the inputs, see
    `tinyllama.harness.declare.shapes`. params: ``NAME=LITERAL``. dtypes: short names; none: all
    that the reference takes. gradients: whether those of floating-point inputs are compared.
    device: where the reference is called.

    Raises UsageError for a value that cannot be used.
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
        device: str = "cpu",
    ) -> None:
        self.file, self.function, self.like, self.device = Path(file), function, like, device
        self.dtypes = [DTYPE_OF[name] for name in dtypes] or list(FLOATS)
        self.grads, self.in_double = gradients, False
        self.problem, self.notes = "", list[str]()
        self.imports = list[str]()
        self.candidate = self._candidate()
        self.inputs = self._named(parse_shapes(shape))
        self.reference, self.called = self._reference()
        literals = dict(_literal(param) for param in params)
        functions = (self.candidate, self.reference)
        for name in literals:
            if not any(user.takes(name) for user in functions):
                raise UsageError(f"--param {name}: neither {function} nor {like} takes {name!r}")
        both = [name for name in literals if all(user.takes(name) for user in functions)]
        self.params = {name: literals[name] for name in both}
        self.fixed = {name: value for name, value in literals.items() if name not in both}
        self.sizes = self._sizes()
        self.outputs: dict[str, str] = {}
        try:
            self._find_outputs(droppable=not dtypes)
        except NotExpressibleError as error:
            self.problem = str(error)

    def plain(self) -> dict[str, Any]:
        """The text, the problem and the notes, to be sent to another process."""
        return {"text": self.text, "problem": self.problem, "notes": self.notes}

    # -- what the command line names ------------------------------------------------------------

    def _candidate(self) -> Function:
        defined = definitions(self.file)
        if self.function not in defined:
            names = ", ".join(public_functions(self.file)) or "none"
            raise UsageError(f"{str(self.file)!r} has no function {self.function!r}: use {names}")
        name = self._imported(self.file, self.function, "my")
        parameters = parameters_of(defined[self.function])
        return Function(
            name, parameters, by_name=isinstance(defined[self.function], ast.FunctionDef)
        )

    def _imported(self, file: Path, name: str, prefix: str) -> str:
        """Import a function of a file, and return its name here."""
        folder, module = import_name(file)
        if folder != import_name(self.file)[0]:
            self.imports += ["import sys", f"sys.path.append({str(folder)!r})"]
        taken = _RESERVED | ({self.candidate.name} if prefix == "like" else set())
        alias = f"{prefix}_{name}" if name in taken else name
        self.imports.append(
            f"from {module} import {name}" + (f" as {alias}" if alias != name else "")
        )
        return alias

    def _named(self, shapes: dict[str, InputShape]) -> dict[str, InputShape]:
        """The inputs in the order of the candidate's parameters, which have their names."""
        parameters = self.candidate.parameters
        if "" in shapes:
            return {parameters[0] if parameters else "x": shapes[""]}
        if parameters is None:
            return shapes
        for name in shapes:
            if name not in parameters:
                names = ", ".join(parameters)
                raise UsageError(f"--shape: {self.function} has no argument {name!r}: use {names}")
        return {name: shapes[name] for name in parameters if name in shapes}

    def _reference(self) -> tuple[Function, Any]:
        """The reference as it is called in the declaration, and itself."""
        file, colon, name = self.like.rpartition(":")
        with contextlib.ExitStack() as loading:
            if not self.like.startswith("torch."):  # it may ask for a GPU, and have kernels
                loading.enter_context(adopted())
                if self.device == "cpu":
                    loading.enter_context(foreign())
            if colon:
                if name not in definitions(Path(file)):
                    names = ", ".join(public_functions(Path(file))) or "none"
                    raise UsageError(f"--like {self.like!r}: {file} has no {name!r}: use {names}")
                folder, module = import_name(Path(file))
                sys.path.insert(0, str(folder))
            else:
                module = _module_in(self.like)
                name = self.like.removeprefix(f"{module}.")
            try:
                function = pkgutil.resolve_name(f"{module}:{name}")
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise UsageError(
                    f"--like {self.like!r} cannot be imported ({text}): {_LIKE}"
                ) from error
        if not callable(function):
            raise UsageError(f"--like {self.like!r} is no function: {_LIKE}")
        if colon:
            called = self._imported(Path(file), name, "like")
        else:
            called = self.like
            self.imports += [f"import {module}"] if not module.startswith("torch") else []
        return Function(called, _signature(function)), function

    def _sizes(self) -> list[dict[str, int]]:
        """The sizes of each case, by dimension."""
        names = list(
            dict.fromkeys(n for declared in self.inputs.values() for n in declared.dimensions)
        )
        if len(names) > len(GENERAL):
            raise UsageError(f"--shape has {len(names)} dimensions: use at most {len(GENERAL)}")
        general, aligned = (
            dict(zip(names, reversed(sizes[: len(names)]), strict=True))
            for sizes in (GENERAL, ALIGNED)
        )
        large = general
        for name, size in zip(reversed(names), LARGE, strict=False):
            longer = {**large, name: size if len(names) > 1 else ALONE}
            shapes = [_shape(declared, longer) for declared in self.inputs.values()]
            if max(map(math.prod, shapes)) <= MOST_ELEMENTS:
                large = longer
        return [general, aligned, large]

    # -- what the reference says ----------------------------------------------------------------

    def _find_outputs(self, droppable: bool) -> None:
        """Call the reference in each dtype and size, and write down its outputs.

        Raises NotExpressibleError.
        """
        general, *others = self.sizes
        in_dtype = {}
        for dtype in list(self.dtypes):
            try:
                in_dtype[dtype] = self._results(general, dtype)
            except NotExpressibleError as error:
                if not droppable or dtype is FLOATS[0]:
                    raise
                self.dtypes.remove(dtype)
                self.notes.append(f"not in {str(dtype).removeprefix('torch.')}: {error}")
        results = in_dtype[self.dtypes[0]]
        in_sizes = [results, *(self._results(sizes, self.dtypes[0]) for sizes in others)]
        for name in [name for name, declared in self.inputs.items() if declared.optional]:
            self._results(general, self.dtypes[0], without=name)
        floating = [result for result in results if result.is_floating_point()]
        if self.grads and not (floating and all(result.requires_grad for result in floating)):
            self.grads = False
            self.notes.append(f"no gradients: the results of {self.like} have none")
        for place, result in enumerate(results):
            name = "output" if len(results) == 1 else f"output_{place + 1}"
            name = f"{name}_" if name in (*self.inputs, *self.params) else name
            axes = self._axes([tuple(tensors[place].shape) for tensors in in_sizes], name)
            dtypes = {dtype: tensors[place].dtype for dtype, tensors in in_dtype.items()}
            self.outputs[name] = f'"{axes}"'
            if any(result_dtype is not dtype for dtype, result_dtype in dtypes.items()):
                if len(set(dtypes.values())) > 1:
                    raise NotExpressibleError(f"the dtype of {name} follows no rule: {dtypes}")
                self.outputs[name] = f'Tensor("{axes}", dtype={result.dtype})'
        with DoubleKept() as mode:
            self._results(general, torch.float64)
        self.in_double = mode.casts > 0

    def _results(
        self, sizes: Mapping[str, int], dtype: torch.dtype, without: str = ""
    ) -> tuple[torch.Tensor, ...]:
        """What the reference returns for random inputs; ``without`` one that is optional."""
        generator = torch.Generator().manual_seed(0)
        args: dict[str, Any] = {
            name: None if name == without else self._drawn(declared, sizes, dtype, generator)
            for name, declared in self.inputs.items()
        }
        params = {name: name for name in self.params}
        params |= {name: name for name in self.fixed if self.reference.takes(name)}
        by_place, by_name = self.reference.arguments([*args], params)
        literals = {**self.params, **self.fixed}
        values = {**{name: ast.literal_eval(text) for name, text in literals.items()}, **args}
        try:
            results = self.called(
                *(values[name] for name in by_place),
                **{name: values[value] for name, value in by_name.items()},
            )
        except Exception as error:
            said = (str(error).strip().splitlines() or ["no message"])[0]
            text = f"{self.like} raised {type(error).__name__}: {said}"
            raise NotExpressibleError(f"{text} (for {_described(args)})") from error
        results = results if isinstance(results, tuple) else (results,)
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results) or "nothing"
            raise NotExpressibleError(f"{self.like} returned {kinds}, not tensors")
        return results

    def _drawn(
        self,
        declared: InputShape,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> torch.Tensor:
        shape = _shape(declared, sizes)
        fixed = getattr(torch, declared.dtype.removeprefix("torch.")) if declared.dtype else dtype
        if not declared.floating:
            below = 2 if fixed is torch.bool else size_of(declared.below, sizes)
            return torch.randint(below, shape, generator=generator).to(self.device, fixed)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        wide = dtype if dtype is torch.float64 else fixed
        return drawn.to(self.device, wide).requires_grad_(self.grads)

    def _axes(self, shapes: Sequence[tuple[int, ...]], output: str) -> str:
        """The axes that have these sizes in the cases."""
        if len({len(shape) for shape in shapes}) > 1:
            raise NotExpressibleError(f"{output} has no fixed number of axes: {shapes}")
        axes = []
        for lengths in zip(*shapes, strict=True):
            pairs = list(zip(self.sizes, lengths, strict=True))
            fits = (
                axis
                for axis in _formulas(list(self.sizes[0]), lengths)
                if all(size_of(axis, sizes) == length for sizes, length in pairs)
            )
            if (axis := next(fits, None)) is None:
                text = f"an axis of {output} is no sum or product of the dimensions"
                raise NotExpressibleError(f"{text}: {pairs}")
            axes.append(axis)
        return " ".join(axes)

    # -- the text -------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The declaration as a Python file."""
        bounded = any(not declared.floating for declared in self.inputs.values())
        names = ["Case", "Op", "Tensor", *(["in_double"] if self.in_double else [])]
        return "\n".join(
            [
                f'"""{self.function} of {self.file.name} is to be like {self.like}."""',
                "",
                "import torch",
                "",
                *dict.fromkeys(self.imports),
                f"from tinyllama.harness import {', '.join(names)}",
                *(["from tinyllama.harness.values import integers"] if bounded else []),
                "",
                "op = Op(",
                f'    "{self._name}",',
                *self._entries(),
                ")",
                "",
                "",
                "@op.reference",
                *(["@in_double"] if self.in_double else []),
                self._definition("reference", self.reference),
                "",
                "",
                self._provider(),
                "",
            ]
        )

    @property
    def _name(self) -> str:
        """The op's: of the file and the function, in lower case."""
        words = re.sub(r"\W+", "_", f"{self.file.stem}_{self.function}").lower().strip("_")
        return words if words[0].isalpha() else f"op_{words}"

    def _definition(self, name: str, function: Function) -> str:
        """A function of the inputs and parameters that calls one of the user's."""
        params = {name: name for name in self.params}
        params |= {name: text for name, text in self.fixed.items() if function.takes(name)}
        arguments = ", ".join([*self.inputs, *self.params])
        return f"def {name}({arguments}):\n    return {function.call([*self.inputs], params)}"

    def _provider(self) -> str:
        text = self.file.read_text(encoding="utf-8")
        traits = ", double_backward=False" if _HAS_BACKWARD.search(text) else ""
        register = f'op.provider("candidate"{traits})'
        taken = list(self.candidate.parameters or ())
        needed = [*self.inputs, *self.params]
        if taken[: len(needed)] == needed and not any(map(self.candidate.takes, self.fixed)):
            return f"{register}({self.candidate.name})"
        return f"@{register}\n{self._definition('candidate', self.candidate)}"

    def _entries(self) -> Iterator[str]:
        yield "    inputs={"
        for name, declared in self.inputs.items():
            yield f'        "{name}": {declared.source(self.grads)},'
        yield "    },"
        like_first = f'"{" ".join(next(iter(self.inputs.values())).axes)}"'  # to be filled in
        yield f"    outputs={_dict(self.outputs or {'output': like_first})},"
        if self.params:
            yield f"    params={_dict(self.params)},"
        yield "    cases=["
        for sizes in self.sizes:
            yield f"        Case({', '.join(f'{name}={size}' for name, size in sizes.items())}),"
        yield "    ],"
        if self.dtypes != list(FLOATS):
            yield f"    dtypes=({''.join(f'{dtype}, ' for dtype in self.dtypes).strip()}),"


def _signature(function: Any) -> list[str] | None:
    """The parameters of a function; None where they are not known, as of one written in C++."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    open_ended = kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    return None if open_ended else list(parameters)


def _literal(text: str) -> tuple[str, str]:
    """The name and the literal of ``NAME=LITERAL``."""
    name, _, value = (word.strip() for word in text.partition("="))
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        name = ""
    if not name.isidentifier():
        text = f"--param {text!r}: use NAME=LITERAL, such as dim=-1, eps=1e-5 or reduction='sum'"
        raise UsageError(text)
    return name, value


def _module_in(dotted: str) -> str:
    """The longest part of a dotted name, before the last, that is a module."""
    module = dotted.rpartition(".")[0]
    while module:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            return module
        module = module.rpartition(".")[0]
    raise UsageError(f"--like {dotted!r}: there is no such module: {_LIKE}")


def _shape(declared: InputShape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size_of(axis, sizes) for axis in declared.axes)


def _described(args: Mapping[str, torch.Tensor | None]) -> str:
    """The inputs of a call, in words."""
    return ", ".join(
        f"{name}: {'None' if x is None else f'{str(x.dtype)[6:]} {tuple(x.shape)}'}"
        for name, x in args.items()
    )


def _dict(entries: Mapping[str, str]) -> str:
    """A dict in Python; its values are written already."""
    pairs = [f'"{name}": {text}' for name, text in entries.items()]
    return f"{{{', '.join(pairs)}}}"


def _formulas(names: Sequence[str], lengths: Sequence[int]) -> Iterator[str]:
    """Texts of axes, from the likeliest on."""
    yield from names
    if len(set(lengths)) == 1:
        yield str(lengths[0])
    for name in names:
        yield from (f"{factor}*{name}" for factor in range(2, 9))
        yield from (f"{name}/{divisor}" for divisor in range(2, 9))
        yield from (f"{name}+{more}" for more in range(1, 5))
        yield f"{name}/2+1"
    for count in range(2, len(names) + 1):
        for group in itertools.combinations(names, count):
            yield from ("*".join(group), "+".join(group))
    yield from (f"{name}/{divisor}" for name, divisor in itertools.permutations(names, 2))
