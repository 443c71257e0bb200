"""Attention's kernels at offsets past 2^31."""

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Put, Results, randn, unwritten
from tinyllama.ops.attention import FARTHEST_ROW, attend, attend_backward, attention


def _attended(put: Put, tokens: int = 5, heads: tuple[int, int] = (1, 1), **where: int) -> Results:
    """Of so many heads of queries, and of keys and values; 3 batches where these are far apart."""
    batches = 3 if where["axis"] == 0 else 1
    of_q, of_kv = ((batches, tokens, n, 16) for n in heads)
    shapes = (of_q, of_q, of_kv, of_kv)
    do, q, k, v = (put(randn(*shape, seed=i), **where) for i, shape in enumerate(shapes))
    gradients = [put(unwritten(*shape), **where) for shape in shapes[1:]]
    o, lse = attend(q, k, v)
    attend_backward(do, q, k, v, o, lse, *gradients)
    return [o, lse, *gradients]


@attention.rows_apart
def attention_of_batches(put: Put) -> Results:
    return _attended(put, axis=0)


@attention.rows_apart
def attention_of_heads(put: Put) -> Results:
    return _attended(put, heads=(3, 3), axis=2)


@attention.rows_apart
def attention_of_groups(put: Put) -> Results:
    return _attended(put, heads=(3, 1), axis=2)


@attention.rows_apart
def attention_of_tokens(put: Put) -> Results:
    return _attended(put, tokens=2**31 // FARTHEST_ROW + 2, axis=1, stride=FARTHEST_ROW)


@attention.many_programs(narrow_fails=True)
def many_batches(ends: Ends) -> Pairs:
    """With wide heads; o is allocated inside."""
    T, H, K = 64, 2, 256
    B = 2**31 // (T * H * K) + 1

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> Results:
        o, lse = attend(q, k, v)
        gradients = [x.new_empty(x.shape) for x in (q, k, v)]
        attend_backward(do, q, k, v, o, lse, *gradients)
        return [o, lse, *gradients]

    far = (ends.room(B * T * heads * K).view(B, T, heads, K) for heads in (H, 1, 1, H))
    return ends(call, H, *far)
