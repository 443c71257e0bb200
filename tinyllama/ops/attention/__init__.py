"""Causal grouped-query attention: o = softmax(q k^T / sqrt(K) + mask) v.

Query head h reads key/value head h // (H / G)  (Ainslie et al., arXiv 2305.13245).
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import cdiv, next_power_of_2
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import contiguous, dense_rows
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.ops.attention import specialised as long
from tinyllama.ops.attention.configs import (
    BACKWARD,
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    BACKWARD_TURNED,
    FORWARD,
    SPECIALISED_FORWARD,
    SPECIALISED_KEYS,
    SPECIALISED_QUERIES,
)
from tinyllama.ops.attention.independent import causal_mask, multi_head, terms
from tinyllama.ops.attention.kernels import backward_kernel, forward_kernel
from tinyllama.ops.transpose import transposed

# On a GPU its fp32 kernel makes each product of three tf32 ones: errors up to 8.4 times what is
# otherwise allowed were seen on an H200, with keys far from zero.
SDPA_SLACK = {torch.float32: 12.0}
# dq cancels dP against delta = sum(o do), a sum in another order; eager cancels it against itself.
# Up to 1.25 times what is otherwise allowed was seen on an H200, in heads of 128 and 256.
FLASH_SLACK = {torch.float32: 1.5}


def ungrouped(H: int, G: int) -> str | None:
    """Why H query heads cannot share G key heads; None when they can."""
    if G > 0 and H % G == 0:
        return None
    return f"{H} query heads cannot share {G} key and value heads: H must be a multiple of G"


attention = Op(
    "attention",
    fits=lambda sizes: ungrouped(sizes["H"], sizes["G"]),
    inputs={
        "q": Tensor("B T H K", grad=True),
        "k": Tensor("B T G K", grad=True),
        "v": Tensor("B T G K", grad=True),
    },
    outputs={"o": "B T H K"},
    cases=[
        Case(B=2, T=17, H=4, G=2, K=16),
        Case(B=1, T=1, H=2, G=1, K=16, why="one token: the query's gradient is exactly zero"),
        Case(B=1, T=2, H=1, G=1, K=16, why="one head"),
        Case(B=1, T=33, H=6, G=2, K=32, why="three query heads a group; 32 + 1 tokens"),
        Case(B=1, T=31, H=4, G=4, K=64, why="no grouping; 32 - 1 tokens"),
        Case(B=1, T=130, H=2, G=1, K=16, why="several blocks of any kernel"),
        Case(B=2, T=64, H=2, G=1, K=16, why="whole blocks: nothing to mask but the diagonal"),
        Case(B=1, T=65, H=8, G=1, K=24, why="eight query heads a group; no power of two; 64 + 1"),
        Case(B=1, T=127, H=1, G=1, K=64, why="128 - 1 tokens"),
        Case(B=2, T=63, H=2, G=2, K=128, why="64 - 1 tokens, wide heads"),
        Case(B=1, T=35, H=2, G=1, K=256, why="the widest heads"),
        Case(B=1, T=9, H=2, G=1, K=5, why="heads narrower than any block"),
        Case(B=1, T=257, H=3, G=1, K=32, why="long enough for kernels in parts; 256 + 1 tokens"),
        Case(B=1, T=384, H=1, G=1, K=16, why="long, whole blocks"),
        Case(B=1, T=258, H=1, G=1, K=64, why="long, the model's heads"),
        Case(B=1, T=258, H=1, G=1, K=128, why="long, wide heads"),
        Case(B=1, T=258, H=1, G=1, K=256, why="long, the widest heads"),
    ],
    timed=[
        Case(B=4, T=64, H=4, G=2, K=32),
        Case(B=8, T=128, H=8, G=4, K=64),
        Case(B=16, T=512, H=16, G=8, K=64),
        Case(B=1, T=4096, H=32, G=8, K=64),
        Case(B=1, T=4096, H=32, G=8, K=128),
    ],
    extremes={
        "peaked": {"q": normal(3.0), "k": normal(3.0)},
        "flat": {"q": normal(1e-3), "k": normal(1e-3)},
        "shifted": {"k": normal(1.0, mean=20.0)},
    },
    bytes={
        "forward": lambda size, B, T, H, G, K: 2 * B * T * (H + G) * K * size,
        "backward": lambda size, B, T, H, G, K: 4 * B * T * (H + G) * K * size,
    },
    flops={  # causal: half of the T x T products; 2 products forward, 5 backward
        "forward": lambda B, T, H, G, K: 2 * B * H * T * (T + 1) * K,
        "backward": lambda B, T, H, G, K: 5 * B * H * T * (T + 1) * K,
    },
)


@attention.random_dims
def _grouped_heads(draw: Callable[[int, int], int]) -> dict[str, int]:
    groups = draw(1, 2)
    sizes = {"B": draw(1, 2), "T": draw(1, 40), "H": groups * draw(1, 3)}
    return {**sizes, "G": groups, "K": 2 * draw(1, 20)}


@attention.reference
def eager(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """q (B T H K), k and v (B T G K) -> o (B T H K); the T x T scores are materialised."""
    groups = q_BTHK.shape[2] // k_BTGK.shape[2]
    q_BHTK = q_BTHK.transpose(1, 2)
    k_BHTK = k_BTGK.transpose(1, 2).repeat_interleave(groups, dim=1)
    v_BHTK = v_BTGK.transpose(1, 2).repeat_interleave(groups, dim=1)
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) * q_BTHK.shape[-1] ** -0.5
    scores_BHTT = scores_BHTT.masked_fill(
        causal_mask(q_BTHK.shape[1], q_BTHK.device), float("-inf")
    )
    wide = torch.promote_types(scores_BHTT.dtype, torch.float32)
    weights_BHTT = torch.softmax(scores_BHTT, -1, dtype=wide).to(v_BHTK.dtype)
    return (weights_BHTT @ v_BHTK).transpose(1, 2)


@attention.provider(
    "torch", deterministic=frozenset({"cpu"}), double_backward=False, slack=SDPA_SLACK
)
def sdpa(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """Stock fused attention; its CUDA backward adds with atomics, so bits may differ.

    The fused kernels for 16-bit inputs read grouped heads in place; those for wider inputs
    do not, and would fall back to materialised scores, so K and V are expanded for them.
    """
    grouped = q_BTHK.dtype in (torch.bfloat16, torch.float16)
    if not grouped:
        q_BTHK = q_BTHK.contiguous()
    q_BTHK, k_BTGK, v_BTGK = (_aligned(x) for x in (q_BTHK, k_BTGK, v_BTGK))
    q_BHTK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    if not grouped:
        groups = q_BTHK.shape[2] // k_BTGK.shape[2]
        k_BGTK = k_BGTK.repeat_interleave(groups, dim=1)
        v_BGTK = v_BGTK.repeat_interleave(groups, dim=1)
    o_BHTK = F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped
    )
    o_BTHK = o_BHTK.transpose(1, 2)
    if o_BTHK.requires_grad and not torch.compiler.is_compiling():
        o_BTHK.register_hook(_aligned)
    return o_BTHK


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy if a row of x does not begin at a multiple of 16 bytes. The fused
    kernels of torch 2.11 do not check that: on an H100 they gave NaN, or an error after which every
    call on the GPU failed. Inductor copies such inputs itself."""
    if torch.compiler.is_compiling() or (x.is_contiguous() and x.storage_offset() == 0):
        return x
    starts = (x.storage_offset(), *x.stride()[:-1])
    if any(start * x.element_size() % 16 for start in starts):
        return x.clone(memory_format=torch.contiguous_format)
    return x


# -- kernels ----------------------------------------------------------------------------------

MAX_HEAD_DIM = 256
# Up to here a launch costs more than the work that it saves: one loop, with a mask, and one launch
# backward, unless the two kinds of programs in it would spill each other's registers.
FEW_TOKENS = 256
NARROW_HEAD = 64
# Wider heads, in products of three tf32 halves, have 1.4 times the error that is allowed.
NONE: Mapping[str, Any] = {}
WIDEST_IN_THREE = 128
# Within a block of rows offsets have 32 bits.
FARTHEST_ROW = 2**31 // 256


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x with strides that `_tile` can read; x itself where nothing has to change."""
    x = dense_rows(x)
    return x if x.stride(1) <= FARTHEST_ROW else contiguous(x)


def _operands(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """q, k and v in one dtype, the widest of theirs."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return [_readable(x.to(dtype)) for x in tensors]


def _statics(q_BTHK: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of the kernels, and the key of their configurations."""
    T, _, K = q_BTHK.shape[1:]
    if K > MAX_HEAD_DIM:
        raise ValueError(f"attention has head dimension {K}: up to {MAX_HEAD_DIM} is supported")
    D, precision = max(16, next_power_of_2(K)), input_precision(q_BTHK)
    if precision == "tf32x3" and D > WIDEST_IN_THREE:
        precision = "ieee"
    kind = {"ieee": "fp32"}.get(precision, precision) if q_BTHK.dtype is torch.float32 else "16bit"
    constants = {"K": K, "D": D, "PRECISION": precision, "SPLIT": T > FEW_TOKENS}
    return constants, {"D": D, "kind": kind}


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of the saved log-sum-exp: float64 where products have float32's accuracy. Rounded
    to float32 it caused the largest error of dv there, six times all others."""
    exact = q.dtype is torch.float32 and input_precision(q) != "tf32"
    return torch.float64 if exact else torch.float32


def _turns(config: Config, tokens: int) -> bool:
    """Whether products read transposed copies: where the configuration says so, and 32-bit offsets
    suffice."""
    return bool(dict(config.constants).get("TURN")) and tokens <= FARTHEST_ROW


def _turned(x_BTHK: torch.Tensor) -> torch.Tensor:
    """The transpose (H K, B T) of x, dense."""
    tokens = x_BTHK.shape[0] * x_BTHK.shape[1]
    try:
        return transposed(x_BTHK.view(tokens, -1))
    except RuntimeError:  # neither tokens nor heads lie at one distance
        return transposed(contiguous(x_BTHK).view(tokens, -1))


def _strides(*tensors: torch.Tensor | None) -> list[int]:
    """The strides of batch, token and head of each tensor; zeros for None."""
    return [s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3])]


def attend(
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    v_BTGK: torch.Tensor,
    *,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    turned: tuple[torch.Tensor | None, torch.Tensor] | None = None,
    options: Mapping[str, Any] = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B T H K), k and v (B T G K), any strides -> o (B T H K), contiguous, and lse (B H T).

    o has q's dtype (the widest of the three, should they differ); lse is the logarithm to base 2
    of sum(exp(q k / sqrt(K))), in `lse_dtype`. into: the memory for both, contiguous. turned: the
    transpose of v (G K, B T), or None, and the memory for that of o (H K, B T); for float32.
    options: more for the launch (see `tinyllama.harness.kernels.dependent`).
    """
    q, k, v = _operands(q_BTHK, k_BTGK, v_BTGK)
    (B, T, H, K), G = q.shape, k.shape[2]
    o, lse = into or (
        torch.empty((B, T, H, K), dtype=q.dtype, device=q.device),
        torch.empty((B, H, T), dtype=lse_dtype(q), device=q.device),
    )
    if o.numel() == 0:
        return o, lse
    constants, key = _statics(q)
    tiles = T // long.TILE * B * H
    config = long.specialised(SPECIALISED_FORWARD, (q, k, v, o), T, tiles)
    assert config is None or turned is None, "kernels with specialised warps are for 16 bits"
    if config is not None:
        long.forward(config, q, k, v, o, lse)
        return o, lse
    v_turned, o_turned = turned or (None, None)
    reads_turned = v_turned is not None and B * T <= FARTHEST_ROW
    length = "long" if constants["SPLIT"] else "turned" if reads_turned else "short"
    config = FORWARD.choose(q.device, **key, length=length)
    turn, strides = _turns(config, B * T) or length == "turned", _strides(q, k, v)
    if turn:
        v = _turned(v) if v_turned is None else v_turned
        strides[-3:] = (T, B * T, K * B * T)
    forward_kernel[(cdiv(T, config["QM"]) * B * H,)](
        *(q, k, v, o, lse, math.log2(math.e) * K**-0.5, T, H, G),
        *strides,
        **constants,
        EVEN=T % max(config["QM"], config["QN"]) == 0,
        **{**config.kwargs(), "TURN": turn, **options},
        o_turned=o_turned,
        tokens=None if o_turned is None else B * T,
    )
    return o, lse


def attend_backward(
    do_BTHK: torch.Tensor,
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    v_BTGK: torch.Tensor,
    o_BTHK: torch.Tensor,
    lse_BHT: torch.Tensor,
    dq_BTHK: torch.Tensor | None,
    dk_BTGK: torch.Tensor | None,
    dv_BTGK: torch.Tensor | None,
    cos_TC: torch.Tensor | None = None,
    sin_TC: torch.Tensor | None = None,
    *,
    scaled: tuple[torch.Tensor, torch.Tensor] | None = None,
    turned: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None, torch.Tensor]
    | None = None,
    options: Mapping[str, Any] = NONE,
) -> None:
    """Write the gradients of `attend`, every element, given that of o (any strides).

    dq (B T H K), dk and dv (B T G K) have a dense last axis and otherwise any strides. dq, or both
    dk and dv, may be None: then they are not computed. Given the tables (T C) that q and k were
    rotated by (see `rope`), dq and dk are the gradients of what was rotated. scaled: rstd (B T),
    float32, by which all rows are multiplied, and where each head's sums of dq q, and of dk k + dv
    v, over a row are written (B T, H + G), float32. turned, for float32: the transposes of q
    (H K, B T), k (G K, B T) and do, or None, and the memory for those of dq, dk and dv, below each
    other in one tensor. options: more for each launch.
    """
    q, k, v = _operands(q_BTHK, k_BTGK, v_BTGK)
    do, o, lse = _readable(do_BTHK), contiguous(o_BTHK), contiguous(lse_BHT)
    (B, T, H, K), G = q.shape, k.shape[2]
    if q.numel() == 0:
        for gradient in (dk_BTGK, dv_BTGK):  # of keys that no query sees
            if gradient is not None:
                gradient.zero_()
        return
    constants, key = _statics(q)
    gradients = (dq_BTHK, dk_BTGK, dv_BTGK)
    tables = [None if table is None else contiguous(table) for table in (cos_TC, sin_TC)]
    if any(x is not None and dense_rows(x) is not x for x in gradients):
        raise ValueError("attend_backward writes tensors with a dense last axis")
    queries, keys = dq_BTHK is not None, dk_BTGK is not None and dv_BTGK is not None
    turned_inputs, turned_gradients = turned or (None, None)

    def launch(space: Space, delta: torch.Tensor | None, *, queries: bool, keys: bool) -> None:
        config = space.choose(q.device, **key)
        blocks, turn = dict(config.constants), _turns(config, B * T)
        copies: tuple[torch.Tensor | None, ...] = (None,) * 3
        if space is BACKWARD_TURNED or (turn and turned_inputs is not None):
            assert turned_inputs is not None
            copies, turn = turned_inputs, True
        elif turn:
            copies = (
                _turned(q) if keys else None,
                _turned(k) if queries else None,
                _turned(do.to(q.dtype)) if keys else None,
            )
        key_programs = cdiv(T, blocks["KN"]) * B * G if keys else 0
        query_programs = cdiv(T, blocks["QM"]) * B * H if queries else 0
        backward_kernel[(key_programs + query_programs,)](
            *(q, k, v, o, do, lse, delta, *copies, B * T, *tables, *gradients),
            *(scaled or (None, None)),
            *(math.log2(math.e) * K**-0.5, K**-0.5, T, H, G, key_programs),
            *_strides(q, k, v, do, *gradients),
            **constants,
            KEYS=keys,
            QUERIES=queries,
            EVEN=T % max(blocks.values()) == 0,
            **{**config.kwargs(), "TURN": turn, **options},
            turned=turned_gradients,
        )

    if queries and keys and T <= FEW_TOKENS and constants["D"] <= NARROW_HEAD:
        reads_turned = turned_inputs is not None and B * T <= FARTHEST_ROW
        launch(BACKWARD_TURNED if reads_turned else BACKWARD, None, queries=True, keys=True)
        return
    delta = torch.empty_like(lse, dtype=torch.float32) if queries and keys else None
    of_q = of_k = None
    if delta is not None:  # which these kernels write and read
        more = ((lse, delta), tables, scaled or (None, None))
        tiles = T // long.TILE * B
        of_q = long.specialised(SPECIALISED_QUERIES, (q, k, v, do, o), T, tiles * H)
        of_k = long.specialised(SPECIALISED_KEYS, (q, k, v, do), T, tiles * G)
    if of_q is not None and dq_BTHK is not None:
        long.backward_queries(of_q, (q, k, v, do, o), dq_BTHK, *more)
    elif queries:
        launch(BACKWARD_QUERIES, delta, queries=True, keys=False)
    if of_k is not None and dk_BTGK is not None and dv_BTGK is not None:
        long.backward_keys(of_k, (q, k, v, do), (dk_BTGK, dv_BTGK), *more)
    elif keys:
        launch(BACKWARD_KEYS, delta, queries=False, keys=True)


@attention.provider(
    "triton",
    keep=("q", "k", "v", "o"),
    reads=dict.fromkeys(("q", "k", "v"), _readable),
    saved={"lse": Tensor("B H T", dtype_of=lse_dtype)},
    requires=("triton",),
    replays=True,
    slack=FLASH_SLACK,
    large=tuple(
        Large("B", "T*G*K", {"T": T, "H": H, "G": 1, "K": K}, settings={"FEW_TOKENS": 64})
        for T, H, K in ((17, 2, 64), (130, 1, 16))  # the second is several launches backward
    ),
    supports=lambda dims: None if dims["K"] <= MAX_HEAD_DIM else f"K is at most {MAX_HEAD_DIM}",
)
class Flash:
    """One launch forward; backward one for short sequences, else two. No T x T scores are stored,
    K and V are not expanded."""

    @staticmethod
    def forward(
        q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o_BTHK, lse_BHT = attend(q_BTHK, k_BTGK, v_BTGK)
        return o_BTHK.to(v_BTGK.dtype), lse_BHT

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs) -> Named:
        q, k, v, o = (inputs[name] for name in ("q", "k", "v", "o"))

        def needed(x: torch.Tensor, *names: str) -> torch.Tensor | None:
            return x.new_empty(x.shape) if needs & {*names} else None

        # dk and dv come from one pass, so one is not made without the other.
        dq, dk, dv = needed(q, "q"), needed(k, "k", "v"), needed(v, "k", "v")
        attend_backward(grads[0], q, k, v, o, saved["lse"], dq, dk, dv)
        gradients = {"q": dq, "k": dk, "v": dv}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}


attention.independent("torch.nn.functional.multi_head_attention_forward")(multi_head)
attention.magnitude(terms)
