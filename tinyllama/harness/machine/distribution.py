"""The name under which this is installed; the import name is another one."""

DISTRIBUTION = "tinyllama-harness"


def install(extra: str) -> str:
    """The command that installs an optional extra of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
