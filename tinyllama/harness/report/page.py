"""One HTML page of all records: self-contained, without network and script."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tinyllama.harness.machine.distribution import install, recording
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Target
from tinyllama.harness.report.summary import summaries
from tinyllama.harness.report.tables import left_out, source, tables_of

NEEDS = ("jinja2", "matplotlib")


def check_needs() -> None:
    """Raise ValueError where jinja2 or matplotlib is missing."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(f"the page needs {' and '.join(absent)}: {install('report')}")


def render(
    records: Sequence[Record], targets: Sequence[Target] = (), title: str = "tinyllama"
) -> str:
    """The HTML of all records, a section for each device. targets: what their figures are held to.

    Raises ValueError when jinja2 or matplotlib is missing.
    """
    check_needs()
    import jinja2

    from tinyllama.harness.report.plots import ladder, roofline

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("page.html.j2")
    text = template.render(
        title=title,
        devices=summaries(records, targets),
        recording=recording(),
        ladder=ladder,
        left_out=left_out,
        roofline=roofline,
        source=source,
        tables_of=tables_of,
    )
    return text.rstrip() + "\n"
