"""The harness: what an op is, which cases follow from it, and when a result is right.

It knows ops and no model, so it serves anyone's kernel. Importing the package loads no torch:
the command line checks options and paths without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllama.harness.declare.in_double import in_double
    from tinyllama.harness.declare.offsets import Large
    from tinyllama.harness.declare.op import Op, Provider
    from tinyllama.harness.declare.registry import Registry, discover, load_file
    from tinyllama.harness.declare.specs import Case, DeclarationError, Tensor

__all__ = [
    "Case",
    "DeclarationError",
    "Large",
    "Op",
    "Provider",
    "Registry",
    "Tensor",
    "discover",
    "in_double",
    "load_file",
]

_MODULES = {
    "in_double": ("in_double",),
    "offsets": ("Large",),
    "op": ("Op", "Provider"),
    "registry": ("Registry", "discover", "load_file"),
    "specs": ("Case", "DeclarationError", "Tensor"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"tinyllama.harness.declare.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
