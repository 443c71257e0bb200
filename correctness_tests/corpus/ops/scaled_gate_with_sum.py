"""A product with a gate and a weight, and the sum of the first two: faults of how an op of several
results is called."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.harness import Case, Op, Tensor


class ScaledGateWithSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight):
        ctx.save_for_backward(x, gate, weight)
        y = x * gate * weight
        total = x + gate
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        x, gate, weight = ctx.saved_tensors
        dx = dy * gate * weight + dtotal
        dgate = dy * x * weight + dtotal
        dweight = (dy * x * gate).sum(0)
        return dx, dgate, dweight


op = Op(
    "corpus_scaled_gate_with_sum",
    inputs={
        "x": Tensor("N D", grad=True),
        "gate": Tensor("N D", grad=True),
        "weight": Tensor("D", grad=True),
    },
    outputs={"y": "N D", "total": "N D"},
    cases=[Case(N=3, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, gate, weight):
    return x * gate * weight, x + gate


@op.independent("torch.einsum and torch.add")
def contraction(x, gate, weight):
    return torch.einsum("nd,nd,d->nd", x, gate, weight), torch.add(x, gate)


@op.provider("written_out", double_backward=False)
def candidate(x, gate, weight):
    y, total = ScaledGateWithSum.apply(x, gate, weight)
    return y, total


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

layout = partial(wrong, fault="layout")
missing = partial(wrong, fault="gradient missing")
stale = partial(wrong, fault="stale state")
aliasing = partial(wrong, fault="aliasing", rank="unsafe")
constant = partial(wrong, fault="constant")
framework = partial(wrong, fault="framework")
BEFORE_FORWARD = "        ctx.save_for_backward(x, gate, weight)\n"
AFTER_FORWARD = "        return y, total\n"
BEFORE_BACKWARD = "        dx = dy * gate * weight + dtotal\n"
AFTER_BACKWARD = "        return dx, dgate"
BEFORE_CALL = "    y, total = ScaledGateWithSum.apply(x, gate, weight)\n"
AFTER_CALL = "weight)\n    return y, total\n"
PROVIDER = '@op.provider("written_out"'


def before(place, line, indent=8):
    return place, " " * indent + line + "\n" + place


def after_call(line):
    return AFTER_CALL, f"weight)\n    {line}\n    return y, total\n"


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
        result="total",
    ),
    layout(
        "strides_of_another_input",
        before(BEFORE_FORWARD, "gate = gate.as_strided(gate.shape, x.stride())"),
        result="total",
    ),
    layout(
        "strides_of_an_upstream_ignored",
        before(BEFORE_BACKWARD, "dtotal = dtotal.as_strided(dtotal.shape, (dtotal.shape[1], 1))"),
        result="grad",
    ),
    # The gradient of one result is read with the strides of the other's.
    layout(
        "strides_of_another_upstream",
        before(BEFORE_BACKWARD, "dtotal = dtotal.as_strided(dtotal.shape, dy.stride())"),
        result="grad",
    ),
    wrong(
        "written_beyond_a_buffer",
        (
            "        total = x + gate\n",
            """        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.add(x, gate, out=total)
        written_behind(total)
""",
        ),
        (
            "class ScaledGateWithSum",
            '''def written_behind(y):
    """An element too many is set to 0, if there is memory behind it."""
    end = y.storage_offset() + y.numel()
    if y.untyped_storage().nbytes() > end * y.itemsize:
        y.as_strided((1,), (1,), end).fill_(0)


class ScaledGateWithSum''',
        ),
        fault="out of bounds",
        rank="unsafe",
    ),
    # -- upstream gradients and inputs that are dropped or overwritten
    # The first element of each upstream gradient is taken for all.
    missing(
        "one_element_of_each_upstream",
        before(
            BEFORE_BACKWARD,
            "dy, dtotal = (d.reshape(-1)[:1].expand(d.numel()).view(d.shape) for d in (dy, dtotal))",
        ),
        result="grad x",
    ),
    missing(
        "upstream_taken_for_ones",
        before(BEFORE_BACKWARD, "dy, dtotal = torch.ones_like(dy), torch.ones_like(dtotal)"),
        result="grad x",
    ),
    # Other numbers take the place of the upstream gradient.
    missing(
        "upstream_dropped",
        before(BEFORE_BACKWARD, "dtotal = torch.linspace(1, 2, dy.numel()).view(dy.shape).to(dy)"),
        result="x",
    ),
    missing(
        "gradient_twice_as_large_if_alone",
        before(BEFORE_BACKWARD, "dy = 2 * dy if sum(ctx.needs_input_grad) == 1 else dy"),
        result="grad",
    ),
    aliasing(
        "upstream_overwritten",
        before(AFTER_BACKWARD, "dtotal.zero_()"),
        result="gradient of total",
    ),
    aliasing("input_overwritten", after_call("x.data.mul_(2)"), result="input x"),
    # The first backward pass is right, and destroys what a second one needs.
    aliasing(
        "saved_tensor_overwritten",
        before(AFTER_BACKWARD, "ctx.factor.zero_()"),
        before(BEFORE_FORWARD, "ctx.factor = gate * weight"),
        ("dx = dy * gate * weight", "dx = dy * ctx.factor"),
    ),
    # Buffers of the first call are the outputs of all later ones.
    aliasing(
        "output_memory_reused",
        (PROVIDER, "buffers = {}\n\n\n" + PROVIDER),
        after_call(
            """if not torch.is_grad_enabled():
        y = buffers.setdefault(("y", y.shape, y.dtype), y).copy_(y)
        total = buffers.setdefault(("total", y.shape, y.dtype), total).copy_(total)"""
        ),
    ),
    # -- state that is kept between calls
    stale(
        "cached_by_address",
        (PROVIDER, "results = {}\n\n\n" + PROVIDER),
        (
            BEFORE_CALL,
            """    if torch.is_grad_enabled():
        return ScaledGateWithSum.apply(x, gate, weight)
    key = tuple((tensor.data_ptr(), tensor.shape) for tensor in (x, gate, weight))
    if key not in results:
        results[key] = ScaledGateWithSum.apply(x, gate, weight)
    y, total = results[key]
""",
        ),
        result="y",
    ),
    # Right whenever it meets a shape for the first time.
    stale(
        "right_at_first",
        (PROVIDER, "met = set()\n\n\n" + PROVIDER),
        after_call(
            """key = (y.shape, y.dtype, torch.is_grad_enabled())
    total = 1.5 * total if key in met else total
    met.add(key)"""
        ),
        result="total",
    ),
    wrong(
        "last_bits_at_random",
        (PROVIDER, "generator = torch.Generator().manual_seed(0)\n\n\n" + PROVIDER),
        after_call(
            """noise = torch.randn(total.shape, generator=generator).to(total)
    total = total * (1 + torch.finfo(total.dtype).eps / 2 * noise)"""
        ),
        fault="race",
        rank="unsafe",
        result="total",
    ),
    # -- outputs that are nothing like the right ones
    # An output is a tensor of another type, which could compute its values when they are read.
    constant(
        "output_of_another_type",
        ("class ScaledGate", "class Lazy(torch.Tensor):\n    pass\n\n\nclass ScaledGate"),
        after_call("total = total.as_subclass(Lazy)"),
        result="Lazy",
    ),
    constant("nan", before(AFTER_FORWARD, 'total = total * float("nan")'), result="total"),
    constant("zeros", before(AFTER_FORWARD, "total = total * 0"), result="total"),
    # -- the framework around a call
    framework(
        "wrong_under_autocast",
        after_call('total = 1.05 * total if torch.is_autocast_enabled("cpu") else total'),
        result="total",
    ),
    framework(
        "wrong_in_inference_mode",
        after_call("total = 1.05 * total if torch.is_inference_mode_enabled() else total"),
        result="total",
    ),
    framework(
        "wrong_when_compiled",
        after_call("total = 1.05 * total if torch.compiler.is_compiling() else total"),
        result="total",
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
        before(AFTER_BACKWARD, "dweight = dweight if len(x) else dweight + 1"),
        fault="empty",
        result="grad weight",
    ),
]
