"""The progress of a long session, on its terminal or in its log."""

import os
import sys
import weakref

import pytest

from tinyllama.harness.machine.progress import Progress, of_stream


def of_session(config: pytest.Config) -> Progress:
    """For a session that runs no test: shown by pytest's own terminal."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return Progress(lambda line: None)
    redraw = (lambda text: reporter.rewrite(text, erase=True)) if reporter.isatty else None

    def write(line: str) -> None:
        reporter.write_line(line)
        reporter.flush()

    return Progress(write, redraw)


def beside_tests() -> Progress:
    """For a session whose tests take long. To be made before one runs: what is written to stdout
    while they do is captured."""
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # pytest within pytest has no descriptor
        return of_stream(sys.stdout)
    out = os.fdopen(descriptor, "w", errors="replace", closefd=False)
    weakref.finalize(out, os.close, descriptor)
    return of_stream(out, before="\n")
