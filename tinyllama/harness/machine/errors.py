"""What is raised for a value that a user gave. Nothing is imported here, so any module may."""


class UsageError(ValueError):
    """A value that cannot be used; the message names it and the fix."""
