"""The tree's AdamW, written in plain PyTorch."""

from tinyllama.ops.adamw import adamw as op


@op.provider("written_out")
def candidate(
    param, grad, exp_avg, exp_avg_sq, step, found_inf, lr, beta1, beta2, eps, weight_decay
):
    if found_inf.item():
        return
    step.add_(1)
    count = step.double()
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    for p, g, m, v in zip(param, grad, exp_avg, exp_avg_sq, strict=True):
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        size = (v / correction2.to(v)).sqrt() + eps
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * (m / correction1.to(m)) / size)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)

VARIANTS = [
    right(),
    constant(
        "bias_correction_dropped",
        ("count = step.double()", "count = step.double() + 1e6"),
        result="param",
    ),
    # The decay is added to the gradient.
    constant(
        "decay_coupled",
        ("        m.mul_(beta1)", "        g = g + weight_decay * p\n        m.mul_(beta1)"),
        ("        p.mul_(1 - lr * weight_decay)\n", ""),
        result="param",
    ),
    constant("decay_dropped", ("        p.mul_(1 - lr * weight_decay)\n", ""), result="param"),
    constant(
        "betas_swapped",
        ("    step.add_(1)\n", "    step.add_(1)\n    beta1, beta2 = beta2, beta1\n"),
        result="exp_avg",
    ),
    constant("epsilon_dropped", (".sqrt() + eps", ".sqrt()"), result="param"),
    # The step count is read once, as in a graph that was captured with a number of the host.
    wrong(
        "bias_correction_frozen",
        ("@op.provider", "first = {}\n\n\n@op.provider"),
        ("count = step.double()", "count = first.setdefault(step.data_ptr(), step.double())"),
        fault="stale state",
        result="param",
    ),
    # The trial of a search over configurations stays in the caller's tensors.
    wrong(
        "two_steps_at_first",
        ("@op.provider", "tuned = []\n\n\n@op.provider"),
        (
            "    step.add_(1)\n",
            """    if not tuned:
        tuned.append(True)
        candidate(
            param, grad, exp_avg, exp_avg_sq, step, found_inf, lr, beta1, beta2, eps, weight_decay
        )
    step.add_(1)
""",
        ),
        fault="configuration",
        result="param",
    ),
]
