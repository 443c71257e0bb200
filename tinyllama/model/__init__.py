"""The model: its shape, its tiers, its optimizer. ``from tinyllama.model import TinyLlama``.

Importing the package loads no torch: the command line reads shapes and settings without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllama.model.llama import TinyLlama

__all__ = ["TinyLlama"]


def __getattr__(name: str) -> Any:
    if name == "TinyLlama":
        from tinyllama.model.llama import TinyLlama

        return TinyLlama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
