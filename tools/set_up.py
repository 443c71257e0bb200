"""Make a virtual environment of this checkout: set_up.py VENV EXTRAS [CONSTRAINTS].

A torch that the calling Python can import is kept, and so is its triton: a container has builds
for its GPU, which pip would replace. The Makefile says when this runs.
"""

import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

AMD = "test -e /dev/kfd && grep -qs 'simd_count [1-9]' /sys/class/kfd/kfd/topology/nodes/*/prop*"


def project(text: str) -> str:
    """The name that a requirement or a distribution begins with, as pip compares names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", text)[0]).lower()


def run(*command: object) -> None:
    if subprocess.call([str(part) for part in command]) != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def main(folder: str, extras: str, constraints: str = "") -> None:
    venv, has_triton = Path(folder).absolute(), util.find_spec("triton") is not None
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit("Python 3.10 or newer is needed: make PYTHON=/path/to/python ...")
    if venv.is_symlink() or (venv.exists() and not (venv / "pyvenv.cfg").exists()):
        sys.exit(f"{venv} is not a virtual environment of this checkout: remove it")
    if Path(sys.prefix) == venv:
        sys.exit(f"{venv} is active and out of date: run `deactivate`, then this again")
    tested = "newest" if sys.version_info >= (3, 11) else "floor"
    pins = Path(constraints or f"constraints/{tested}.txt").read_text().splitlines()
    rocm = False
    versions: dict[str, str] = {}  # versions of the caller's distributions
    if util.find_spec("torch"):
        from torch.version import hip  # its owner has to repair a torch for which this raises

        rocm = hip is not None
        for dist in metadata.distributions():
            versions.setdefault(project(dist.metadata["Name"]), dist.version)
        # What else pip finds there may be upgraded, but needs no version of ours.
        pins = [pin for pin in pins if project(pin) not in {"torch", "triton", *versions}]
        pins += [
            f"{name}=={versions[name]}" for name in versions if name == "torch" or "triton" in name
        ]
    if not rocm and subprocess.call(AMD, shell=True) == 0:
        sys.exit(
            f"for the AMD GPU {sys.executable} needs a ROCm torch: install it, or use a container"
        )
    if not rocm and not (versions and has_triton):
        extras += ",triton"

    run(sys.executable, "-m", "venv", "--clear", venv)
    if versions:  # --system-site-packages would not show the packages of a virtual environment
        (packages,) = venv.glob("lib/python*/site-packages")
        paths = [path for path in sys.path if path.endswith("-packages")]
        (packages / "caller.pth").write_text("\n".join(paths))
    pip = (venv / "bin/python", "-m", "pip")
    (venv / "constraints.txt").write_text("\n".join(pins))
    run(*pip, "install", "-qe", f".[{extras}]", "-c", venv / "constraints.txt")
    if has_triton and versions and "triton" not in versions:
        # ROCm's has another name; that which liger-kernel requires would be found before it.
        run(*pip, "uninstall", "-qy", "triton")


if __name__ == "__main__":
    main(*sys.argv[1:])
