"""The one door to Gluon, Triton's language in which a kernel chooses layouts, copies and warps.

    from tinyllama.harness.kernels.gluon import gl, jit, lacking

    if lacking(chip_of(device)) is None: ...

Such kernels are for chips with a copy engine for tiles and matrix units that read shared memory for
four warps at a time (TMA and wgmma). They are recorded and compiled like other kernels of ours
(`tinyllama.harness.kernels.launch`), but Triton cannot interpret them: on tensors of a CPU a launch
is an error, and their results are compared on a GPU only. Where triton has no Gluon, or another
form of it, a module with such kernels still imports.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tinyllama.harness.kernels.launch import HAS_TRITON, tl
from tinyllama.harness.machine.distribution import install

# Chips with both, by the instruction set: later ones have other matrix units.
CHIPS = ("sm_90",)
# What kernels of ours use of the language for these chips: our name, and the names that versions
# of triton give it, the newest first.
NAMES = {
    "fence_async_shared": ("fence_async_shared",),
    "mbarrier": ("mbarrier",),
    "warpgroup_mma": ("warpgroup_mma",),
    "warpgroup_mma_wait": ("warpgroup_mma_wait",),
    "load_tile": ("tma.async_load", "tma.async_copy_global_to_shared"),
    "store_tile": ("tma.async_store", "tma.async_copy_shared_to_global"),
    "wait_for_stores": ("tma.store_wait",),
}


def _members() -> tuple[dict[str, Any], str | None]:
    """The names, and why there are none."""
    if not HAS_TRITON:
        return {}, f"triton is not installed: {install('triton')}"
    try:
        from triton.experimental.gluon import _runtime, language
        from triton.experimental.gluon.language.nvidia import hopper as units
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError as error:
        return {}, f"this triton has no Gluon for it ({error})"
    members: dict[str, Any] = {}
    for ours, theirs in NAMES.items():
        for path in reversed(theirs):
            with contextlib.suppress(AttributeError):
                members[ours] = operator.attrgetter(path)(units)
    missing = [" or ".join(theirs) for ours, theirs in NAMES.items() if ours not in members]
    if "functions_and_args" not in inspect.signature(language.warp_specialize).parameters:
        missing.append("warp_specialize(functions_and_args, ...)")
    if missing:
        return {}, f"this triton's Gluon has no {', '.join(missing)}"
    return {"gl": language, "runtime": _runtime, "descriptor": TensorDescriptor, **members}, None


_NAMES, _MISSING = _members()


def __getattr__(name: str) -> Any:
    """What kernels use of the language, by our names; where there is no Gluon, ``gl`` has every
    constant that a module asks for, and the other names are None."""
    if name == "gl":
        return _NAMES.get("gl", tl)
    if name in NAMES:
        return _NAMES.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    jit: Any = None
elif _MISSING is None:
    from tinyllama.harness.kernels.launch import Kernel, kernel_of

    class GluonKernel(Kernel, _NAMES["runtime"].GluonJITFunction):
        """A jitted function in Gluon."""

        interpretable = False
        source_type = _NAMES["runtime"].GluonASTSource

    def jit(
        function: Callable[..., Any] | None = None, *, unspecialised: Sequence[str] = ()
    ) -> Any:
        """Make a kernel of a function in Gluon (or of one that kernels call). unspecialised:
        whole numbers whose values do not decide what is compiled."""
        if function is None:
            return functools.partial(jit, unspecialised=unspecialised)
        return kernel_of(function, GluonKernel, do_not_specialize=list(unspecialised))

else:

    class _Missing:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.fn, self.__name__ = function, function.__name__

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError(f"{self.__name__} needs Gluon: {_MISSING}")

    def jit(
        function: Callable[..., Any] | None = None, *, unspecialised: Sequence[str] = ()
    ) -> Any:
        """Stands for a kernel where Gluon is not there."""
        return jit if function is None else _Missing(function)


def lacking(chip: str) -> str | None:
    """Why kernels in Gluon for copies of tiles and products of warp groups cannot run on a chip
    (as `chip_of` gives it, "" for a CPU); None when they can."""
    if chip not in CHIPS:
        where = chip or "a CPU"
        return f"{where} has not both TMA and wgmma, as {', '.join(CHIPS)} has"
    return _MISSING


def described(tensor: torch.Tensor, block: Sequence[int]) -> Any:
    """A tensor as a descriptor for kernels in Gluon, whose copies take this block of it.

    Its rows must begin at multiples of 16 bytes. A block of rows lies in shared memory as products
    read it; one of a vector (of one axis), as it is.
    """
    gl = _NAMES["gl"]
    element = getattr(gl, str(tensor.dtype).removeprefix("torch."))
    if tensor.dim() == 1:
        layout = gl.NVMMASharedLayout(0, element.primitive_bitwidth, 1)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    shape, strides = list(tensor.shape), list(tensor.stride())
    return _NAMES["descriptor"](tensor, shape, strides, list(block), layout)
