"""Which ops a session is about."""

import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import tinyllama.ops
from tinyllama.harness import DeclarationError, Registry, load_file
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.gate.config import Config
from tinyllama.harness.measure.op_contender import declared_by, loaded
from tinyllama.suites.entry import declared_modules, expanded, project

PACKAGE = tinyllama.ops.__name__
SELECTION = pytest.StashKey["Selection"]()


@dataclass(frozen=True)
class Selection:
    """files: of ops, absolute. modules: of entry points. own: by op, the providers that are meant:
    all of an op that these declare, of another op those that they register."""

    files: tuple[str, ...]
    modules: tuple[str, ...]
    own: dict[str, list[Provider]]

    @property
    def ops(self) -> list[Op]:
        """The ops of these providers."""
        registry, _ = loaded(PACKAGE, self.files)
        return [registry[name] for name in self.own]


def selected(config: pytest.Config, team: Config) -> Selection:
    """What the options mean, else pyproject.toml; ``--op`` without either means an op of this
    package.

    Raises pytest.UsageError where that is nothing.
    """
    given = config.option.ops
    where = "[tool.tinyllama] ops of pyproject.toml:"
    if str(config.rootpath) not in sys.path:
        sys.path.insert(0, str(config.rootpath))  # a file of ops may import its neighbours
    files = tuple(given or expanded(where, team.ops, config.rootpath))
    modules = () if given else tuple(declared_modules(project(config.rootpath)))
    registry, named = loaded(PACKAGE, files, load)
    for module, file in named.items():
        if not declared_by(registry, [module]):
            raise pytest.UsageError(
                f"{file} declares no op and no provider: see docs/check.md; name tests before --ops"
            )
    for module in modules:
        if not declared_by(registry, [module]):
            raise pytest.UsageError(
                f"the entry point {module!r} of pyproject.toml gives no op: install this project, "
                "and declare an op in that module"
            )
    if named or modules:
        own = declared_by(registry, [*named, *modules])
    else:
        own = {op.name: list(op.providers.values()) for op in registry.values()}
    names = config.option.op
    for name in names:
        if name not in own:
            raise pytest.UsageError(f"--op {name!r:.80} is none of the ops: {', '.join(own)}")
    return Selection(files, modules, {n: own[n] for n in own if not names or n in names})


def load(file: str, registry: Registry) -> ModuleType:
    """As `load_file`. Raises pytest.UsageError, with the place in the file, for whatever a user's
    file raises, or ends with."""
    try:
        return load_file(file, registry)
    except DeclarationError as error:
        raise pytest.UsageError(f"--ops {file}: {error}") from error
    except (Exception, SystemExit) as error:
        name = re.escape(str(Path(file).resolve()))
        lines = re.findall(rf'^ *File "{name}", line (\d+)', traceback.format_exc(), re.MULTILINE)
        place = f"{file}:{lines[-1]}" if lines else file
        raise pytest.UsageError(f"--ops {place}: {type(error).__name__}: {error}") from error
