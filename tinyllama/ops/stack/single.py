"""A block in one cooperative launch forward and one backward: launchers, and their tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tinyllama.harness.kernels import cdiv, next_power_of_2, processors_of
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.grid_barrier import APART, Watchdog, cooperative, phases
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.ops import attention
from tinyllama.ops.attention import NARROW_HEAD
from tinyllama.ops.stack import launches, single_kernels
from tinyllama.ops.stack.configs import kind_of
from tinyllama.ops.stack.passes import Backward, Forward, Norm, Threes, heads_and_width

FORWARD_PHASES = ("q, k and v", "attention", "product of w_o", "gate and up", "product of w_down")
BACKWARD_PHASES = ("gate and up", "second norm", "product of w_o", "attention", "first norm")
CODES = 8  # of a pass of a block: one for each phase, and some to spare


def unfit(dims: Mapping[str, Any]) -> str | None:
    """Why sizes are not supported; None when they are."""
    width = 2 * dims["C"]
    if width <= NARROW_HEAD:
        return None
    return f"single has head dimension {width}: at most {NARROW_HEAD} is supported"


def _code(index: int, *, backward: bool) -> int:
    """The code of a block's first barrier."""
    return (2 * index + backward + 1) * CODES


def _described(code: int) -> str:
    pass_, phase = divmod(code - CODES, CODES)
    block, backward = divmod(pass_, 2)
    names = BACKWARD_PHASES if backward else FORWARD_PHASES
    return (
        f"a barrier of the {'backward' if backward else 'forward'} pass of block {block} did not "
        f"open: after phase {phase} ({names[phase]}) a program waited for others of its sequence "
        "that never came. Use the plan fused, and report this with the device and its driver"
    )


WATCHDOG = Watchdog(_described)


# Products BM BN BK; blocks of attention QM QN KM KN; warps. Registers decide: a program holds the
# addresses of several phases. At most 64 bytes are spilled, or limits.toml says how many.
FORWARD_TILES = {
    "16bit": (64, 64, 64, 64, 64, 8),
    "fp32": (64, 64, 32, 64, 32, 8),
    "tf32": (64, 64, 32, 64, 32, 8),
    "tf32x3": (64, 32, 32, 32, 16, 8),
}
BACKWARD_TILES = {
    "16bit": (64, 64, 64, 32, 32, 32, 32, 4),
    "fp32": (64, 64, 32, 32, 16, 16, 32, 4),
    "tf32": (64, 32, 32, 16, 16, 16, 16, 8),
    "tf32x3": (32, 32, 16, 16, 16, 16, 16, 8),
}


def _forward_default(tokens: int, width: int, D: int, kind: str) -> Config:
    *tiles, warps = FORWARD_TILES[kind]
    sizes = dict(zip(("BM", "BN", "BK", "QM", "QN"), tiles, strict=True))
    return Config(**sizes, GROUP=8, num_warps=warps, num_stages=2)


def _backward_default(tokens: int, width: int, D: int, kind: str) -> Config:
    *tiles, warps = BACKWARD_TILES[kind]
    sizes = dict(zip(("BM", "BN", "BK", "QM", "QN", "KM", "KN"), tiles, strict=True))
    return Config(**sizes, GROUP=8, num_warps=warps, num_stages=2)


def _stages(default: Callable[..., Config]) -> Callable[..., list[Config]]:
    """What a search may try: the default tiles, with one stage less and more."""
    return lambda **key: [
        Config(**{**default(**key).kwargs(), "num_stages": stages}) for stages in (2, 1, 3)
    ]


# Keys: powers of two that tokens and width do not exceed, D of a head, the kind of product.
FORWARD = Space("stack.single_forward", default=_forward_default, configs=_stages(_forward_default))
BACKWARD = Space(
    "stack.single_backward", default=_backward_default, configs=_stages(_backward_default)
)


class InOne:
    """All phases of a block are in one launch, with barriers between them; on a CPU, where programs
    run one after the other, each phase is a launch."""

    def __init__(self, x_BTD: torch.Tensor, layers: int) -> None:
        self.B, self.T, self.width = x_BTD.shape
        self.device, processors = x_BTD.device, processors_of(x_BTD.device)
        self.groups = min(self.B, processors)
        self.programs = processors // self.groups  # of a sequence, at most
        shape = (layers, self.groups, APART)
        # Set to 0 by the first launch of a pass.
        self.counters = torch.empty(shape, dtype=torch.int32, device=self.device)

    def begin(self, x_ND: torch.Tensor, norm: Norm, columns: int) -> torch.Tensor | None:
        return launches.fold(x_ND, norm.gain, norm.low, counters=self.counters)

    @staticmethod
    def turns(x: torch.Tensor, dtype: torch.dtype) -> int:
        return 0

    @classmethod
    def keeps_h(cls, low_ND: torch.Tensor, columns: int) -> bool:
        return True

    def begin_backward(
        self, dy_ND: torch.Tensor, low_ND: torch.Tensor, low_DN: torch.Tensor | None
    ) -> None:
        launches.fold(dy_ND, None, low_ND, counters=self.counters)

    def weight_gradients(self, threes: Threes, turned: bool) -> None:
        launches.weight_gradients(threes)

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        w, (H, G, K), hidden = (
            block.w,
            heads_and_width(block.qkv, block.o, block.cos),
            block.h.shape[-1],
        )
        config, constants = self._chosen(FORWARD, block.qkv, (H + 2 * G) * K, hidden, H * K, K)
        assert block.squares is not None
        n_parts, n_parts_1 = cdiv(self.width, config["BN"]), block.squares.shape[1]
        squares_2, squares = (block.squares.new_empty((len(block.x), n_parts)) for _ in range(2))
        last = block.after is None
        after_gain, after_low = (None, None) if block.after is None else block.after[:2]
        self._launch(
            single_kernels.single_forward_kernel,
            self._most(config, max((H + 2 * G) * K, self.width, 2 * hidden), H),
            *(block.low_1, w.qkv, block.squares, block.rstd, block.cos, block.sin, block.qkv),
            *(block.o, block.lse, w.out, block.x, block.total, block.mlp_norm, block.low_2),
            *(squares_2, w.gate_up, block.gate_up, block.h, w.down, block.y),
            *(after_gain, after_low, None if last else squares),
            *(*self._barriers(index, backward=False), block.eps, math.log2(math.e) * K**-0.5),
            *(self.B, self.T, self.width, H, G, hidden, n_parts_1, self.groups),
            PARTS_1=next_power_of_2(n_parts_1),
            PARTS=next_power_of_2(n_parts),
            **constants,
        )
        return None if last else squares

    def backward(self, index: int, block: Backward) -> None:
        w, (H, G, K), hidden = (
            block.w,
            heads_and_width(block.qkv, block.o, block.cos),
            block.gate_up.shape[-1] // 2,
        )
        config, constants = self._chosen(BACKWARD, block.qkv, (H + 2 * G) * K, hidden, H * K, K)
        n_parts = cdiv(hidden, config["BN"])
        parts = block.rstd.new_empty((len(block.x), n_parts))
        do = torch.empty_like(block.o)
        slope, scale = math.log2(math.e) * K**-0.5, K**-0.5
        self._launch(
            single_kernels.single_backward_kernel,
            self._most(config, max(H * K, self.width, hidden), H + G),
            *(block.dy_low, w.down, block.gate_up, block.rstd, block.dgate_up, parts, w.gate_up),
            *(block.total, block.mlp_norm, block.dy, block.dsum, block.dsum_low, block.gains[1]),
            *(block.dout, w.out, do, block.qkv, block.o, block.lse, block.cos, block.sin),
            *(block.dqkv, block.per_head, w.qkv, block.x, block.attention_norm),
            *(block.dx, block.dx_low, block.gains[0]),
            *(*self._barriers(index, backward=True), slope, scale),
            *(self.B, self.T, self.width, H, G, hidden, self.groups),
            PARTS=next_power_of_2(n_parts),
            HEADS=next_power_of_2(H + G),
            **constants,
        )

    def tile_rows(
        self, qkv_BTE: torch.Tensor, gate_up_NU: torch.Tensor, head_dim: int
    ) -> tuple[int, int]:
        rows = self.B * cdiv(self.T, self._config(BACKWARD, qkv_BTE, head_dim)["BM"])
        return rows, rows

    def _config(self, space: Space, qkv_BTE: torch.Tensor, head_dim: int) -> Config:
        D = max(16, next_power_of_2(head_dim))
        if reason := unfit({"C": head_dim // 2}):
            raise ValueError(reason)
        sizes = {"tokens": next_power_of_2(self.T), "width": next_power_of_2(self.width), "D": D}
        return space.choose(self.device, **sizes, kind=kind_of(qkv_BTE))

    def _chosen(
        self, space: Space, qkv_BTE: torch.Tensor, columns: int, hidden: int, heads: int, K: int
    ) -> tuple[Config, dict[str, Any]]:
        """The configuration, and the constants that follow from it and the sizes."""
        config = self._config(space, qkv_BTE, K)
        bm, bn, bk = config["BM"], config["BN"], config["BK"]
        even = not self.T % bm and not any(
            size % step for size in (columns, hidden, heads, self.width) for step in (bn, bk)
        )
        blocks = [size for name, size in config.constants if name in ("QM", "QN", "KM", "KN")]
        return config, {
            **{
                "K": K,
                "D": max(16, next_power_of_2(K)),
                "EVEN": even,
                "WHOLE": self.T % max(blocks) == 0,
            },
            **{"SPLIT": self.T > attention.FEW_TOKENS, "PRECISION": input_precision(qkv_BTE)},
            **config.kwargs(),
        }

    def _most(self, config: Config, columns: int, heads: int) -> int:
        """Programs of a sequence: so many that none is idle in every phase."""
        products = cdiv(self.T, config["BM"]) * cdiv(columns, config["BN"])
        blocks = [size for name, size in config.constants if name in ("QM", "KN")]
        return max(1, min(self.programs, max(products, cdiv(self.T, min(blocks)) * heads)))

    def _barriers(self, index: int, *, backward: bool) -> tuple[Any, ...]:
        status, code = WATCHDOG.status(self.device), _code(index, backward=backward)
        return self.counters[index], status, code, WATCHDOG.spins

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        for phase in phases(self.device, len(FORWARD_PHASES)):
            kernel[(self.groups * programs,)](
                *arguments, **constants, PHASE=phase, **cooperative(self.device)
            )
