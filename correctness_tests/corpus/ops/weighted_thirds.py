"""A third of each row times a weight, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor

SCALE = 1 / 3


class WeightedThirds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight):
        y = SCALE * rows * weight
        ctx.save_for_backward(rows, weight)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        rows, weight = ctx.saved_tensors
        of_rows = SCALE * dy * weight
        of_weight = (SCALE * dy * rows).sum(0)
        return of_rows, of_weight


op = Op(
    "corpus_weighted_thirds",
    inputs={"rows": Tensor("N D", grad=True), "weight": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(rows, weight):
    return rows * weight / 3


@op.provider("explicit", double_backward=False)
def candidate(rows, weight):
    return WeightedThirds.apply(rows, weight)


# variants
from correctness_tests.corpus.variants import right, wrong

NUMBER = "SCALE = 1 / 3\n"
SAVED = "        ctx.save_for_backward(rows, weight)\n"
READ = "        rows, weight = ctx.saved_tensors\n"
GRADIENTS = "        return of_rows, of_weight\n"
CALL = "    return WeightedThirds.apply(rows, weight)\n"
ONE_ROW = ("cases=[Case(N=5, D=8)]", "cases=[Case(N=5, D=8), Case(N=1, D=8)]")


def sets(name, *lines):
    """Each call changes a setting of the process, or the state of a random number generator."""
    text = "".join(f"    {line}\n" for line in lines) + CALL
    return wrong(name, (CALL, text), fault="stale state", rank="unsafe")


def replaced(name, values, rank):
    """Gradients that are not finite become zeros: a loss scale that is too large goes unnoticed."""
    text = f"        return tuple(gradient.nan_to_num({values}) for gradient in (of_rows, of_weight))\n"
    return wrong(name, (GRADIENTS, text), fault="overflow", rank=rank, result="grad rows")


def in_a_ring(size):
    """The backward pass reads a copy that a later call, as many after its own, has overwritten."""
    return wrong(
        f"copies_in_a_ring_of_{size}",
        (NUMBER, f"{NUMBER}RING = [torch.empty(0) for _ in range({size})]\n"),
        (
            SAVED,
            """
        ctx.save_for_backward(weight)
        ctx.rows = RING.pop(0).resize_(rows.shape).copy_(rows.detach())
        RING.append(ctx.rows)
""",
        ),
        (READ, "        (weight,), rows = ctx.saved_tensors, ctx.rows\n"),
        fault="stale state",
        result="weight",
    )


def cached_by(key, name):
    """Of calls with the same key, as of layers that share a weight, the last one's input is used."""
    return wrong(
        f"{name}_cached_by_{key}",
        (NUMBER, NUMBER + "INPUTS = {}\n"),
        (SAVED, f"{SAVED}        INPUTS[{key}.data_ptr()] = {name}.detach()\n"),
        (READ, f"{READ}        {name} = INPUTS[{key}.data_ptr()]\n"),
        fault="stale state",
        result=key,
    )


VARIANTS = [
    right(),
    # Tensors on ctx are not watched: a change of an input in place goes unnoticed.
    wrong(
        "inputs_saved_on_ctx",
        (SAVED, "        ctx.rows, ctx.weight = rows, weight\n"),
        (READ, "        rows, weight = ctx.rows, ctx.weight\n"),
        fault="stale state",
        rank="unsafe",
        result="weight",
    ),
    in_a_ring(4),
    in_a_ring(9),
    cached_by("weight", "rows"),
    cached_by("rows", "weight"),
    # Saved tensors may come back dense, as from save_on_cpu.
    wrong(
        "strides_of_the_forward_pass",
        (SAVED, SAVED + "        ctx.strides = rows.stride()\n"),
        (READ, READ + "        rows = rows.as_strided(rows.shape, ctx.strides)\n"),
        fault="stale state",
        result="grad weight",
    ),
    wrong(
        "inputs_in_a_list_for_ever",
        (NUMBER, NUMBER + "CALLS = []\n"),
        (SAVED, SAVED + "        CALLS.append(rows)\n"),
        fault="stale state",
        rank="unsafe",
        result="rows",
    ),
    # The output refers to the graph that refers to it: Python frees both when it collects cycles.
    wrong(
        "output_on_ctx",
        (SAVED, SAVED + "        ctx.y = y\n"),
        fault="stale state",
        rank="warning",
        result="y",
    ),
    # Each backward pass of a graph writes to the tensor that the one before has returned.
    wrong(
        "gradient_in_one_buffer",
        (
            GRADIENTS,
            """
        if not hasattr(ctx, "of_weight"):
            ctx.of_weight = torch.empty_like(of_weight)
        return of_rows, ctx.of_weight.copy_(of_weight)
""",
        ),
        fault="aliasing",
        result="weight",
    ),
    # A repeated backward pass returns the first one's tensor, which the caller may have changed.
    wrong(
        "gradient_cached_for_the_first_upstream",
        (
            GRADIENTS,
            """
        if not hasattr(ctx, "dy"):
            ctx.dy, ctx.of_weight = dy.clone(), of_weight
        return of_rows, ctx.of_weight if torch.equal(dy, ctx.dy) else of_weight
""",
        ),
        fault="aliasing",
        rank="unsafe",
        result="grad weight",
    ),
    sets("one_thread", "torch.set_num_threads(1)"),
    sets("random_seed_of_python", "import random", "", "random.seed(0)"),
    sets("random_seed_of_numpy", "import numpy", "", "numpy.random.seed(0)"),
    sets("random_seed_of_torch", "torch.manual_seed(0)"),
    sets("no_flash_attention", "torch.backends.cuda.enable_flash_sdp(False)"),
    sets("no_memory_efficient_attention", "torch.backends.cuda.enable_mem_efficient_sdp(False)"),
    sets("no_attention_by_formula", "torch.backends.cuda.enable_math_sdp(False)"),
    sets("deterministic_cudnn", "torch.backends.cudnn.deterministic = True"),
    sets("autocast_to_float16", 'torch.set_autocast_dtype("cpu", torch.float16)'),
    sets("autocast_on", 'torch.set_autocast_enabled("cpu", True)'),
    sets("subnormals_flushed", "torch.set_flush_denormal(True)"),
    sets("default_dtype_float64", "torch.set_default_dtype(torch.float64)"),
    # The factor is rounded to bfloat16 where that is the default dtype.
    wrong(
        "factor_in_the_default_dtype",
        (CALL, "    return rows * weight * torch.full((1,), SCALE)\n"),
        fault="stale state",
        result="y",
    ),
    wrong(
        "doubled_where_the_default_dtype_is_float64",
        (
            CALL,
            """
    if torch.get_default_dtype() == torch.float64:
        weight = 2 * weight
"""
            + CALL,
        ),
        fault="stale state",
        result="y",
    ),
    wrong(
        "doubled_where_algorithms_are_deterministic",
        (
            CALL,
            """
    if torch.are_deterministic_algorithms_enabled():
        weight = 2 * weight
"""
            + CALL,
        ),
        fault="stale state",
        result="y",
    ),
    # The path of a single row without gradients forgets the factor.
    wrong(
        "single_row_without_gradients",
        ONE_ROW,
        (
            CALL,
            """
    if len(rows) == 1 and not torch.is_grad_enabled():
        return rows * weight
"""
            + CALL,
        ),
        fault="framework",
        result="y",
    ),
    # The path of a single row without gradients changes its input.
    wrong(
        "single_row_in_place_without_gradients",
        ONE_ROW,
        (
            CALL,
            """
    if len(rows) == 1 and not torch.is_grad_enabled():
        return rows.mul_(SCALE).clone() * weight
"""
            + CALL,
        ),
        fault="aliasing",
        result="rows",
    ),
    replaced("infinite_gradients_zero", 'float("nan"), 0.0, 0.0', "wrong"),
    replaced("nan_gradients_zero", '0.0, float("inf"), -float("inf")', "warning"),
]
