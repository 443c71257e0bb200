"""The name under which this is installed; the import name is another one."""

from pathlib import Path

DISTRIBUTION = "tinyllama-harness"


def install(extra: str) -> str:
    """The command that installs an optional extra of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def recording() -> str:
    """The command that makes a record here: in a checkout of this project, or in another place."""
    try:
        text = Path("pyproject.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    in_checkout = f'name = "{DISTRIBUTION}"' in text
    return "pytest perf_tests --record" if in_checkout else "pytest --record"
