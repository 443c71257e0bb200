"""Attention's kernels at offsets past 2^31."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Put, Results, randn, unwritten
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops.attention import FARTHEST_ROW, attend, attend_backward, attention
from tinyllama.ops.attention.configs import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD

T = 512  # tokens of a sequence, which is long


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


@attention.many_programs
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


@contextmanager
def _one_block(D: int, kind: str, **backward: int) -> Iterator[None]:
    """A program for each head of a sequence."""
    key: dict[str, Any] = {"D": D, "kind": kind}
    size = {"num_warps": 4, "num_stages": 1}
    of_queries, of_keys = {"QM": T, "QN": T, **size}, {"KN": T, "KM": T, "AHEAD": 0, **size}
    with (
        FORWARD.force(Config(**of_queries, TURN=0), **key, length="long"),
        BACKWARD_QUERIES.force(Config(**of_queries, **backward), **key),
        BACKWARD_KEYS.force(Config(**of_keys, **backward), **key),
    ):
        yield


def _written(ends: Ends, tokens: int, keys: bool) -> Pairs:
    """The transposes of o and of the gradients; keys: of k and v, too, else of q alone."""
    H, K, rows = 2, 136, 4 if keys else 2

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> Results:
        both_turned = o_turned, turned = [q.new_empty(n * K, len(q) * T) for n in (H, rows)]
        o, lse = attend(q, k, v, turned=(None, o_turned))
        dk, dv = (torch.empty_like(k) if keys else None for _ in range(2))
        attend_backward(do, q, k, v, o, lse, torch.empty_like(q), dk, dv, turned=(None, turned))
        return [x.view(-1, len(q), T).transpose(0, 1) for x in both_turned]

    shapes = [(tokens // T, T, heads, K) for heads in (H, 1, 1, H)]
    with _one_block(256, "16bit", TURN=0):
        return ends(call, H, *(ends.room(math.prod(shape)).view(shape) for shape in shapes))


@attention.many_programs
def many_heads_of_transposes(ends: Ends) -> Pairs:
    return _written(ends, FARTHEST_ROW, keys=True)


@attention.many_programs
def many_tokens_of_transposes(ends: Ends) -> Pairs:
    """Those of a single head lie beyond 2^31."""
    return _written(ends, 2 * FARTHEST_ROW, keys=False)


@attention.many_programs
def transposes_that_are_read(ends: Ends) -> Pairs:
    """In float32 alone. The last head lies beyond 2^31."""
    H, K, B = 5, 64, FARTHEST_ROW // T

    def room(*shape: int) -> torch.Tensor:
        return ends.room(2 * math.prod(shape)).view(torch.float32).view(shape)

    def turned(x: torch.Tensor) -> torch.Tensor:
        copy = room(x.shape[2], K, len(x), T)
        copy[:, :, [0, -1]] = x[[0, -1]].permute(2, 3, 0, 1)
        return copy.flatten(2).flatten(0, 1)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> Results:
        o, lse = attend(q, k, v)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        turned_inputs: Any = (turned(q), turned(k), turned(do)), None
        attend_backward(do, q, k, v, o, lse, *gradients, turned=turned_inputs)
        return gradients

    pairs = []
    with _one_block(K, "fp32", TURN=1):
        for G in (1, H):  # the last head of a group, and the last group
            pairs += ends(call, H, *(room(B, T, heads, K) for heads in (H, G, G, H)))
    return pairs
