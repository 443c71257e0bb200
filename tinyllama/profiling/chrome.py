"""Traces that PyTorch's profiler writes, in Chrome's format."""

import gzip
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.parsed import json_of
from tinyllama.profiling.kernels import Dispatch, Profile, ProfileError, of_dispatches

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = "cpu_op"


def read(path: Path) -> Profile:
    """The kernels of a trace; of a machine without a GPU its outermost operators. Raises
    ProfileError."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        events = json_of(data)["traceEvents"]
        complete = [event for event in events if event.get("ph") == "X"]
        found = [_dispatch(event) for event in complete if event.get("cat") in ON_DEVICE]
        found = found or [_dispatch(event) for event in _outermost(complete)]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfileError(
            f"{path} cannot be read as a trace of PyTorch's profiler: {error!r}; profile again"
        ) from error
    if not found:
        raise ProfileError(f"{path} has no kernel and no operator: profile a step")
    return of_dispatches(found, sources=(str(path),))


def _dispatch(event: dict[str, Any]) -> Dispatch:
    start = float(event["ts"]) * 1e3  # microseconds
    end = start + float(event.get("dur", 0)) * 1e3
    stream = event.get("args", {}).get("stream", event.get("tid", 0))
    return Dispatch(str(event["name"]), int(start), int(end), stream if type(stream) is int else 0)


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators that no other operator of their thread called."""
    found: list[dict[str, Any]] = []
    reached: dict[Any, float] = {}
    for event in _on_host(events):
        if event["ts"] >= reached.get(event["tid"], float("-inf")):
            found.append(event)
            reached[event["tid"]] = event["ts"] + event.get("dur", 0)
    return found


def _on_host(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators in order of their start, one that calls another before it."""
    on_host = (event for event in events if event.get("cat") == ON_HOST)
    return sorted(on_host, key=lambda one: (one["ts"], -one.get("dur", 0)))
