"""The ops of a repository of one's own, which the installed harness judges.

Both sides run the installed harness: nothing of it is in these trees, and nothing is replaced.
"""

import glob
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.declare.op import Provider
from tinyllama.harness.declare.registry import Registry
from tinyllama.harness.gate.sources import module_file
from tinyllama.harness.measure.op_contender import declared_by


@dataclass(frozen=True)
class Own:
    """Which ops are benchmarks.

    files: paths and patterns, relative to the root of a tree, as pytest expands them
    (`tinyllama.suites.entry.expanded`); each side has its own files of these.
    modules: of entry points. names: of the only ops that are compared; empty: of all. version: of
    the project; accepted entries expire by it.
    """

    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    version: str = "0"

    def found(self, root: Path) -> tuple[str, ...]:
        """The files that a tree has, whole."""
        each = (glob.glob(one, root_dir=root, recursive=True) for one in self.files)
        paths = (str(root / name) for names in each for name in sorted(names))
        return tuple(dict.fromkeys(path for path in paths if os.path.isfile(path)))

    def providers(self, registry: Registry, named: Mapping[str, str]) -> dict[str, list[Provider]]:
        """By op, the providers that are benchmarks. named: the file of each module."""
        found = declared_by(registry, {*named, *self.modules})
        return {op: each for op, each in found.items() if not self.names or op in self.names}


def strays(root: Path) -> list[str]:
    """The files of loaded modules that a tree has too, and that were not loaded from it: an
    installed copy, or the other side's."""
    found = []
    for name, module in list(sys.modules.items()):
        ours, file = module_file(root, name), getattr(module, "__file__", None)
        if ours is not None and file and Path(file).resolve() != ours.resolve():
            found.append(file)
    return sorted(found)
