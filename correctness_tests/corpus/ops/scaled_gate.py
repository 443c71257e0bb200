"""A product of a matrix, its gate and a weight of each column: faults of how an op is called."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.harness import Case, Op, Tensor


class ScaledGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight):
        ctx.save_for_backward(x, gate, weight)
        y = x * gate * weight
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        dx = dy * gate * weight
        dgate = dy * x * weight
        dweight = (dy * x * gate).sum(0)
        return dx, dgate, dweight


op = Op(
    "corpus_scaled_gate",
    inputs={
        "x": Tensor("N D", grad=True),
        "gate": Tensor("N D", grad=True),
        "weight": Tensor("D", grad=True),
    },
    outputs={"y": "N D"},
    cases=[Case(N=3, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, gate, weight):
    return x * gate * weight


@op.independent("torch.einsum")
def contraction(x, gate, weight):
    return torch.einsum("nd,nd,d->nd", x, gate, weight)


@op.provider("written_out", double_backward=False)
def candidate(x, gate, weight):
    y = ScaledGate.apply(x, gate, weight)
    return y


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

layout = partial(wrong, fault="layout")
missing = partial(wrong, fault="gradient missing")
stale = partial(wrong, fault="stale state", result="y")
aliasing = partial(wrong, fault="aliasing", rank="unsafe")
framework = partial(wrong, fault="framework")
BEFORE_FORWARD = "        ctx.save_for_backward(x, gate, weight)\n"
AFTER_FORWARD = "        return y\n\n"
BEFORE_BACKWARD = "        dx = dy * gate * weight\n"
BEFORE_CALL = "    y = ScaledGate.apply(x, gate, weight)\n"
AFTER_CALL = "weight)\n    return y\n"
PROVIDER = '@op.provider("written_out"'


def before(place, line, indent=8):
    return place, " " * indent + line + "\n" + place


def after_call(line):
    return AFTER_CALL, f"weight)\n    {line}\n    return y\n"


VARIANTS = [
    right(),
    right(
        "differentiable_twice",
        ("    @once_differentiable\n", ""),
        (", double_backward=False", ""),
    ),
    # -- strides and bounds
    layout(
        "strides_of_an_input_ignored",
        before(BEFORE_FORWARD, "x = x.as_strided(x.shape, (x.shape[1], 1))"),
        result="y",
    ),
    layout(
        "strides_of_another_input",
        before(BEFORE_FORWARD, "gate = gate.as_strided(gate.shape, x.stride())"),
        result="y",
    ),
    layout(
        "strides_of_the_upstream_ignored",
        before(BEFORE_BACKWARD, "dy = dy.as_strided(dy.shape, (dy.shape[1], 1))"),
        result="grad",
    ),
    wrong(
        "written_beyond_a_buffer",
        (
            "        y = x * gate * weight\n",
            """        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(x * gate, weight, out=y)
        written_behind(y)
""",
        ),
        (
            "class ScaledGate",
            '''def written_behind(y):
    """An element too many is set to 0, if there is memory behind it."""
    end = y.storage_offset() + y.numel()
    if y.untyped_storage().nbytes() > end * y.itemsize:
        y.as_strided((1,), (1,), end).fill_(0)


class ScaledGate''',
        ),
        fault="out of bounds",
        rank="unsafe",
    ),
    # -- upstream gradients and inputs that are dropped or overwritten
    # The first element of the upstream gradient is taken for all.
    missing(
        "one_element_of_the_upstream",
        before(BEFORE_BACKWARD, "dy = dy.reshape(-1)[:1].expand(dy.numel()).view(dy.shape)"),
        result="grad x",
    ),
    missing(
        "upstream_taken_for_ones",
        before(BEFORE_BACKWARD, "dy = torch.ones_like(dy)"),
        result="grad x",
    ),
    # Other numbers take the place of the upstream gradient.
    missing(
        "upstream_dropped",
        before(BEFORE_BACKWARD, "dy = torch.linspace(1, 2, dy.numel()).view(dy.shape).to(dy)"),
        result="x",
    ),
    missing(
        "gradient_twice_as_large_if_alone",
        before(BEFORE_BACKWARD, "dy = 2 * dy if sum(ctx.needs_input_grad) == 1 else dy"),
        result="grad",
    ),
    aliasing(
        "upstream_overwritten",
        before("        return dx, dgate", "dy.zero_()"),
        result="gradient of y",
    ),
    aliasing("input_overwritten", after_call("x.data.mul_(2)"), result="input x"),
    # The first backward pass is right, and destroys what a second one needs.
    aliasing(
        "saved_tensor_overwritten",
        before("        return dx, dgate", "ctx.factor.zero_()"),
        before(BEFORE_FORWARD, "ctx.factor = gate * weight"),
        ("dx = dy * gate * weight", "dx = dy * ctx.factor"),
    ),
    # A buffer of the first call is the output of all later ones.
    aliasing(
        "output_memory_reused",
        (PROVIDER, "buffers = {}\n\n\n" + PROVIDER),
        after_call(
            """if not torch.is_grad_enabled():
        y = buffers.setdefault((y.shape, y.dtype), y).copy_(y)"""
        ),
    ),
    # -- state that is kept between calls
    stale(
        "cached_by_address",
        (PROVIDER, "results = {}\n\n\n" + PROVIDER),
        (
            BEFORE_CALL,
            """    if torch.is_grad_enabled():
        return ScaledGate.apply(x, gate, weight)
    key = tuple((tensor.data_ptr(), tensor.shape) for tensor in (x, gate, weight))
    if key not in results:
        results[key] = ScaledGate.apply(x, gate, weight)
    y = results[key]
""",
        ),
    ),
    # Right whenever it meets a shape for the first time.
    stale(
        "right_at_first",
        (PROVIDER, "met = set()\n\n\n" + PROVIDER),
        after_call(
            """key = (y.shape, y.dtype, torch.is_grad_enabled())
    y = 1.5 * y if key in met else y
    met.add(key)"""
        ),
    ),
    wrong(
        "last_bits_at_random",
        (PROVIDER, "generator = torch.Generator().manual_seed(0)\n\n\n" + PROVIDER),
        after_call(
            """noise = torch.randn(y.shape, generator=generator).to(y)
    y = y * (1 + torch.finfo(y.dtype).eps / 2 * noise)"""
        ),
        fault="race",
        rank="unsafe",
        result="y",
    ),
    # Most runs of a race are right: two of three are here.
    wrong(
        "other_bits_in_each_third_call",
        (PROVIDER, "calls = []\n\n\n" + PROVIDER),
        after_call(
            """calls.append(1)
    y = y * (1 + torch.finfo(y.dtype).eps) if len(calls) % 3 == 0 else y"""
        ),
        fault="race",
        rank="unsafe",
        result="y",
    ),
    # -- outputs that are nothing like the right ones
    # The output is a tensor of another type, which could compute its values when they are read.
    wrong(
        "output_of_another_type",
        ("class ScaledGate", "class Lazy(torch.Tensor):\n    pass\n\n\nclass ScaledGate"),
        after_call("y = y.as_subclass(Lazy)"),
        fault="constant",
        result="Lazy",
    ),
    wrong("nan", before(AFTER_FORWARD, 'y = y * float("nan")'), fault="constant", result="y"),
    wrong("zeros", before(AFTER_FORWARD, "y = y * 0"), fault="constant", result="y"),
    # -- the framework around a call
    framework(
        "wrong_under_autocast",
        after_call('y = 1.05 * y if torch.is_autocast_enabled("cpu") else y'),
        result="y",
    ),
    framework(
        "wrong_in_inference_mode",
        after_call("y = 1.05 * y if torch.is_inference_mode_enabled() else y"),
        result="y",
    ),
    framework(
        "wrong_when_compiled",
        after_call("y = 1.05 * y if torch.compiler.is_compiling() else y"),
        result="y",
    ),
    framework(
        "graph_broken",
        before(BEFORE_CALL, "torch._dynamo.graph_break()", 4),
        rank="warning",
    ),
    framework(
        "second_derivative_detached", ("@once_differentiable", "@torch.no_grad()"), rank="warning"
    ),
    wrong(
        "garbage_for_no_rows",
        before("        return dx, dgate", "dweight = dweight if len(x) else dweight + 1"),
        fault="empty",
        result="grad weight",
    ),
]
