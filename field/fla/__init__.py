"""flash-linear-attention's kernels as providers, a file for each op."""

import importlib
import warnings
from types import ModuleType

from tinyllama.harness.kernels.foreign import foreign


def module(name: str) -> ModuleType:
    """A module of `fla`, whose kernels run in the interpreter and compile for any chip."""
    with foreign(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that no GPU is there
        return importlib.import_module(f"fla.{name}")
