"""The harness: what an op is, which cases follow from it, and when a result is right.

It knows ops and no model, so it serves anyone's kernel.
"""

from tinyllama.harness.declare.op import Case, DeclarationError, Op, Provider, Tensor
from tinyllama.harness.declare.registry import Registry, discover, load_file

__all__ = [
    "Case",
    "DeclarationError",
    "Op",
    "Provider",
    "Registry",
    "Tensor",
    "discover",
    "load_file",
]
