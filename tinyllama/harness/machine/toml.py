"""Python's reader of TOML: a module of its own from 3.11 on, before that the package tomli."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["tomllib"]
