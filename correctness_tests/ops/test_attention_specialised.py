"""Attention's kernels with specialised warps: when they are chosen, what they are launched with.

Triton cannot interpret Gluon. Without a GPU the launches are recorded as for a chip that has what
these kernels need, and compiled for it; on such a GPU the results are compared with float64.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.limits import of_op, triton_minor, verdict
from tinyllama.harness.kernels import chip_of
from tinyllama.harness.kernels.chips import processors
from tinyllama.harness.kernels.gluon import lacking
from tinyllama.harness.kernels.launch import Launch, launched, recorded
from tinyllama.harness.kernels.resources import compilation
from tinyllama.harness.kernels.resources import lacking as lacking_compiler
from tinyllama.ops.attention import attend, attend_backward, attention
from tinyllama.ops.attention.configs import (
    OFF,
    SPECIALISED_FORWARD,
    SPECIALISED_KEYS,
    SPECIALISED_QUERIES,
    Config,
)
from tinyllama.ops.rope import rotate

SPACES = (SPECIALISED_FORWARD, SPECIALISED_QUERIES, SPECIALISED_KEYS)
CHIP = "sm_90"  # has both TMA and wgmma
OTHERS = ("gfx942", "gfx950", "sm_80", "sm_100")
USUAL = ["forward_kernel", "backward_kernel", "backward_kernel"]
CHOSEN = ["specialised_forward_kernel", "backward_kernel", "specialised_keys_kernel"]
needs_gluon = pytest.mark.skipif(lacking(CHIP) is not None, reason=str(lacking(CHIP)))
ON = {64: Config(ON=1, STEP=128, num_stages=2), 128: Config(ON=1, STEP=64, num_stages=2)}


@contextlib.contextmanager
def everywhere(config: dict[int, Config], ready: bool = True) -> Iterator[None]:
    """Each of the three kernels in this configuration, for every length."""
    with contextlib.ExitStack() as stack:
        for space in SPACES:
            for D, choices in config.items():
                for tokens in (512, 1024, 2048, 4096):
                    stack.enter_context(space.force(choices, D=D, tokens=tokens, gluon=ready))
        yield


def launches(
    chip: str = CHIP,
    *,
    B: int = 1,
    T: int = 4096,
    heads: tuple[int, int] = (8, 2),
    K: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
    rotated: bool = False,
    scaled: bool = False,
) -> list[Launch]:
    """Forward and backward as they are launched on a chip."""
    H, G = heads

    def tensor(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    if packed:
        q, k, v = tensor(B, T, H + 2 * G, K).split((H, G, G), 2)
    else:
        q, k, v = tensor(B, T, H, K), tensor(B, T, G, K), tensor(B, T, G, K)
    wide = torch.float32
    tables = (tensor(T, K // 2, dtype=wide),) * 2 if rotated else ()
    parts = (tensor(B, T, dtype=wide), tensor(B, T, H + G, dtype=wide)) if scaled else None
    with recorded(chip) as launches:
        o, lse = attend(q, k, v)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        attend_backward(torch.empty_like(o), q, k, v, o, lse, *gradients, *tables, scaled=parts)
    return launches


def names(launches: list[Launch]) -> list[str]:
    return [launch.identity.removeprefix("attention.") for launch in launches]


# -- the choice -------------------------------------------------------------------------------


@needs_gluon
@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float32},
        {"T": 4096 + 64},
        {"T": 384},
        {"T": 4095},
        {"K": 32},
        {"K": 256},
        {"K": 96},
    ],
    ids=str,
)
def test_what_they_do_not_cover_is_for_the_portable_kernels(changed: dict) -> None:
    assert names(launches(**changed)) == USUAL


@needs_gluon
def test_strides_that_a_descriptor_cannot_have_are_for_the_portable_kernels() -> None:
    def forward(make: torch.Tensor) -> list[str]:
        with recorded(CHIP) as launches:
            attend(make, make, make)
        return names(launches)

    room = torch.empty(2 * 4096 * 2 * 72, dtype=torch.bfloat16, device="meta")
    strides = (4096 * 128, 128, 64, 1)
    assert forward(room.as_strided((2, 4096, 2, 64), strides)) == CHOSEN[:1]
    for strides, offset in (
        ((4096 * 64, 64, 2 * 4096 * 64, 1), 0),  # heads outside of tokens
        ((4096 * 132, 132, 64, 1), 0),  # rows at no multiple of 16 bytes
        ((4096 * 136 + 8, 136, 64, 1), 0),  # a gap between batches
        ((4096 * 144, 144, 72, 1), 0),  # a gap between heads
    ):
        strided = room.as_strided((2, 4096, 2, 64), strides, offset)
        assert forward(strided) == USUAL[:1], strides


@pytest.mark.parametrize("chip", ["", *OTHERS])
def test_other_chips_keep_the_portable_kernels(chip: str) -> None:
    assert names(launches(chip)) == USUAL
    assert CHIP in str(lacking(chip))


@pytest.mark.parametrize("chip", ["", *OTHERS])
def test_choosing_them_where_they_cannot_run_is_an_error(chip: str) -> None:
    where = chip or "a CPU"
    with everywhere(ON, ready=False), pytest.raises(ValueError, match=f"ON=1.*{where}.*ON=0"):
        launches(chip)


# -- what is launched -------------------------------------------------------------------------


@pytest.mark.long
@needs_gluon
@pytest.mark.skipif(lacking_compiler(CHIP) is not None, reason=str(lacking_compiler(CHIP)))
@pytest.mark.parametrize(
    ("K", "rotated"),
    [
        pytest.param(64, True, marks=pytest.mark.slow("kernels are compiled: five seconds")),
        (128, True),
        (128, False),
    ],
)
def test_they_compile_for_the_chip(K: int, rotated: bool) -> None:
    """Rotated and scaled, as in a stack, which no timed case has at this length; and the kernel of
    queries. The others are recorded of timed cases: `correctness_tests/kernels` holds these."""
    with everywhere(ON):
        _, queries, keys = launches(K=K, rotated=rotated, scaled=rotated)
    limits = of_op("attention", attention.folder).of(triton_minor())
    for launch in (queries, keys) if rotated else (queries,):
        excesses, taken = verdict(compilation(launch, CHIP), limits)
        assert taken is not None, excesses
        assert not taken.unfit()
        assert taken.spilled <= 32, taken  # of 240 registers of a thread
        assert "wgmma bf16" in taken.products


@needs_gluon
def test_a_launch_on_tensors_of_a_cpu_says_that_gluon_needs_a_gpu() -> None:
    from tinyllama.ops.attention.specialised import forward

    q = torch.zeros(1, 512, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="in Gluon, which runs on a GPU only"):
        forward(ON[64], q, q, q, torch.empty_like(q), torch.zeros(1, 1, 512))


# -- results ----------------------------------------------------------------------------------

SHAPES = [  # B, T, H, G
    (1, 512, 2, 2),
    (3, 640, 4, 2),
    (2, 1024, 8, 2),
    (1, 2048, 4, 1),
    (1, 4096, 2, 1),
]


@pytest.fixture
def capable(device: torch.device) -> Iterator[torch.device]:
    """A GPU that can run them, with so few processors that small shapes have tiles for each."""
    reason = lacking(chip_of(device))
    if reason is not None:
        pytest.skip(reason)
    with processors(7):  # several tiles a program, in both orders
        yield device


def exact(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """do, q, k, v -> o, dq, dk, dv in float64."""
    do, *inputs = (x.detach().double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    o = attention["eager"].call(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def drawn(
    device: torch.device, shape: tuple[int, ...], K: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """do, q, k, v."""
    B, T, H, G = shape
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(B, T, heads, K, device=device, generator=generator).to(dtype)
        for heads in (H, H, G, G)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_float64_in_equal_bits_each_time(
    shape: tuple[int, ...], K: int, dtype: torch.dtype, capable: torch.device
) -> None:
    do, q, k, v = drawn(capable, shape, K, dtype)

    def results() -> list[torch.Tensor]:
        o, lse = attend(q, k, v)
        gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        attend_backward(do, q, k, v, o, lse, *gradients)
        return [o, *gradients]

    with everywhere(ON):
        with launched() as launches:
            first = results()
        again = results()
    assert [launch.kernel.metadata.name for launch in launches] == [
        f"attention_specialised_{part}" for part in ("forward", "queries", "keys")
    ]
    assert all(torch.equal(left, right) for left, right in zip(first, again, strict=True))
    for tensor, expected in zip(first, exact([do, q, k, v]), strict=True):
        assert off(tensor, expected) < (5e-3 if dtype is torch.bfloat16 else 8e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
def test_rotated_and_scaled_gradients_are_those_of_the_portable_kernels(
    K: int, capable: torch.device
) -> None:
    """In the packed layout of a block."""
    B, T, H, G = 2, 1024, 4, 2
    do, *inputs = drawn(capable, (B, T, H, G), K, torch.bfloat16)
    qkv = torch.cat(inputs, 2)
    q, k, v = qkv.split((H, G, G), 2)
    angle = torch.rand(T, K // 2, device=capable)
    tables = (angle.cos(), angle.sin())
    rstd = torch.rand(B, T, device=capable) + 0.5
    rotate(q, k, *tables, q, k)

    def results() -> list[torch.Tensor]:
        o, lse = attend(q, k, v)
        gradients = torch.full_like(qkv, float("nan"))
        parts = torch.full((B, T, H + G), float("nan"), device=capable)
        dq, dk, dv = gradients.split((H, G, G), 2)
        scaled = (rstd, parts)
        attend_backward(do, q, k, v, o, lse, dq, dk, dv, *tables, scaled=scaled)
        return [o, gradients, parts]

    with everywhere({K: OFF}):
        expected = results()
    with everywhere(ON):
        actual = results()
    for left, right in zip(actual, expected, strict=True):
        assert off(left, right.double()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_come_through_autograd_and_torch_compile(
    compiled: bool, capable: torch.device
) -> None:
    do, *inputs = drawn(capable, (1, 1024, 4, 2), 64, torch.bfloat16)
    call = attention["triton"].call
    q, k, v = (x.requires_grad_() for x in inputs)
    with everywhere(ON):
        o = (torch.compile(call) if compiled else call)(q, k, v)
        actual = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
    for tensor, expected in zip(actual, exact([do, *(x.detach() for x in inputs)]), strict=True):
        assert off(tensor, expected) < 5e-3
