"""What the field's ops share: distributions that they draw from, cases, inputs and references."""

import torch

from tinyllama.harness import Case, Tensor
from tinyllama.harness.declare.values import Values, normal

RAGGED, TAIL = "width that no power of two divides", "a row that does not fill its block"
ROWS = [Case(N=4, D=64), Case(N=1, D=128, why="one row"), Case(N=3, D=100, why=RAGGED)]
TOKENS = [Case(N=5, V=50), Case(N=1, V=64, why="one token"), Case(N=3, V=1000, why=TAIL)]
DISTRIBUTIONS = [Case(N=4, V=50), *TOKENS[1:]]


def norm_inputs(axes: str, features: str, grad: bool = True) -> dict[str, Tensor]:
    """x of these axes, and a weight and a bias of its features."""
    weight = Tensor(features, grad=grad, values=normal(0.5, mean=1.0))
    return {"x": Tensor(axes, grad=grad), "weight": weight, "bias": Tensor(features, grad=grad)}


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x (... D), less its mean over D, in units of its deviation."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def group_norm(
    x: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """x (B C ...), normalised over the elements of a group of channels."""
    y = normalised(x.unflatten(1, (groups, -1)).flatten(2), eps).reshape(x.shape)
    axes = (-1, *[1] * (x.dim() - 2))
    return y * weight_C.view(axes) + bias_C.view(axes)


def layer_norm(
    x: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """x (... D), normalised over D."""
    return normalised(x, eps) * weight_D + bias_D


def probabilities(spread: float = 1.0) -> Values:
    """Rows that sum to one: the softmax of normal logits."""
    draw = normal(spread).sample
    return Values(f"probabilities({spread:g})", lambda *arguments: draw(*arguments).softmax(-1))


def log_probabilities(spread: float = 1.0) -> Values:
    """The logarithms of such rows."""
    draw = normal(spread).sample
    return Values(
        f"log_probabilities({spread:g})", lambda *arguments: draw(*arguments).log_softmax(-1)
    )
