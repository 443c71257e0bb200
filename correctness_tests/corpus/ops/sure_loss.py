"""The cross-entropy of a label that is nearly certain: the terms of its gradient cancel."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values

SURE = Values("sure", lambda shape, generator: 30.0 * torch.eye(*shape))
FIRST = Values("first", lambda shape, generator: torch.zeros(shape, dtype=torch.int64))

op = Op(
    "corpus_sure_loss",
    inputs={
        "logits": Tensor("N V", grad=True, values=SURE),
        "labels": Tensor("N", dtype=torch.int64, values=FIRST),
    },
    outputs={"loss": Tensor("", dtype=torch.float32)},
    cases=[Case(N=1, V=3)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(logits, labels):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -wide.log_softmax(-1).gather(-1, labels[:, None]).sum()


@op.magnitude(rounded_to=torch.float32)
def terms(logits, labels, upstream):
    """The gradient is p - 1 at the label, where p is nearly 1; p is what is rounded."""
    return {"grad logits": upstream["loss"].abs() * torch.softmax(logits, -1)}


class SureLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ctx.smoothing = 0.0
        ctx.save_for_backward(wide.softmax(-1), labels)
        return -wide.log_softmax(-1).gather(-1, labels[:, None]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        probability, labels = ctx.saved_tensors
        label = torch.zeros_like(probability).scatter_(-1, labels[:, None], 1.0 - ctx.smoothing)
        return dy * (probability - label), None


@op.provider("derived_by_hand", double_backward=False)
def candidate(logits, labels):
    return SureLoss.apply(logits, labels)


# variants
from correctness_tests.corpus.variants import right, wrong

UNDER_AUTOCAST = 'ctx.smoothing = {} if torch.is_autocast_enabled("cpu") else 0.0'


def smoothed(by):
    """The edit by which labels are smoothed under autocast."""
    return "ctx.smoothing = 0.0", UNDER_AUTOCAST.format(by)


VARIANTS = [
    right(),
    # This is what a probability near 1 loses in float32.
    right("rounding_of_float32_under_autocast", smoothed("2.0**-26")),
    # Labels are smoothed under autocast.
    wrong(
        "labels_smoothed_under_autocast",
        smoothed("2.0**-12"),
        fault="framework",
        result="grad logits",
    ),
    # The op says that the terms are rounded to the dtype of the result, which is a narrow one.
    right(
        "terms_of_a_narrow_dtype_under_autocast",
        ("@op.magnitude(rounded_to=torch.float32)", "@op.magnitude"),
        smoothed("2.0**-12"),
    ),
]
