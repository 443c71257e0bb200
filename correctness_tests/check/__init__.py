"""`check` and the public door, by what their documents promise."""
