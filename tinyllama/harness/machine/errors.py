"""What a command reports in one line. Nothing is imported here, so any module may import this."""


class UsageError(ValueError):
    """A value that cannot be used; the message names it and the fix."""


class RunFailedError(RuntimeError):
    """A program that a command ran has failed; the message says how."""
