"""``tinyllama doctor``: what can run on this machine, and why the rest cannot."""

import argparse
import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

import tinyllama
from tinyllama.harness.machine.distribution import install
from tinyllama.profiling.command_lines import EXECUTABLES

if TYPE_CHECKING:
    import torch

    from tinyllama.model.tiers import Tier

_CAPABILITIES = ("triton", "compile", "capture", "tf32", "bf16", "fp16")
_MODULES = {"transformers": "peers", "pytest_benchmark": "test"}  # module -> optional extra


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    text = "say what can run on this machine, and why the rest cannot"
    parser = subparsers.add_parser("doctor", help=text)
    parser.description = (
        "Print the device, the versions, the tiers and tools that can be used here."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print tables of the device, the versions, the tiers and the tools; 0."""
    import torch
    from rich.table import Table

    from tinyllama.harness.machine.device import default_device, device_name
    from tinyllama.harness.records.results import versions
    from tinyllama.harness.report.terminal import console
    from tinyllama.model.tiers import TIERS

    out = console()
    device = default_device()
    about = Table("what", "here", title="Machine", title_justify="left")
    about.add_row("device", f"{device_name(device)} ({device.type})")
    about.add_row("GPUs that torch sees", str(torch.cuda.device_count()))
    for name, version in {"tinyllama": tinyllama.__version__, **versions()}.items():
        about.add_row(name, version)
    out.print(about)

    tiers = Table("tier", "what it is", "runs here", "how", title="Tiers", title_justify="left")
    for tier in TIERS.values():
        tiers.add_row(tier.name, tier.title, _verdict(tier.cannot_run(device)), _how(tier, device))
    out.print(tiers)

    tools = Table("tool", "usable", title="Tools", title_justify="left")
    for name, missing in tool_reasons(device).items():
        tools.add_row(name, _verdict(missing))
    out.print(tools)
    return 0


def tool_reasons(device: "torch.device") -> dict[str, str | None]:
    """By tool: None where it can be used, else why it cannot."""
    from tinyllama.harness.machine.device import cannot

    reasons = {capability: cannot(capability, device) for capability in _CAPABILITIES}
    for module, extra in _MODULES.items():
        there = importlib.util.find_spec(module)
        reasons[module] = None if there else f"not installed ({install(extra)})"
    for profiler in EXECUTABLES.values():
        reasons[profiler] = None if shutil.which(profiler) else "not on PATH"
    return reasons


def _verdict(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def _how(tier: "Tier", device: "torch.device") -> str:
    """How a tier runs on a device, and which parts of its plan cannot run, with the reasons."""
    from tinyllama.harness.machine.device import cannot

    plan = tier.plan(device.type)
    reasons = {way: cannot(way, device) for way in ("compile", "capture") if getattr(plan, way)}
    lacking = {way: reason for way, reason in reasons.items() if reason}
    runs = tier.without(*lacking).plan(device.type)
    return "; ".join([str(runs), *(f"without {way}: {why}" for way, why in lacking.items())])
