"""The interpreter's own tests: bfloat16 as torch has it, and a language that is put back."""

import importlib.util
import inspect
import itertools
import math
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from tinyllama.harness.kernels.bounds import Bounds, watched
from tinyllama.harness.kernels.interpreter import limited
from tinyllama.harness.kernels.launch import jit, recorded, tl
from tinyllama.harness.kernels.resources import compile_launch, lacking
from tinyllama.harness.kernels.tuned import adopted

EDGES = [
    0.0,
    -0.0,
    1.0,
    1.00390625,  # halfway from 1 to the next bfloat16: to 1, whose last bit is even
    1.01171875,  # halfway between two others: up, to the even one
    -1.00390625,
    1.0039063692092896,  # one float32 above halfway
    1.003906011581421,  # one below
    3.3895313892515355e38,  # the largest bfloat16
    3.3961775292304601e38,  # halfway to the next, which is infinity
    3.4028234663852886e38,
    -3.4028234663852886e38,
    1.1754943508222875e-38,  # the smallest normal
    9.183549615799121e-41,  # the smallest subnormal bfloat16
    4.591774807899561e-41,  # half of it: to zero
    1.3775324423698682e-40,  # one and a half: to two
    1.401298464324817e-45,
    math.inf,
    -math.inf,
    math.nan,
]
PATTERNS = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def floats(n: int = 1 << 16) -> torch.Tensor:
    """float32 of any bit pattern, the edges first."""
    random = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0))
    values = random.to(torch.int32).view(torch.float32)
    values[: len(EDGES)] = torch.tensor(EDGES)
    return values


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit (the sign of zero too), where not NaN in both."""
    assert found.dtype is expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    kept = ~expected.isnan()
    assert torch.equal(found[kept].view(bits), expected[kept].view(bits))


# -- kernels ----------------------------------------------------------------------------------


@jit
def copy(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def copied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    copy[(-(-x.numel() // 4096),)](x, y, x.numel(), BLOCK=4096)
    return y


def test_loads_and_stores_keep_every_bfloat16() -> None:
    assert_same(copied(PATTERNS, torch.bfloat16), PATTERNS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_load_of_bfloat16_has_its_value(dtype: torch.dtype) -> None:
    inside = PATTERNS.float().abs() <= 65504
    expected = torch.where(inside, PATTERNS, torch.zeros((), dtype=torch.bfloat16))
    assert_same(copied(expected, dtype), expected.to(dtype))


def test_a_store_of_float32_rounds_to_nearest() -> None:
    values = floats()
    assert_same(copied(values, torch.bfloat16), values.bfloat16())
    halfway = values[3:6].bfloat16()
    assert halfway.tolist() == [1.0, 1.015625, -1.0], "the edges do not test ties"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8], ids=str)
def test_integers_become_bfloat16_and_back(dtype: torch.dtype) -> None:
    whole = torch.tensor([0, 1, -1, 127, -128, 100, 37]).to(dtype)
    if dtype is not torch.int8:
        whole = torch.cat((whole, torch.tensor([257, 259, 65537, -(2**24)]).to(dtype)))
    assert_same(copied(whole, torch.bfloat16), whole.bfloat16())
    parts = torch.tensor([0.0, 1.75, -1.75, 100.5, -0.5]).bfloat16()
    assert torch.equal(copied(parts, dtype), parts.to(dtype))


@jit
def powers(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    power = tl.exp(tl.load(x + at, mask=at < n, other=100.0))
    tl.store(y + at, (power - power).to(y.dtype.element_ty), mask=at < n)


def test_what_overflows_is_infinite_without_a_warning() -> None:
    """As on a GPU; warnings are errors here. The elements beyond the mask overflow, too."""
    assert copied(torch.tensor([1e6, -1e6, 2.0]), torch.float16).tolist() == [
        math.inf,
        -math.inf,
        2.0,
    ]
    y = torch.ones(5)
    powers[(1,)](torch.tensor([0.0, 1.0, 100.0]), y, 3, BLOCK=8)
    assert y[:2].tolist() == [0.0, 0.0]
    assert y[2].isnan()
    assert y[3:].tolist() == [1.0, 1.0]


@jit
def arithmetic(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + n + at, a - b)
    tl.store(out + 2 * n + at, a * b)
    tl.store(out + 3 * n + at, tl.maximum(a, b))
    tl.store(out + 4 * n + at, tl.where(a > b, a, -b))
    tl.store(out + 5 * n + at, a * b + a)


def test_arithmetic_rounds_after_each_operation() -> None:
    a, b = bf16(256), bf16(256, seed=1)
    out = torch.zeros(6, 256, dtype=torch.bfloat16)
    arithmetic[(1,)](a, b, out, 256, BLOCK=256)
    expected = [a + b, a - b, a * b, torch.maximum(a, b), torch.where(a > b, a, -b), a * b + a]
    assert_same(out, torch.stack(expected))
    once = (a.float() * b.float() + a.float()).bfloat16()
    assert not torch.equal(out[5], once), "one rounding gives the same: the test sees nothing"


@jit
def reductions(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, ROWS)
    a = tl.load(x + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(out + rows, tl.sum(a.to(tl.float32), 1))
    tl.store(out + ROWS + rows, tl.max(a, 1))
    tl.store(out + 2 * ROWS + rows, tl.min(a, 1))
    tl.store(out + 3 * ROWS + rows, tl.sum(a, 1))


def test_sum_max_and_min_see_values() -> None:
    a = bf16(8, 64)
    out = torch.zeros(4, 8)
    reductions[(1,)](a, out, ROWS=8, COLUMNS=64)
    exact = a.double().sum(1)
    torch.testing.assert_close(out[0].double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[1], a.amax(1).float())
    assert torch.equal(out[2], a.amin(1).float())
    # Rounded to bfloat16 at most once, at the end.
    torch.testing.assert_close(out[3].double(), exact, rtol=2**-8, atol=1e-5)


@jit
def product(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(x + m * K + tl.arange(0, K)[None, :])
    b = tl.load(y + tl.arange(0, K)[:, None] * N + n)
    sums = tl.dot(a, b, input_precision="ieee")
    tl.store(out + m * N + n, sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_have_the_accuracy_of_float32(dtype: torch.dtype) -> None:
    a, b = bf16(16, 128), bf16(128, 16, seed=1)
    out = torch.zeros(16, 16, dtype=dtype)
    product[(1,)](a, b, out, M=16, N=16, K=128)
    exact = a.double() @ b.double()
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]


@jit
def copy_of(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int16], ids=str)
def test_elements_of_any_size_have_addresses_of_their_own(dtype: torch.dtype) -> None:
    """Also where it is noted which tensor an address is of, in the bits above it."""
    x = (torch.arange(17) % 3 - 1).to(dtype)
    for start, context in itertools.product((0, 1), (nullcontext, lambda: watched(Bounds().watch))):
        y = torch.zeros(17, dtype=dtype)
        with context():
            copy_of[(1,)](x[start:], y[1:], N=16)
        assert torch.equal(y[1:], x[start : start + 16])


def test_products_are_summed_without_rounding_in_between() -> None:
    """In whichever order the terms come: in float32 one of 2^25 + 1 - 2^25 is lost."""
    orders = torch.tensor([*itertools.permutations([2.0**25, 1.0, -(2.0**25)])])
    a = torch.zeros(16, 16)
    a[:6, :3], a[6:12, 5:14:4] = orders, orders
    out = torch.zeros(16, 16)
    product[(1,)](a, torch.ones(16, 16), out, M=16, N=16, K=16)
    assert out[:12].unique().tolist() == [1.0]
    assert not out[12:].any()


def test_an_adopted_kernel_under_autotune_runs_in_its_first_configuration(tmp_path: Path) -> None:
    """As packages declare theirs: configurations over heuristics over a kernel."""
    text = """
        import triton
        import triton.language as tl


        @triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n"])
        @triton.heuristics({"WHOLE": lambda args: args["n"] % args["BLOCK"] == 0})
        @triton.jit
        def told(out, n, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
            tl.store(out + tl.program_id(0), BLOCK + WHOLE)
    """
    path = tmp_path / "packaged.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location("packaged", path)
    assert spec is not None
    assert spec.loader is not None
    packaged = importlib.util.module_from_spec(spec)
    with adopted():
        spec.loader.exec_module(packaged)
    out = torch.zeros(2)
    packaged.told[lambda meta: (32 // meta["BLOCK"],)](out, n=32)
    assert out.tolist() == [17, 17]


@pytest.mark.parametrize(("M", "N", "K"), [(64, 32, 16), (16, 64, 32), (32, 16, 128)])
def test_a_product_and_that_of_the_transposes_agree_to_the_bit(M: int, N: int, K: int) -> None:
    """A backward pass that makes a score again relies on it."""
    a, b = (
        torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in ((M, K), (K, N))
    )
    one, other = torch.zeros(M, N), torch.zeros(N, M)
    product[(1,)](a, b, one, M=M, N=N, K=K)
    product[(1,)](b.T.contiguous(), a.T.contiguous(), other, M=N, N=M, K=K)
    assert torch.equal(one, other.T)


@jit
def masked(x, y, n, OTHER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=OTHER)
    tl.store(y + at, a, mask=at < BLOCK - 2)


@jit
def masked_by(x, y, n, rows, OUTER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    if OUTER == 0:
        mask = row < rows  # a scalar alone
    elif OUTER == 1:
        mask = inside & (row < rows)
    elif OUTER == 2:
        mask = (row < rows) & inside
    elif OUTER == 3:
        mask = inside & ~(row >= rows)
    else:
        mask = inside & (tl.load(x + row * n) > -1e9) & (row < rows)  # of a loaded value
    seen = tl.load(x + row * n + at, mask=mask, other=0.0)
    tl.store(y + row * n + at, seen, mask=mask)


@pytest.mark.parametrize("outer", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_made_of_a_block_and_a_scalar_works_as_it_compiles(
    outer: int, dtype: torch.dtype
) -> None:
    x = torch.arange(1.0, 25.0).view(3, 8).to(dtype)
    y = torch.zeros_like(x)
    masked_by[(3,)](x, y, 8, 2, OUTER=outer, BLOCK=8)
    assert torch.equal(y, torch.cat((x[:2], torch.zeros(1, 8, dtype=dtype))))
    if not lacking("sm_90"):
        with recorded("sm_90") as launches:
            masked_by[(3,)](x, y, 8, 2, OUTER=outer, BLOCK=8)
        compile_launch(launches[0], "sm_90")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("other", [0.0, 1.5, -1.0, -math.inf, math.nan])
def test_masked_elements_are_the_given_other_and_are_not_stored(
    other: float, dtype: torch.dtype
) -> None:
    a = bf16(16).to(dtype)
    out = torch.full((16,), 7.0, dtype=dtype)
    masked[(1,)](a, out, 10, OTHER=other, BLOCK=16)
    expected = torch.cat((a[:10], torch.full((4,), other), torch.full((2,), 7.0))).to(dtype)
    assert_same(out, expected)


@jit
def through_bits(x, bits, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(x + at).to(tl.int16, bitcast=True)
    tl.store(bits + at, seen)
    tl.store(y + at, seen.to(tl.bfloat16, bitcast=True))


def test_bitcasts_see_the_bits() -> None:
    numbers = PATTERNS[~PATTERNS.isnan()][: 15 * 4096]
    bits, back = torch.zeros(numbers.shape, dtype=torch.int16), torch.zeros_like(numbers)
    through_bits[(15,)](numbers, bits, back, BLOCK=4096)
    assert torch.equal(bits, numbers.view(torch.int16))
    assert_same(back, numbers)


@jit
def scaled(x, y, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * factor)


def test_a_scalar_is_a_float32_as_in_a_compiled_kernel() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(64)
    scaled[(1,)](x, y, 0.1, BLOCK=64)
    assert torch.equal(y, x * torch.tensor(0.1))


@jit
def added(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y + at, tl.load(x + at))


def test_an_atomic_on_bfloat16_is_refused_before_it_writes_past_the_end() -> None:
    x, y = bf16(16), torch.zeros(32, dtype=torch.bfloat16)
    with pytest.raises(Exception, match=r"bfloat16|bf16"):
        added[(1,)](x, y[:16], BLOCK=16)
    assert not y.any()
    wide_y = torch.zeros(16)
    added[(1,)](x.float(), wide_y, BLOCK=16)
    assert torch.equal(wide_y, x.float())


# -- loops -------------------------------------------------------------------------------------


@jit
def counts(x, y, N, stride):  # type: ignore[no-untyped-def]
    """Each program a share of the rows, counted in both ways."""
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        at = x + row.to(tl.int64) * stride  # type: ignore[attr-defined]
        for column in tl.range(0, 2):
            place = (column.to(row.dtype) + (2 * row).to(tl.int64)).to(row.dtype)  # type: ignore[attr-defined]
            tl.store(y + place, tl.load(at + (column - 1 + 1).to(tl.int64)))


def test_what_a_loop_counts_can_be_cast_as_where_it_compiles() -> None:
    x, y = torch.randn(5, 3), torch.zeros(5, 2)
    counts[(2,)](x, y, 5, 3)
    assert torch.equal(y, x[:, :2])
    assert "range" not in counts.fn.__globals__
    with recorded("sm_90") as launches:
        counts[(2,)](x.to("meta"), y.to("meta"), 5, 3)
    assert lacking("sm_90") or compile_launch(launches[0], "sm_90")


@jit
def doubled(x, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(x)
    for _ in range(TIMES):
        a = a + a
    tl.store(x, a)


def test_an_endless_loop_is_ended() -> None:
    x = torch.zeros(1)
    with limited(steps=100), pytest.raises(Exception, match="more than 100 operations"):
        doubled[(1,)](x, TIMES=300)
    with limited(steps=100):
        doubled[(1,)](x, TIMES=50)
    doubled[(1,)](x, TIMES=300)


# -- functions that a kernel calls ------------------------------------------------------------


@jit
def squared(a):  # type: ignore[no-untyped-def]
    return a * a


@jit
def squared_and_once_more(a):  # type: ignore[no-untyped-def]
    return squared(a), squared(squared(a))


@jit
def calls(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0)
    once, twice = squared_and_once_more(a)
    smooth = tl.sigmoid(once) + tl.softmax(twice)  # of triton's library, themselves under jit
    tl.store(y + at, smooth + tl.zeros((BLOCK,), tl.float32) + tl.cdiv(n, 2), mask=at < n)


def test_device_functions_and_the_library_can_be_called() -> None:
    x, y = bf16(32).float(), torch.zeros(32)
    calls[(1,)](x, y, 32, BLOCK=32)
    expected = torch.sigmoid(x**2) + torch.softmax(x**4, 0) + 16
    torch.testing.assert_close(y, expected)


# -- what is left behind ----------------------------------------------------------------------


def language() -> dict[str, dict[str, object]]:
    """Every name of triton's language, and of its classes."""
    modules = [m for name, m in sys.modules.items() if name.startswith("triton.language")]
    classes = [c for m in modules for c in vars(m).values() if inspect.isclass(c)]
    return {repr(owner): dict(vars(owner)) for owner in (*modules, *classes, JITFunction)}


def compiled() -> dict[str, str]:
    """Code of the kernel that calls everything, for two chips."""
    found = {}
    for chip in (chip for chip in ("gfx942", "sm_90") if not lacking(chip)):
        with recorded(chip) as launches:
            calls[(1,)](*torch.empty(2, 32, device="meta"), 32, BLOCK=32)
        found[chip] = str(compile_launch(launches[0], chip))
    return found or pytest.skip("this triton compiles for neither chip")


@pytest.mark.long
def test_the_language_is_put_back_and_the_same_kernel_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, code = language(), compiled()
    calls[(1,)](*torch.ones(2, 32), 32, BLOCK=32)
    assert language() == before
    fresh_cache(tmp_path, monkeypatch)
    assert compiled() == code


@jit
def faulty(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.sigmoid(tl.load(x + at))
    tl.static_assert(BLOCK < 16, "a fault in a kernel")
    tl.store(x + at, squared(a))


@jit
def faulty_inside(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    faulty(x, BLOCK)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [faulty, faulty_inside], ids=lambda k: k.__name__)
def test_an_error_in_a_kernel_puts_the_language_back_too(
    kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls[(1,)](*torch.ones(2, 32), 32, BLOCK=32)  # what the first launch of a process loads stays
    before, code = language(), compiled()
    with pytest.raises(Exception, match="a fault in a kernel"):
        kernel[(1,)](torch.ones(16), BLOCK=16)
    assert language() == before
    fresh_cache(tmp_path, monkeypatch)
    assert compiled() == code
    calls[(1,)](*torch.ones(2, 32), 32, BLOCK=32)


def fresh_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled before is found again."""
    monkeypatch.setattr("tinyllama.harness.kernels.resources._cache", lambda: folder)
