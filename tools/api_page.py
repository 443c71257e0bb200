"""docs/api.md: the public names, from their signatures and docstrings, and the declared ops."""

import importlib
import inspect
import re
import textwrap
from typing import Any

from tinyllama.ops import OPS

# What users import. The names of a module that has no ``__all__`` are those that it defines.
MODULES = ("tinyllama.testing", "tinyllama.harness", "tinyllama.harness.values")
PLAIN = (type(inspect.Parameter.empty), str, int, float, tuple, type(None))
FIELD = re.compile(r"^(?:[a-z_*]+(?:, )?)+: ")  # "params: in place of the op's defaults."


def names() -> str:
    """Every public name with its signature and docstring."""
    return "\n\n".join(map(_module, MODULES))


def ops() -> str:
    """A table of the ops of this package."""
    lines = ["| op | inputs | outputs | parameters | providers |", "|---|---|---|---|---|"]
    for name, op in OPS.items():
        home = op["eager"].module
        inputs = ", ".join(f"{key} ({spec.shape})" for key, spec in op.inputs.items())
        outputs = ", ".join(f"{key} ({spec.shape})" for key, spec in op.outputs.items())
        params = ", ".join(f"`{key}={value!r}`" for key, value in op.params.items())
        lines.append(
            f"| `{home}.{name}` | {inputs} | {outputs} | {params} | {', '.join(op.providers)} |"
        )
    return "\n".join(lines)


def _module(name: str) -> str:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [
        key
        for key, member in vars(module).items()
        if not key.startswith("_") and getattr(member, "__module__", "") == name
    ]
    summary = _markdown(inspect.getdoc(module) or "").partition("\n\n")[0]
    members = [_entry(key, getattr(module, key), "###") for key in public]
    return "\n\n".join([f"## {name}", summary, *members])


def _entry(name: str, member: Any, level: str) -> str:
    text = f"{level} `{name}{_signature(member)}`\n\n{_markdown(inspect.getdoc(member) or '')}"
    if not inspect.isclass(member):
        return text
    methods = [
        _entry(f"{name}.{key}", method, "####")
        for key, method in vars(member).items()
        if not key.startswith("_") and inspect.isfunction(method) and inspect.getdoc(method)
    ]
    return "\n\n".join([text, *methods])


def _signature(member: Any) -> str:
    """Of a class its fields without annotations, as its docstring says what they are; "" for a
    class that a built-in one initialises. What is no plain default is left out as ``...``."""
    if inspect.isclass(member) and not inspect.isfunction(member.__init__):
        return ""
    signature = inspect.signature(member)
    parameters = []
    for name, parameter in signature.parameters.items():
        if name == "self":
            continue
        if not isinstance(parameter.default, PLAIN):
            parameter = parameter.replace(default=...)
        if inspect.isclass(member):
            parameter = parameter.replace(annotation=parameter.empty)
        parameters.append(parameter)
    returns = signature.empty if inspect.isclass(member) else signature.return_annotation
    text = str(signature.replace(parameters=parameters, return_annotation=returns))
    return re.sub(r"(?:\w+\.)+(?=[A-Za-z_])", "", text).replace("Ellipsis", "...")


def _markdown(docstring: str) -> str:
    """Paragraphs, fields as lists, and indented text as code."""
    blocks = []
    for block in docstring.replace("``", "`").split("\n\n"):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines if line):
            blocks.append(f"```python\n{textwrap.dedent(block)}\n```")
        else:
            items = [f"- {line}" if FIELD.match(line) else line.strip() for line in lines]
            blocks.append("\n".join(items))
    return "\n\n".join(blocks)
