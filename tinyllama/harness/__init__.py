"""The harness: what an op is, which cases follow from it, and when a result is right.

It knows ops and no model, so it serves anyone's kernel.
"""

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
    "load_file",
]
