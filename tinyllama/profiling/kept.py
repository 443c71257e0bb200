"""The summary of a profile, small enough to be kept among the records."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import read_regular, write_json
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records.results import folder as folder_of
from tinyllama.profiling import shown
from tinyllama.profiling.kernels import Counter, Profile, ProfileError, Total
from tinyllama.profiling.running import FACTS

KIND = "profile"
# What is in these files is the summary; what a picture needs besides is left out.
FILES = {name: f"{name}.json" for name in ("flops", "memory", "triton", "energy")}
LEFT_OUT = ("course",)
NONE = {("trace", "rocprofv3"), ("rocprof-compute", "rocprof-compute"), ("rocprof-sys",) * 2}


def leaves_none(tool: str, way: str) -> bool:
    """Whether the files of a tool have no summary."""
    return (tool, way) in NONE


def check(tool: str, way: str) -> None:
    """Raise UsageError for a tool whose files have no summary."""
    if leaves_none(tool, way):
        raise UsageError(
            f"--keep: {way} leaves no summary of {tool}, but files to look at: remove --keep, or "
            "keep profile hotspots"
        )


def keep(tool: str, way: str, folder: Path, results: Path, device: str) -> Path:
    """Write the summary of a folder of profile below the results of a device; its path."""
    facts = json_of((folder / FACTS).read_text(encoding="utf-8"))
    if tool in FILES:
        found = json_of((folder / FILES[tool]).read_text(encoding="utf-8"))
        body = {name: value for name, value in found.items() if name not in LEFT_OUT}
    else:
        profile = shown.read(folder)
        body = {
            "totals": [asdict(total) for total in profile.totals],
            "counters": [asdict(counter) for counter in profile.counters],
        }
    path = folder_of(results, device) / "profiles" / f"{folder.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"kind": KIND, "way": way, "device": device, **facts, "found": body})
    return path


def read(path: Path) -> Profile | None:
    """The profile in a summary that `keep` wrote; None for another file. Raises ProfileError for a
    summary without kernels."""
    try:
        content: Any = json_of(read_regular(path))
        if not isinstance(content, dict) or content.get("kind") != KIND:
            return None
        found = content["found"]
        totals = tuple(Total(**total) for total in found["totals"])
        counters = tuple(Counter(**counter) for counter in found["counters"])
    except (OSError, ValueError):
        return None  # whoever reads it next says what is wrong with it
    except (LookupError, TypeError) as error:
        raise ProfileError(
            f"{path} is a summary without kernels: name one of hotspots, trace, torch or counters"
        ) from error
    return Profile(totals, counters=counters, sources=(str(path),))
