"""What `tinyllama stages --keep` kept of each device, for the workshop."""

import json

from tinyllama.harness.records.results import short
from tinyllama.workshop.running import KIND
from tools.model_tables import table as markdown
from tools.result_tables import ROOT


def table() -> str:
    """The newest comparison of each device, and whether the documents' order holds there."""
    tables = []
    for folder in sorted((ROOT / "results").glob(f"*/{KIND}")):
        newest = json.loads(max(folder.glob("*.json")).read_text(encoding="utf-8"))
        headings, *rows = newest["rows"]
        lines = "\n".join(f"- {line}" for line in newest["order"])
        source = f"{newest['device']}, `{newest['group']}`, torch {newest['versions']['torch']}"
        when = f"commit {short(newest['commit'])}, {newest['date'][:10]}"
        tables.append(f"{markdown(headings, rows)}\n\n{lines}\n\nMeasured on {source}, {when}.")
    return "\n\n".join(tables) or "Nothing is recorded yet."
