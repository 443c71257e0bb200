"""silu(gate) times up, with a backward pass of its own, and what its author states of it."""

import torch

from tinyllama.harness import Case, Op, Tensor


class GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dh * (gate * sigmoid)
        return dgate, dup


op = Op(
    "corpus_gated_product",
    inputs={"gate": Tensor("N F", grad=True), "up": Tensor("N F", grad=True)},
    outputs={"h": "N F"},
    cases=[Case(N=6, F=24)],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(gate, up):
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (wide * torch.sigmoid(wide) * up).to(gate.dtype)


@op.provider("derived_by_hand", dtypes=(torch.float32,), double_backward=False)
def candidate(gate, up):
    h = GatedProduct.apply(gate, up)
    return h


# variants
from correctness_tests.corpus.variants import right, wrong

PROVIDER = "dtypes=(torch.float32,), double_backward=False)"
CALL = "    h = GatedProduct.apply(gate, up)\n"


def stated(trait, dtype="float32"):
    """The edit by which the author states something, of an implementation for this dtype."""
    return PROVIDER, f"dtypes=(torch.{dtype},), double_backward=False, {trait})"


CONTIGUOUS = stated("contiguous=True")
FROZEN = stated('frozen=("up",)')
REFUSING = (
    CALL,
    f"""\
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError("contiguous inputs only")
{CALL}""",
)
OVERWRITING = "dup = dh * (gate * sigmoid)", "dup = dh.contiguous().mul_(gate * sigmoid)"
HALF_FROZEN = CALL, "    h = GatedProduct.apply(gate, up.detach())\n"
WIDE = (
    CALL,
    """\
    wide = torch.promote_types(gate.dtype, torch.float32)
    h = GatedProduct.apply(gate.to(wide), up.to(wide))
""",
)
OF_FLOAT32 = stated('output_dtypes={"h": torch.float32}', "bfloat16")

VARIANTS = [
    right(),
    # Contiguous inputs only, which the author states.
    right("refuses_strides_as_stated", CONTIGUOUS, REFUSING),
    right("takes_more_strides_than_stated", CONTIGUOUS),
    wrong("refuses_strides", REFUSING, fault="layout", rank="refused"),
    # Contiguous inputs only, which the author states; others give a wrong result and no error.
    wrong(
        "wrong_for_strides_as_stated",
        CONTIGUOUS,
        (CALL, f"{CALL}    if not up.is_contiguous():\n        h = 1.5 * h\n"),
        fault="layout",
        result="h",
    ),
    # The gradient of up is written over the upstream gradient.
    wrong("upstream_overwritten", OVERWRITING, fault="aliasing", rank="unsafe"),
    right("upstream_overwritten_as_stated", stated('overwrites=("h",)'), OVERWRITING),
    wrong("gradient_of_up_lost", HALF_FROZEN, fault="gradient missing", result="up"),
    right("frozen_as_stated", FROZEN, HALF_FROZEN),
    # No gradient of up, which the author states; the other one is wrong.
    wrong(
        "gradient_beside_a_frozen_input",
        FROZEN,
        HALF_FROZEN,
        ("dgate = dh * up", "dgate = 1.5 * dh * up"),
        fault="gradient missing",
        result="grad gate",
    ),
    # Inputs in bfloat16 give an output in float32.
    wrong(
        "wide_output", (PROVIDER, PROVIDER.replace("float32", "bfloat16")), WIDE, fault="constant"
    ),
    right("wide_output_as_stated", OF_FLOAT32, WIDE),
    wrong(
        "narrow_output_stated_as_wide",
        OF_FLOAT32,
        WIDE,
        ("    return h\n", "    return h.to(gate.dtype)\n"),
        fault="constant",
    ),
]
