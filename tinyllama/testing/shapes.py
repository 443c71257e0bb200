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
        if name in inputs or not (name.isidentifier() if colon else "," not in text):
            text = "needs a name of its own before a colon"
            raise UsageError(f"--shape: {part.strip()!r} {text}: {_EXAMPLE}")
        inputs[name] = _parsed(axes)
    if not any(shape.dimensions for shape in inputs.values()):
        raise UsageError(f"--shape {text!r}: name at least one axis, whose size varies: {_EXAMPLE}")
    return inputs


def _parsed(text: str) -> InputShape:
    words = text.removesuffix("?").split()
    dtype = below = ""
    if words and words[-1].split("<")[0] in DTYPES:
        dtype, _, below = words.pop().partition("<")
    if dtype.startswith("int") != below.isalnum():
        raise UsageError(f"--shape: {text!r}: write an index below V as int<V, a mask as bool")
    for word in words:
        if not _AXIS.match(word):
            fix = f"is neither an axis (N, 64, 2*R) nor a dtype ({', '.join(DTYPES)})"
            raise UsageError(f"--shape: {word!r} of {text!r} {fix}")
    return InputShape(tuple(words), DTYPES.get(dtype, ""), below, text.endswith("?"))
