"""What a process opens, loads and starts, as the audit events of Python tell it (PEP 578).

Native code raises none: whatever loads a library, starts a program or imports a module without
source is unidentified, with the reason.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_KNOWN = ("torch", "triton", "numpy", "scipy")  # their native code may run: the harness needs it
_PROGRAMS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"}
_PROGRAMS |= {"os.forkpty", "cpython.PyInterpreterState_New"}
# Loaded where a process is started without an event: fresh, or by a server.
_STARTS = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
_INSTALLED = ("/usr/", "/lib", "/opt/", *(f"{each}/" for each in {sys.prefix, sys.base_prefix}))
_PARSED = (".py", ".json", ".toml")  # compared by what they say, unless they are read as texts
HERE = os.path.join(os.path.realpath(Path(__file__).parent.parent), "")  # the harness
_LISTS = ("os.listdir", "os.scandir")
# Whose lists are of modules, not of data.
_SEARCHES = ("<frozen importlib", f"{os.sep}importlib{os.sep}", f"{os.sep}pkgutil.py")


class Events:
    """What this process opens from now on. An audit hook cannot be removed: it is for a fork."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.texts: set[str] = set()  # read by an op's own code, and not to import them
        self.native: list[str] = []
        self.known = set(sys.modules)
        self.trusted = tuple(_folders())
        self.standard = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
        self.readers = (HERE, *_folders_of("triton"))
        self.hooks = 0  # of others, which run at every event and cannot be listed
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "sqlite3.connect") or (event in _LISTS and not self._is_search()):
            name = "." if args[0] is None else args[0]
            if isinstance(name, (str, bytes, os.PathLike)):  # else of an open one
                file = os.path.abspath(os.fsdecode(name))
                self.files.add(file)
                if file.endswith(_PARSED) and self._is_text():
                    self.texts.add(file)
        elif event == "import" and args[1]:  # an extension module; its file
            self._foreign(str(args[1]), f"it loads {args[1]}")
        elif event == "ctypes.dlopen":
            reason = f"it loads the library {args[0]}"
            if self._is_apart(args[0]):  # whoever loads it
                return self.native.append(reason)
            self._by_itself(reason)
        elif event in _PROGRAMS:
            self._by_itself(f"it starts a process ({event})")
        elif event == "sys.addaudithook":
            self.hooks += 1

    def _is_text(self) -> bool:
        """Whether a file is read neither by an import nor by Triton or the harness, which need
        only what it says to Python or to JSON. Sees `torch.jit.script` and `inspect.getsource`."""
        frame: FrameType | None = sys._getframe(2)
        assert frame is not None
        calls = [one.f_code for one in (frame, frame.f_back) if one is not None]
        if [one.co_name for one in calls] == ["get_data", "get_code"]:
            return not all(one.co_filename.startswith("<frozen importlib") for one in calls)
        if calls[0].co_name in ("_get_code_from_file", "_read_directory"):  # of runpy
            return not self._is_standard(calls[0].co_filename)
        while frame is not None and self._is_standard(frame.f_code.co_filename):
            frame = frame.f_back
        file = "" if frame is None else os.path.realpath(frame.f_code.co_filename)
        return not file.startswith(self.readers)

    def _is_search(self) -> bool:
        """Whether a folder is listed for the modules in it."""
        file = sys._getframe(2).f_code.co_filename  # of who lists it
        return any(part in file for part in _SEARCHES)

    def _is_apart(self, name: Any) -> bool:
        """Whether a library is named by a path that is in no folder of Python or of the system."""
        if not isinstance(name, (str, bytes, os.PathLike)) or os.sep not in os.fsdecode(name):
            return False
        return not os.path.realpath(os.fsdecode(name)).startswith(_INSTALLED)

    def _is_standard(self, file: str) -> bool:
        """Whether code is of the standard library, or of no file."""
        packages = f"{os.sep}site-packages{os.sep}" in file
        return file.startswith("<") or (file.startswith(self.standard) and not packages)

    def _foreign(self, file: str, reason: str) -> None:
        """Note what is not of Python, or of the libraries of `_KNOWN`."""
        if not os.path.realpath(file).startswith(self.trusted):
            self.native.append(reason)

    def _by_itself(self, reason: str) -> None:
        """Note what no library of `_KNOWN` does on its own account: the nearest caller
        outside of the standard library is another's."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file != __file__ and not self._is_standard(file):
                return self._foreign(file, reason)
            frame = frame.f_back
        return self.native.append(reason)

    def unidentified(self) -> str | None:
        """Why what was run cannot be told from files; None where it can."""
        new = set(sys.modules) - self.known
        if new.intersection(_STARTS):
            return "it starts a process (multiprocessing)"
        for name in sorted(new):
            file = str(getattr(sys.modules[name], "__file__", None) or "")
            if file.endswith(".pyc"):
                return f"it imports {name} without source"
        return next(iter(self.native), None)


def _folders() -> Iterator[str]:
    """Of Python's own extension modules, and of the libraries of `_KNOWN`."""
    for name in ("stdlib", "platstdlib"):
        yield f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}lib-dynload{os.sep}"
    for name in _KNOWN:
        yield from _folders_of(name)


def _folders_of(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        yield f"{os.path.realpath(folder)}{os.sep}"


class Uncached(dict[str, Any]):
    """In the place of `linecache.cache`: each reader of a file's source opens it."""

    def __setitem__(self, name: str, value: Any) -> None:
        if not os.path.exists(name):  # generated code is nowhere else
            super().__setitem__(name, value)
