"""The inputs of an op as one line: ``"x: N D, w: D, target: N int<V, mask: N D bool, bias: D?"``.

Axes are names, numbers, or sums and products of these (``2*R``). ``int<V`` is an index below V,
``bool`` a mask, ``fp32`` a fixed dtype, and ``?`` an input that may be None.
"""

import re
from dataclasses import dataclass

from tinyllama.harness.machine.errors import UsageError

DTYPES = {
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "bool": "torch.bool",
    "int": "torch.int64",
    "int8": "torch.int8",
    "int32": "torch.int32",
    "int64": "torch.int64",
}
_AXIS = re.compile(r"[A-Za-z_0-9]+([+*/][A-Za-z_0-9]+)*\Z")
_INTEGERS = re.compile(r"(int\d*)<(\w+)\Z")
_EXAMPLE = "use one such as 'x: N D, w: D, target: N int<V, mask: N D bool, bias: D?'"


@dataclass(frozen=True)
class InputShape:
    """An input of a shape text. axes: as of a `Tensor`. dtype: as Python writes it; "" for the
    dtype of the case. below: integers are drawn from [0, below), a number or a dimension."""

    axes: tuple[str, ...]
    dtype: str = ""
    below: str = ""
    optional: bool = False

    @property
    def floating(self) -> bool:
        return "int" not in self.dtype and "bool" not in self.dtype

    def source(self, grad: bool) -> str:
        """The input as a `Tensor` in Python; grad: with a gradient, where it is floating-point."""
        words = [f'"{" ".join(self.axes)}"']
        words += [f"dtype={self.dtype}"] if self.dtype else []
        if self.below.isidentifier():
            words.append(f'values=lambda sizes: integers(sizes["{self.below}"])')
        elif not self.floating:
            words.append(f"values=integers({self.below or 2})")
        words += ["grad=True"] if grad and self.floating else []
        words += ["optional=True"] if self.optional else []
        return f"Tensor({', '.join(words)})"

    @property
    def dimensions(self) -> list[str]:
        """The names of the dimensions of its axes and of its bound, in order."""
        names = re.findall(r"[A-Za-z_]\w*", " ".join([*self.axes, self.below]))
        return list(dict.fromkeys(names))


def parse_shapes(text: str) -> dict[str, InputShape]:
    """The inputs by name; ``""`` is the name of a single one that has none.

    Raises UsageError that names the part that cannot be read.
    """
    inputs: dict[str, InputShape] = {}
    for part in text.split(","):
        name, colon, axes = (word.strip() for word in part.rpartition(":"))
        if colon and not name.isidentifier():
            raise UsageError(f"--shape: {part.strip()!r} has no name before its colon: {_EXAMPLE}")
        if not colon and "," in text:
            raise UsageError(f"--shape: {part.strip()!r} has no name, among several: {_EXAMPLE}")
        if name in inputs:
            raise UsageError(f"--shape: {name!r} is there twice: give each input one name")
        inputs[name] = _parsed(axes, part.strip())
    if not any(entry.dimensions for entry in inputs.values()):
        raise UsageError(f"--shape {text!r}: name at least one axis, whose size varies: {_EXAMPLE}")
    return inputs


def _parsed(text: str, part: str) -> InputShape:
    optional = text.endswith("?")
    words = text.removesuffix("?").split()
    dtype = below = ""
    if words and (bound := _INTEGERS.match(words[-1])):
        dtype, below = bound.groups()
        words.pop()
    elif words and words[-1] in DTYPES:
        dtype = words.pop()
    if dtype.startswith("int") and not below:
        raise UsageError(f"--shape: {part!r} has no bound: write {dtype}<V, an index below V")
    if dtype not in ("", *DTYPES):
        known = ", ".join(name for name in DTYPES if name.startswith("int"))
        raise UsageError(f"--shape: {part!r} has the dtype {dtype!r}: use one of {known}")
    for word in words:
        if not _AXIS.match(word):
            text = "is neither an axis (N, 64, 2*R) nor a dtype"
            raise UsageError(f"--shape: {word!r} of {part!r} {text} ({', '.join(DTYPES)})")
    return InputShape(tuple(words), DTYPES.get(dtype, ""), below, optional)
