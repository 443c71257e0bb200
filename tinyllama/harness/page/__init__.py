"""One page made from records: self-contained, without network and script."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.distribution import install, recording
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import OpTarget, Target

__all__ = ["render"]

NEEDS = ("jinja2", "matplotlib")


def check_needs() -> None:
    """Raise ValueError where jinja2 or matplotlib is missing."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        needs = " and ".join(absent)
        raise ValueError(f"the page needs {needs}: {install('report')}")


def render(
    records: Sequence[Record],
    targets: Sequence[Target | OpTarget] = (),
    title: str = "tinyllama",
    certificates: Sequence[dict[str, Any]] = (),
) -> str:
    """The HTML of all records: of each device and group the newest complete one, and the history;
    and of each device how often the gate errs there.

    targets: bars, and claims of the published documents. Raises ValueError when jinja2
    or matplotlib is missing.
    """
    check_needs()
    import jinja2

    from tinyllama.harness.page.view import page

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    data = page(records, targets, title, certificates)
    text = environment.get_template("page.html.j2").render(page=data, recording=recording())
    return text.rstrip() + "\n"
