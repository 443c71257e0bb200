"""Every option of a command is read by the code that the command runs: one that is parsed and never
read is ignored without a word.

The source is searched, and nothing is run: for ``args.NAME``, ``getattr(args, "NAME")``, and
``vars(args)`` where `OF_ALL` says which names are taken from it.
"""

import argparse
import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from correctness_tests.support.commands import COMMANDS
from tinyllama.cli import train
from tinyllama.model.config import ModelConfig, TrainConfig

pytestmark = pytest.mark.quick

# What functions take from ``vars(args)``.
OF_ALL = {train.settings: {one.name for each in (ModelConfig, TrainConfig) for one in fields(each)}}


def unread(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command that nothing reads which its ``run`` gives the arguments to."""
    read, seen = set[str](), set[Any]()
    waiting = [parser.get_default("run")]
    while waiting:
        function = waiting.pop()
        if function not in seen:
            seen.add(function)
            names, given_to = _uses(function)
            read |= names
            waiting += given_to
    known = {action.dest for action in parser._actions if action.dest != argparse.SUPPRESS}
    return known - read - {"help"}


def _uses(function: Callable[..., Any]) -> tuple[set[str], list[Callable[..., Any]]]:
    """The options that a function reads, and the functions that it gives the arguments to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    (args,) = (
        one.arg
        for one in (*tree.args.args, *tree.args.kwonlyargs)
        if one.annotation is not None and ast.unparse(one.annotation) == "argparse.Namespace"
    )

    def is_args(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == args

    names, given_to = set[str](), list[Callable[..., Any]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            names |= {node.attr} if isinstance(node.ctx, ast.Load) else set()
        elif isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            called = ast.unparse(node.func)
            if not any(map(is_args, values)):
                continue
            if called == "vars":
                names |= OF_ALL[function]
            elif called == "getattr":
                names |= _texts(node.args[1], tree)
            else:  # also those that a call makes another function of
                parts = [part for value in (node.func, *values) for part in ast.walk(value)]
                called_names = {part.id for part in parts if isinstance(part, ast.Name)}
                each = (_named(name, function, tree) for name in called_names)
                given_to += [one for one in each if _takes_args(one)]
    return names, given_to


def _named(name: str, function: Callable[..., Any], tree: ast.AST) -> Any:
    """What a name is in a function: what it imports from this project, or what is around it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinyllama."):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return getattr(importlib.import_module(str(node.module)), alias.name)
    return function.__globals__.get(name)


def _takes_args(value: Any) -> bool:
    given = inspect.signature(value).parameters.values() if inspect.isfunction(value) else ()
    return any(one.annotation is argparse.Namespace for one in given)


def _texts(node: ast.AST, tree: ast.AST) -> set[str]:
    """A literal text, or those that a loop's variable takes."""
    if isinstance(node, ast.Name):
        loops = [one for one in ast.walk(tree) if isinstance(one, (ast.For, ast.comprehension))]
        each = [one.iter for one in loops if ast.unparse(one.target) == node.id]
        return {text for one in each for text in ast.literal_eval(one)}
    return {ast.literal_eval(node)}


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_option_is_read(name: tuple[str, ...]) -> None:
    assert not unread(COMMANDS[name])


def _sample(args: argparse.Namespace) -> int:
    args.written = 1
    for name in ("looped",):
        getattr(args, name)
    return _given(1, other=args) if args.read else getattr(args, "named")  # noqa: B009


def _given(times: int, other: argparse.Namespace) -> int:
    return times * int(other.passed_on)


def test_an_option_that_is_only_written_is_not_read() -> None:
    parser = argparse.ArgumentParser()
    for name in ("read", "written", "looped", "named", "passed-on", "unread"):
        parser.add_argument(f"--{name}")
    parser.set_defaults(run=_sample)
    assert unread(parser) == {"written", "unread"}
