"""The progress of a long session, on its terminal or in its log."""

import os
import sys
import weakref

from tinyllama.harness.machine.progress import Progress, of_stream


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
